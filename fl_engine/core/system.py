"""The process and its machine: the processor, new processes, and freed memory."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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


CPUINFO = Path("/proc/cpuinfo")
BROKEN, FITTING = "2.10.", "2.9.1"
"""On arm64, torch 2.10 contains LSE atomics in code that every processor runs. 2.9.1 does not."""


def _values(*names: str) -> list[str]:
    """The values of the lines of CPUINFO with these names; empty if the system is not Linux."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() in names]


@cache
def features() -> frozenset[str]:
    """Names of the processor's instruction sets: `flags` on x86, `Features` on Arm."""
    return frozenset(" ".join(_values("flags", "Features")).split())


@cache
def parts() -> tuple[str, ...]:
    """Types of the cores, e.g. `0x41 0xd08` (Arm, Cortex-A72); empty except on Arm."""
    return tuple(sorted(set(map(" ".join, zip(_values("CPU implementer"), _values("CPU part"), strict=False)))))


def check_torch() -> None:
    """Raise EnvironmentFailure if importing the installed torch would end this process with "Illegal instruction"."""
    if platform.machine() != "aarch64" or not features() or "atomics" in features():
        return
    from importlib import metadata  # takes a tenth of the time of `import flexfleet`

    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    if found.startswith(BROKEN):
        raise EnvironmentFailure(
            f"torch {found} needs a processor with LSE atomics (ARMv8.1), which this one does not have "
            f"(`atomics` is missing in {CPUINFO}). Install the version that fits: pip install torch=={FITTING}"
        )


LARGE_MODEL = 2**26
"""Bytes. A round of such a model takes seconds, beside which the page faults outside training count for nothing."""
WORKING_BLOCK, LARGE_BLOCK = 2**25, 2**20
"""Bytes. With a large model, larger blocks go back when they are freed: in training and evaluation (the largest number
that glibc takes), and outside of them."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_MANY = 2**16
"""Blocks that go back; more than a process has."""
_kept = False
"""Whether `keep_freed_memory` was called: else the heap is somebody else's, who has settings of his own."""


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks. Does nothing with other C libraries."""
    global _kept
    _kept = True
    _call("mallopt", _MMAP_MAX, 0)
    _call("mallopt", _TRIM_THRESHOLD, -1)
    _call("mallopt", _ARENA_MAX, 1)


def give_back(size: int) -> None:
    """Where a model of `size` bytes is large: gives freed memory back to the system, now and later."""
    if _kept and size >= LARGE_MODEL:
        _goes_back(LARGE_BLOCK)
        trim()


def trim() -> None:
    """Gives freed memory back to the system, once. Does nothing with other C libraries."""
    _call("malloc_trim", 0)


@contextmanager
def at_work(size: int) -> Iterator[None]:
    """Around training or evaluating a model of `size` bytes: freed memory is kept meanwhile, as far as the model's size
    allows."""
    if _kept and size >= LARGE_MODEL:
        _goes_back(WORKING_BLOCK)
    yield
    give_back(size)


def _goes_back(block: int) -> None:
    """Larger blocks than this, when they are freed."""
    _call("mallopt", _MMAP_MAX, _MANY)
    _call("mallopt", _MMAP_THRESHOLD, block)


def _call(name: str, *arguments: int) -> None:
    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
