"""Which code of the user's own may be imported: names `package.module:NAME`, and wheels (`storage.code`).

The user's configuration may name any module (`trust`). A name that only a file has, such as a run.json, a data.json, a
suite or a message, imports nothing: it is resolved if the configuration has named its package, if its module is
imported already, or if its package is listed in the environment's FLEXFLEET_ALLOWED_CODE.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ClientError, ConfigError

ALLOWED = "FLEXFLEET_ALLOWED_CODE"
"""With commas between them, the sha256 of wheels (`storage.code`) and the names of packages; `none`: neither a wheel
nor a package. If it is set, the user's configuration may name nothing else either."""
TRUSTED = "FLEXFLEET_TRUSTED_CODE"
"""What the process that started this one trusts, with commas between (`for_child`)."""
OURS = ("fl_engine", "flexfleet")
INSTALLED = frozenset(("site-packages", "dist-packages"))
NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")

wheels: dict[str, tuple[str, str]] = {}
"""By a package's name, the wheel from which this process imports it: the sha256, and the file."""
trusted: set[str] = set(filter(None, os.environ.get(TRUSTED, "").split(",")))
"""The names and the sha256 of wheels that the user's configuration has named in this process."""


def trust(values: Any) -> None:
    """Allow this process to import what the user's own values name: each `package.module:NAME` in nested mappings and
    lists."""
    trusted.update(_names(values))


def for_child() -> dict[str, str]:
    """Environment with which a new process trusts the same names."""
    return {TRUSTED: ",".join(sorted(trusted))}


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if NAME.fullmatch(value):
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _names(each)


def _listed() -> set[str] | None:
    said = os.environ.get(ALLOWED)
    return None if said is None else {each.strip() for each in said.split(",")}


def check_wheel(digest: str, stored: bool = False) -> None:
    """Raise ClientError unless the wheel of this sha256 may be imported on this machine. `stored`: only a file has
    named the wheel, neither the user's configuration nor the coordinator."""
    listed = _listed()
    if listed is not None and digest not in listed:
        raise ClientError(
            f"the code {digest} is not allowed on this device ({ALLOWED} = {os.environ[ALLOWED][:200]}): its owner "
            "adds the sha256, or the run does without this client"
        )
    if stored and listed is None and digest not in trusted:
        raise ConfigError(
            f"the code {digest} is named by a file alone, so it is not imported. If you trust whoever wrote the file, "
            f"set {ALLOWED}={digest} in the environment"
        )


def check_module(name: str, what: str) -> None:
    """Raise ConfigError unless the module of `package.module:NAME` may be imported on this machine. `what`: the kind of
    thing that the name stands for. A wheel that is enabled was checked before."""
    module = name.partition(":")[0]
    listed, package = _listed(), module.partition(".")[0]
    if package in OURS or package in wheels:
        return
    if listed is not None and package not in listed - {"none"}:
        raise ConfigError(
            f"{what} {name!r} is not imported on this machine ({ALLOWED} = {os.environ[ALLOWED][:200]}): its owner "
            f"adds {package!r}, or the configuration names something else"
        )
    known = {each.partition(":")[0].partition(".")[0] for each in trusted}
    if listed is None and package not in known and module not in sys.modules:
        raise ConfigError(
            f"{what} {name!r} is named by a file alone, so its module is not imported. If you trust it, import "
            f"{module} first, name it in your configuration, or set {ALLOWED}={package} in the environment"
        )


def check_call(found: Any, name: str, what: str) -> None:
    """Raise ConfigError for a function that only a file names, unless it is the user's own: its module lies outside of
    the installed packages. A class is not called before its kind is checked, so any class passes."""
    if isinstance(found, type) or not callable(found):
        return
    module = name.partition(":")[0]
    listed, package = _listed(), module.partition(".")[0]
    if package in wheels or name in trusted or (listed is not None and package in listed):
        return
    if listed is not None or package in OURS or getattr(found, "__module__", None) != module or _installed(module):
        raise ConfigError(
            f"{what} {name!r} is a function that is named by a file alone, so it is not called. If you trust it, name "
            f"it in your configuration, or set {ALLOWED}={package} in the environment"
        )


def _installed(module: str) -> bool:
    """Whether an imported module belongs to Python or to an installed package."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return module != "__main__"  # a notebook has no file
    path = Path(file)
    return path.is_relative_to(sysconfig.get_path("stdlib")) or not INSTALLED.isdisjoint(path.parts)
