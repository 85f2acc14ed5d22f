"""Which user code may be imported: names `package.module:NAME`, and wheels (`storage.code`).

The user's configuration may name any module (`trust`). A name that occurs only in a file, such as a run.json, a suite
or a message, imports nothing: it is resolved only if the configuration has named its package, if its module is already
imported, or if the environment's FLEXFLEET_ALLOWED_CODE lists its package.
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
"""Comma-separated sha256 of wheels and names of packages; `none` allows nothing. If it is set, the user's configuration
cannot name anything else either."""
TRUSTED = "FLEXFLEET_TRUSTED_CODE"
"""Comma-separated names that the parent process trusts (`for_child`)."""
OURS = ("fl_engine", "flexfleet")
INSTALLED = frozenset(("site-packages", "dist-packages"))
NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")

wheels: dict[str, tuple[str, str]] = {}
"""Map a package to the sha256 and the file of the wheel from which this process imports it."""
trusted: set[str] = set(filter(None, os.environ.get(TRUSTED, "").split(",")))
"""The names and the sha256 of wheels in this process's configuration."""


def trust(values: Any) -> None:
    """Allow this process to import each `package.module:NAME` in the user's values, nested mappings and lists
    included."""
    trusted.update(_names(values))


def for_child() -> dict[str, str]:
    """Return the environment with which a new process trusts the same names."""
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
    """Raise ClientError unless the wheel of this sha256 may be imported on this machine. `stored`: only a file names
    the wheel, neither the user's configuration nor the coordinator."""
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
    """Raise ConfigError unless the module of `package.module:NAME` may be imported on this machine. `what` is the kind
    of object that the name stands for. Enabled wheels were checked before."""
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
    """Raise ConfigError for a function that only a file names, unless its module lies outside of the installed
    packages. A class passes, because its kind is checked before it is called."""
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
    """Return whether an imported module belongs to Python or to an installed package."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return module != "__main__"  # a notebook has no file
    path = Path(file)
    return path.is_relative_to(sysconfig.get_path("stdlib")) or not INSTALLED.isdisjoint(path.parts)
