"""Computes how much memory this process can still use.

The result is the smallest of these values: `limit - used` of each cgroup (version 2), and the node's available memory.
As in the kubelet, `used` excludes the page cache that the kernel can drop (`inactive_file`). A systemd service sees all
cgroups of the machine, so the limits of its own cgroup and of all enclosing cgroups apply.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from fl_engine.core.errors import EnvironmentFailure


def room(held: int) -> int:
    """Return the number of bytes that this container can still use. If a cgroup does not report its usage, the usage is
    assumed to be `held` bytes. Raises EnvironmentFailure if the container has no memory limit."""
    root = _root()
    if _limit(root) is None:
        text = f"kubernetes.observe=cgroup requires a memory limit in {root}. Set a limit in kubernetes.pools"
        raise EnvironmentFailure(text, path="kubernetes.observe")
    return room_of_device(held)


def room_of_device(held: int) -> int:
    """Return the free memory in bytes. Raises EnvironmentFailure if the free memory is unknown."""
    proc, left = Path(os.environ.get("FLEXFLEET_PROC", "/proc")), list[int]()
    for folder in _own(_root(), proc):
        if (limit := _limit(folder)) is not None:
            usage, cache = _number(folder / "memory.current"), _number(folder / "memory.stat", "inactive_file")
            left.append(max(0, limit - (held if usage is None else max(0, usage - (cache or 0)))))
    kilobytes = _number(proc / "meminfo", "MemAvailable:")
    if kilobytes is not None:
        left.append(1024 * kilobytes)
    if not left:
        raise EnvironmentFailure("free memory cannot be measured. Set agents.observe=simulated or pass --memory MB")
    return min(left)


def _root() -> Path:
    return Path(os.environ.get("FLEXFLEET_CGROUP", "/sys/fs/cgroup"))


def _own(root: Path, proc: Path) -> list[Path]:
    """Return the directories of this process's cgroup and of all enclosing cgroups. Some directories may not exist."""
    found = re.findall(r"^0::/(.*)$", _text(proc / "self" / "cgroup"), re.MULTILINE)
    paths = [PurePosixPath(path) for path in found if ".." not in path.split("/")]
    return list(dict.fromkeys([root, *(root / each for path in paths for each in (path, *path.parents))]))


def _limit(folder: Path) -> int | None:
    return _number(folder / "memory.max")  # If there is no limit, the file contains "max", which is not a number.


def _number(file: Path, name: str = "") -> int | None:
    """Return the number in the line that starts with `name`; None if no such line exists."""
    match = re.search(rf"^{re.escape(name)}\s*([0-9]{{1,20}})(?: kB)?\s*$", _text(file), re.MULTILINE)
    return int(match[1]) if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
