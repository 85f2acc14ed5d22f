"""What Linux reports about the processor, without importing torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from fl_engine.core.errors import EnvironmentFailure

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
