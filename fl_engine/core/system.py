"""Functions that check the processor, start processes, and measure and release memory. This module does not import
torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
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
    """Update `hash` with the content of a file, and return `hash`. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        while piece := file.read(2**20):
            hash.update(piece)
    return hash


def of_posix(module: str) -> Any:
    """Import a standard-library module that only Linux and macOS have. Raises EnvironmentFailure on other systems."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentFailure(
            f"training requires Linux or macOS, because {sys.platform} does not have {module}. On Windows, install WSL"
        ) from error


@contextmanager
def without_main() -> Iterator[None]:
    """Prevent a new process from importing the parent's main module, because an unguarded script would run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def exit_text(exit_code: int | None) -> str:
    """Describe how a multiprocessing process ended, for an error message."""
    return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"


CPUINFO = Path("/proc/cpuinfo")
BROKEN, FITTING = "2.10.", "2.9.1"
"""Torch 2.10 uses LSE atomics on every arm64 processor. Torch 2.9.1 runs on processors without LSE atomics."""


def cpu_values(*names: str) -> list[str]:
    """Return the values of the fields in CPUINFO with these names. The result is empty if the system is not Linux."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() in names]


@cache
def features() -> frozenset[str]:
    """Return the names of the processor's instruction sets (`flags` on x86, `Features` on Arm)."""
    return frozenset(" ".join(cpu_values("flags", "Features")).split())


@cache
def parts() -> tuple[str, ...]:
    """Return the types of an Arm processor's cores, such as `0x41 0xd08` (Cortex-A72), or an empty tuple."""
    return tuple(sorted(set(map(" ".join, zip(cpu_values("CPU implementer"), cpu_values("CPU part"), strict=False)))))


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation of flexfleet: a checkout, a wheel or a package
    from an index."""
    from importlib import metadata  # this import is slow and rarely required

    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{'.' if checkout == Path.cwd() else checkout}[{extra}]'"
    found = next(iter(metadata.distributions(name="flexfleet")), None)
    origin = found and found.read_text("direct_url.json")  # pip writes this file unless an index has the package
    return f"pip install 'flexfleet[{extra}]{' @ ' + json.loads(origin)['url'] if origin else ''}'"


def check_torch() -> None:
    """Raise EnvironmentFailure if importing the installed torch would end the process with "Illegal instruction"."""
    if platform.machine() == "aarch64" and features() and "atomics" not in features():
        from importlib import metadata  # this import is slow and rarely required

        for found in metadata.distributions(name="torch"):
            if found.version.startswith(BROKEN):
                raise EnvironmentFailure(
                    f"torch {found.version} requires a processor with LSE atomics (ARMv8.1), but this processor does "
                    f"not have them. Install another version: pip install torch=={FITTING}"
                )


# Every training step allocates blocks of the same sizes. Page faults for new pages take up to a fifth of a step's time,
# so glibc is configured to keep freed blocks during training. Freed models, however, fragment the heap, because an
# aligned block often does not fit into the gap of a freed block of the same size. Fragmentation can increase a
# coordinator's memory to ten times the size of its model. Therefore large blocks are returned to the system after
# training.
LARGE_MODEL = 2**26
"""Minimum bytes of a large model. For a large model, page faults take a negligible part of a round's time."""
WORKING_BLOCK, LARGE_BLOCK = 2**25, 2**20
"""Minimum sizes, in bytes, of freed blocks that are returned to the system if the model is large. WORKING_BLOCK is the
largest value that glibc accepts, and applies during training and evaluation. LARGE_BLOCK applies at all other times."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_MANY = 2**16
"""Limit on the number of memory mappings, which is so high that no process reaches it."""
_kept = False
"""True after `keep_freed_memory`. If False, glibc is not configured, because the process runs the user's program."""


def keep_freed_memory() -> None:
    """Configure glibc to keep freed blocks. With other C libraries, this function does nothing."""
    global _kept
    _kept = True
    _call("mallopt", _MMAP_MAX, 0)
    _call("mallopt", _TRIM_THRESHOLD, -1)
    _call("mallopt", _ARENA_MAX, 1)


def give_back(size: int) -> None:
    """If a model of `size` bytes is large, return freed memory to the system now and after each later free."""
    if _kept and size >= LARGE_MODEL:
        _map_blocks_from(LARGE_BLOCK)
        trim()


def trim() -> None:
    """Return freed memory to the system once. With other C libraries, this function does nothing."""
    _call("malloc_trim", 0)


@contextmanager
def at_work(size: int) -> Iterator[None]:
    """During training or evaluation, keep freed memory in the process. If the model (`size` bytes) is large, return
    blocks of at least WORKING_BLOCK bytes to the system nevertheless."""
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


def resident_peak() -> int:
    """Return the peak of this process's resident memory in bytes, since its start or the last `restart_peak`."""
    # `getrusage` includes the parent's peak, so prefer /proc. On macOS `getrusage` returns bytes.
    if not Path("/proc/self/status").exists():
        resource = of_posix("resource")
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return _status("VmHWM")


def restart_peak() -> tuple[int, int]:
    """Reset the peak that `resident_peak` returns. Return the current memory and the previous peak, in bytes. Without
    /proc/self (macOS), the peak is not reset and is returned for both."""
    peak = resident_peak()
    try:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # writing 5 sets VmHWM to VmRSS, see proc(5)
    except OSError:
        return peak, peak
    return _status("VmRSS"), peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
