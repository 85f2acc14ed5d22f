"""What the owner of a machine lets runs import there: the environment's FLEXFLEET_ALLOWED_CODE."""

from __future__ import annotations

import os

from fl_engine.core.errors import ClientError, ConfigError

ALLOWED = "FLEXFLEET_ALLOWED_CODE"
"""With commas between them, the sha256 of wheels (`exchange.code`) and the names of installed packages; `none`: neither
a wheel nor a package; not set: what the coordinator has signed, and what its configuration names."""
OURS = ("fl_engine", "flexfleet")

wheels: dict[str, tuple[str, str]] = {}
"""By a package's name, the wheel from which this process imports it: the sha256, and the file."""


def _listed() -> set[str] | None:
    said = os.environ.get(ALLOWED)
    return None if said is None else {each.strip() for each in said.split(",")}


def check_wheel(digest: str) -> None:
    """Raises ClientError where this machine's owner does not let the wheel of this sha256 run."""
    listed = _listed()
    if listed is not None and digest not in listed:
        raise ClientError(
            f"the code {digest} is not allowed on this device ({ALLOWED} = {os.environ[ALLOWED][:200]}): its owner "
            "adds the sha256, or the run does without this client"
        )


def check_module(module: str, what: str) -> None:
    """`what` names something in the module. Raises ConfigError where this machine's owner does not let that be
    imported. A wheel that is enabled was checked before."""
    listed, package = _listed(), module.partition(".")[0]
    if listed is None or package in OURS or package in wheels or package in listed - {"none"}:
        return
    raise ConfigError(
        f"{what} is not imported on this machine ({ALLOWED} = {os.environ[ALLOWED][:200]}): its owner adds "
        f"{package!r}, or the configuration names something else"
    )
