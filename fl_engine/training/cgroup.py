"""The memory that a container or a device can still take, read from its cgroup (version 2 or 1) and its node.

    room = min(limit - used, what the node has available) * (1 - share of the time in which everything waits for memory)

A systemd service sees the cgroups of the whole machine, so its own limit and those of the cgroups around it count.
`used` is the working set, as the kubelet counts it: without the page cache that the kernel can drop (`inactive_file`).
The last factor is a rule of this project, because memory that the node lends to several pods can be gone before a limit
is reached.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fl_engine.core.errors import EnvironmentFailure

NO_LIMIT = 2**60
"""Values from here on mean no limit: version 1 of the cgroup file system writes about 2^63."""


class _Version(NamedTuple):
    folder: str
    limit: str
    usage: str
    stat: str
    cache: str
    """The line of `stat` with the droppable page cache, in bytes."""


VERSIONS = (
    _Version("", "memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)


def _cgroup(root: Path | None) -> Path:
    return root or Path(os.environ.get("FLEXFLEET_CGROUP", "/sys/fs/cgroup"))


def _proc(proc: Path | None) -> Path:
    return proc or Path(os.environ.get("FLEXFLEET_PROC", "/proc"))


def limit(root: Path | None = None) -> int:
    """This container's memory limit in bytes, read from the cgroup file system at `root`, by default FLEXFLEET_CGROUP
    or /sys/fs/cgroup."""
    found = _limit(root, "")
    if found is None:
        raise EnvironmentFailure(
            f"kubernetes.observe=cgroup, but {_cgroup(root)} has no memory limit. Set one for the "
            "tier's pool (kubernetes.pools)"
        )
    return found


def _limit(root: Path | None, below: str) -> int | None:
    for version in VERSIONS:
        found = _number(_text(_cgroup(root) / version.folder / below / version.limit))
        if found is not None and found < NO_LIMIT:
            return found
    return None


def used(root: Path | None = None, below: str = "") -> int | None:
    """The working set in bytes of the cgroup `below` the root; None if it is not known."""
    for version in VERSIONS:
        folder = _cgroup(root) / version.folder / below
        usage = _number(_text(folder / version.usage))
        if usage is not None:
            cache = _number(_field(_text(folder / version.stat), version.cache)) or 0
            return max(0, usage - cache)
    return None


def _own(proc: Path | None) -> list[str]:
    """The root's cgroup, this process's cgroup and those between them, as folders below the root. A container does not
    see some of these folders."""
    found = re.findall(r"^\d+:(?:memory)?:/(.*)$", _text(_proc(proc) / "self" / "cgroup"), re.MULTILINE)
    paths = [PurePosixPath(path) for path in found if ".." not in path.split("/")]
    return list(dict.fromkeys([".", *(str(each) for path in paths for each in (path, *path.parents))]))


def available(proc: Path | None = None) -> int | None:
    """Bytes that the node can provide without swapping; None if it is not known."""
    kilobytes = _number(_field(_text(_proc(proc) / "meminfo"), "MemAvailable:"))
    return None if kilobytes is None else 1024 * kilobytes


def stalled(root: Path | None = None, proc: Path | None = None) -> float:
    """The share of the last ten seconds in which everything waited for memory, in the cgroup or on the node, whichever
    is larger (pressure stall information, `full avg10`); 0 if the kernel does not measure it."""
    texts = [_text(_cgroup(root) / below / "memory.pressure") for below in _own(proc)]
    texts.append(_text(_proc(proc) / "pressure" / "memory"))
    found = [re.search(r"^full avg10=([0-9]{1,3}(?:\.[0-9]{1,6})?) ", text, re.MULTILINE) for text in texts]
    return max((min(1.0, float(match[1]) / 100) for match in found if match), default=0.0)


def room(held: int, root: Path | None = None, proc: Path | None = None) -> int:
    """Bytes that this container can take now. `held` counts as used if the cgroup's usage is not known. Raises
    EnvironmentFailure without a limit."""
    limit(root)
    return room_of_device(held, root, proc)


def room_of_device(held: int, root: Path | None = None, proc: Path | None = None) -> int:
    """Like `room`, for a process without a limit, too. Raises EnvironmentFailure if nothing is known."""
    left, node = [], available(proc)
    for below in _own(proc):
        if (most := _limit(root, below)) is not None:
            taken = used(root, below)
            left.append(max(0, most - (held if taken is None else taken)))
    if node is not None:
        left.append(node)
    if not left:
        raise EnvironmentFailure(
            "this system does not report how much memory is free. Give the process a memory limit, set "
            "agents.observe=simulated, or for `flexfleet profile` pass --memory MB"
        )
    return int(min(left) * (1.0 - stalled(root, proc)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,20}", text := text.strip()) else None


def _field(text: str, name: str) -> str:
    """The number after a name at the start of a line; "" if there is none."""
    match = re.search(rf"^{re.escape(name)}\s+([0-9]{{1,20}})(?: kB)?\s*$", text, re.MULTILINE)
    return match[1] if match else ""
