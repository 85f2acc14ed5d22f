"""Decide which modules and wheels with user code (`storage.code`) this process may import.

The user's own configuration may name any module (`trust`). A name that is read from a file, such as a run.json, a suite
or a message, is resolved only if its module is already imported or its package is trusted. A package is trusted if the
configuration or the environment variable FLEXFLEET_TRUSTED_CODE names it.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError

TRUSTED = "FLEXFLEET_TRUSTED_CODE"
"""Environment variable: comma-separated list of trusted packages, `package.module:NAME` objects and wheel hashes."""
OURS = ("fl_engine", "flexfleet")
LOCAL = "__local__"
"""Module name for objects that only this process can use, such as a class inside a function."""
NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")

wheels: dict[str, tuple[str, str]] = {}
"""Map each package that was imported from a wheel to the SHA-256 hash and the path of this wheel."""
trusted: set[str] = set(filter(None, os.environ.get(TRUSTED, "").replace(" ", "").split(",")))
"""Trusted packages, objects (`package.module:NAME`) and SHA-256 hashes of wheels."""


def trust(values: Any) -> None:
    """Allow this process to import each `package.module:NAME` in `values`, which may be nested mappings and lists."""
    trusted.update(_names(values))


def for_child() -> dict[str, str]:
    """Return environment variables with which a child process trusts the same code as this process."""
    return {TRUSTED: ",".join(sorted(trusted))}


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if NAME.fullmatch(value):
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _names(each)


def check_wheel(digest: str) -> None:
    """Raise ConfigError unless the user trusts the wheel with the SHA-256 hash `digest`."""
    if digest not in trusted:
        raise ConfigError(
            f"the wheel {digest} is not trusted. To trust the wheel, set {TRUSTED}={digest} in the environment",
            code="config.own_code",
        )


def check_module(name: str, what: str) -> None:
    """Raise ConfigError unless the module in `name` is already imported or its package is trusted. The error message
    begins with `what`, a description of the object."""
    module, _, own = name.partition(":")
    package = module.partition(".")[0]
    if module == LOCAL and not hasattr(sys.modules.get(LOCAL), own):
        raise ConfigError(
            f"{what} {own!r} was passed as an object or defined inside a function, so only the process that defined it "
            "can use it. Create the same object again and pass it to flexfleet.run(..., run_id=..., resume=True)",
            code="config.own_code",
        )
    packages = {each.partition(":")[0].partition(".")[0] for each in trusted}
    if package not in (*OURS, *wheels, *packages) and module not in sys.modules:
        raise ConfigError(
            f"{what} {name!r} is named in a file but not in your configuration, so its module is not imported. To "
            f"trust {module}, import it first, name it in your configuration, or set {TRUSTED}={package} in the "
            "environment",
            code="config.own_code",
        )


def check_call(value: Any, name: str, what: str) -> None:
    """Raise ConfigError if `value` is an untrusted function from an installed package or from a module other than the
    module in `name`. Classes are accepted, because callers check the class before they call it."""
    module = name.partition(":")[0]
    package = module.partition(".")[0]
    if isinstance(value, type) or not callable(value) or package in wheels or not trusted.isdisjoint((name, package)):
        return
    if package in OURS or getattr(value, "__module__", None) != module or is_installed(module):
        raise ConfigError(
            f"{what} {name!r} is a function that is named in a file but not in your configuration, so it is not "
            f"called. If you trust the function, name it in your configuration, or set {TRUSTED}={package} in the "
            "environment",
            code="config.own_code",
        )


def is_installed(module: str) -> bool:
    """Return whether an imported module belongs to Python's standard library or to an installed package."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return module != "__main__"  # a notebook's __main__ does not have a file
    path = Path(file)
    return path.is_relative_to(sysconfig.get_path("stdlib")) or "site-packages" in path.parts
