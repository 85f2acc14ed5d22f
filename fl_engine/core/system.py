"""What not every Python and system has, what a new process imports and ends with, and how often memory is searched for
cycles."""

from __future__ import annotations

import gc
import hashlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fl_engine.core.errors import EnvironmentFailure

H = TypeVar("H", bound="hashlib._Hash")


def hashed(path: Path, hash: H) -> H:
    """`hash`, fed with the file's content in pieces, as `hashlib.file_digest` does from Python 3.11 on. Raises
    OSError."""
    with path.open("rb") as file:
        while piece := file.read(2**20):
            hash.update(piece)
    return hash


def of_posix(module: str) -> Any:
    """A module of Python's that is there on Linux and macOS. Raises EnvironmentFailure where the system has none."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentFailure(
            f"training needs Linux or macOS, and this is {sys.platform}, whose Python has no {module}: on Windows "
            "install WSL (wsl --install) and flexfleet in it. Here init, params, list, check and report work"
        ) from error


@contextmanager
def without_main() -> Iterator[None]:
    """Around the start of a process. It would import the main module of the process that starts it: a script would run
    again in each worker, unless its author has guarded it. Workers need nothing of it: what a cell or a script itself
    defines is refused before."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


GROWN = 100_000
"""Objects that come to be between two searches for cycles; Python's own number is 700."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Around work whose objects stay until its end, such as imports, a run's history and its drawings: to search among
    them for cycles again and again takes a seventh of the time of a report."""
    young, *older = gc.get_threshold()
    gc.set_threshold(GROWN, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def told_exit(exit_code: int | None) -> str:
    """How a process of multiprocessing has ended."""
    return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
