"""The process and its machine: the processor, new processes, and freed memory. Imports no torch."""

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
    """Feed `hash` with the file's content and return it (`hashlib.file_digest` needs Python 3.11). Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(2**20):
            hash.update(piece)
    return hash


def of_posix(module: str) -> Any:
    """Import a standard module that only Linux and macOS have. Raises EnvironmentFailure on other systems."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentFailure(
            f"training needs Linux or macOS, got {sys.platform}, whose Python has no {module}. On Windows install WSL "
            "(wsl --install) and flexfleet in it"
        ) from error


@contextmanager
def without_main() -> Iterator[None]:
    """Keep a new process from importing the parent's main module, which would run an unguarded script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


GROWN = 100_000
"""New objects between two garbage collections; Python's default is 700."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage seldom while objects stay alive anyway, as in imports and reports. Saves a seventh of a report's
    time."""
    young, *older = gc.get_threshold()
    gc.set_threshold(GROWN, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def told_exit(exit_code: int | None) -> str:
    """Return how a multiprocessing process ended, for an error message."""
    return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"


# ---------------------------------------------------------------------------------------------- the processor
CPUINFO = Path("/proc/cpuinfo")
BROKEN, FITTING = "2.10.", "2.9.1"
"""On arm64, torch 2.10 executes LSE atomics on every processor. 2.9.1 does not."""


def _values(*names: str) -> list[str]:
    """Return the values of CPUINFO's lines with these names; empty if the system is not Linux."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() in names]


@cache
def features() -> frozenset[str]:
    """Return the names of the processor's instruction sets (`flags` on x86, `Features` on Arm)."""
    return frozenset(" ".join(_values("flags", "Features")).split())


@cache
def parts() -> tuple[str, ...]:
    """Return the types of the cores, e.g. `0x41 0xd08` (Arm, Cortex-A72); empty except on Arm."""
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


# ------------------------------------------------------------------------------------------------- the C heap
# Every training step allocates the same blocks again, and each fresh page costs a page fault: up to a fifth of a
# step's time. So glibc keeps freed blocks. But freed models leave holes that aligned blocks of the same size do not
# fit into: with all of them kept, a coordinator held ten times its model. So large blocks go back outside of training.
LARGE_MODEL = 2**26
"""Bytes. A round of a model of this size takes seconds, so page faults outside of training do not matter."""
WORKING_BLOCK, LARGE_BLOCK = 2**25, 2**20
"""Bytes. With a large model, blocks above these sizes return to the system when they are freed: during training and
evaluation (the largest value that glibc accepts), and outside of them."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_MANY = 2**16
"""Maximal number of mapped blocks; more than a process has."""
_kept = False
"""Whether `keep_freed_memory` was called. Otherwise the process belongs to the user, and its heap stays as it is."""


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks. Does nothing with other C libraries."""
    global _kept
    _kept = True
    _call("mallopt", _MMAP_MAX, 0)
    _call("mallopt", _TRIM_THRESHOLD, -1)
    _call("mallopt", _ARENA_MAX, 1)


def give_back(size: int) -> None:
    """If a model of `size` bytes is large, return freed memory to the system, now and from now on."""
    if _kept and size >= LARGE_MODEL:
        _map_blocks_from(LARGE_BLOCK)
        trim()


def trim() -> None:
    """Return freed memory to the system, once. Does nothing with other C libraries."""
    _call("malloc_trim", 0)


@contextmanager
def at_work(size: int) -> Iterator[None]:
    """Keep freed memory while a model of `size` bytes is trained or evaluated, as far as its size allows."""
    if _kept and size >= LARGE_MODEL:
        _map_blocks_from(WORKING_BLOCK)
    yield
    give_back(size)


def _map_blocks_from(size: int) -> None:
    _call("mallopt", _MMAP_MAX, _MANY)
    _call("mallopt", _MMAP_THRESHOLD, size)


def _call(name: str, *arguments: int) -> None:
    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
