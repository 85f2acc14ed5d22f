"""What Python has on Linux and macOS alone, and what a new process imports and ends with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fl_engine.core.errors import EnvironmentFailure


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


def told_exit(exit_code: int | None) -> str:
    """How a process of multiprocessing has ended."""
    return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
