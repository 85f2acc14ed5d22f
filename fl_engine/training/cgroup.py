"""How much memory a container or a device can still take, read anew each time: what its cgroup (version 2 or 1) and its
node say.

    room = min(limit - used, what the node has available) * (1 - share of the time in which everything waits for memory)

A service of systemd sees the cgroups of the whole machine: there the limits count of its own and of those around it.

`used` is the working set, as the kubelet counts it: without the page cache that the kernel can drop (`inactive_file`).
The last factor is a rule of this project: what the node lends to several pods can be gone before a limit is reached.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fl_engine.core.errors import EnvironmentFailure

NO_LIMIT = 2**60
"""From this value on there is no limit: version 1 of the cgroup file system writes about 2^63 for none."""


class _Version(NamedTuple):
    folder: str
    """Below the root."""
    limit: str
    usage: str
    stat: str
    cache: str
    """The line of `stat` with the page cache that can be dropped, in bytes."""


VERSIONS = (
    _Version("", "memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)
"""2, then 1."""


def _cgroup(root: Path | None) -> Path:
    return root or Path(os.environ.get("FLEXFLEET_CGROUP", "/sys/fs/cgroup"))


def _proc(proc: Path | None) -> Path:
    return proc or Path(os.environ.get("FLEXFLEET_PROC", "/proc"))


def limit(root: Path | None = None) -> int:
    """This container's memory limit in bytes, read from the cgroup file system (version 2 or 1) at `root`, by default
    FLEXFLEET_CGROUP or /sys/fs/cgroup. Raises EnvironmentFailure if there is no limit."""
    found = _limit(root, "")
    if found is None:
        raise EnvironmentFailure(
            f"kubernetes.observe=cgroup, but {_cgroup(root)} has no memory limit: set one for the tier's pool "
            "(kubernetes.pools)"
        )
    return found


def _limit(root: Path | None, below: str) -> int | None:
    for version in VERSIONS:
        found = _number(_text(_cgroup(root) / version.folder / below / version.limit))
        if found is not None and found < NO_LIMIT:
            return found
    return None


def used(root: Path | None = None, below: str = "") -> int | None:
    """The working set in bytes of the container, or of the cgroup `below` the root's; None: the cgroup does not say."""
    for version in VERSIONS:
        folder = _cgroup(root) / version.folder / below
        usage = _number(_text(folder / version.usage))
        if usage is not None:
            cache = _number(_field(_text(folder / version.stat), version.cache)) or 0
            return max(0, usage - cache)
    return None


def _own(proc: Path | None) -> list[str]:
    """The root's cgroup, this process's, and those between them, as folders below the root's. (One that a container
    does not see is no folder there.)"""
    found = re.findall(r"^\d+:(?:memory)?:/(.*)$", _text(_proc(proc) / "self" / "cgroup"), re.MULTILINE)
    paths = [PurePosixPath(path) for path in found if ".." not in path.split("/")]
    return list(dict.fromkeys([".", *(str(each) for path in paths for each in (path, *path.parents))]))


def available(proc: Path | None = None) -> int | None:
    """Bytes that the node can give without swapping; None: it does not say."""
    kilobytes = _number(_field(_text(_proc(proc) / "meminfo"), "MemAvailable:"))
    return None if kilobytes is None else 1024 * kilobytes


def stalled(root: Path | None = None, proc: Path | None = None) -> float:
    """The share of the last ten seconds in which all that ran had to wait for memory, in the cgroup or on the node,
    whichever is larger (pressure stall information, `full avg10`). 0 where the kernel does not measure it."""
    texts = [_text(_cgroup(root) / below / "memory.pressure") for below in _own(proc)]
    texts.append(_text(_proc(proc) / "pressure" / "memory"))
    found = [re.search(r"^full avg10=([0-9]{1,3}(?:\.[0-9]{1,6})?) ", text, re.MULTILINE) for text in texts]
    return max((min(1.0, float(match[1]) / 100) for match in found if match), default=0.0)


def room(held: int, root: Path | None = None, proc: Path | None = None) -> int:
    """Bytes that this container can take now on top of what it holds. `held`: counts as used where the cgroup does not
    say what is. Raises EnvironmentFailure where there is no limit."""
    limit(root)
    return room_of_device(held, root, proc)


def room_of_device(held: int, root: Path | None = None, proc: Path | None = None) -> int:
    """The same, of a process that need have no limit: then it is what the machine has available. Raises
    EnvironmentFailure where neither is said."""
    left, node = [], available(proc)
    for below in _own(proc):
        if (most := _limit(root, below)) is not None:
            taken = used(root, below)
            left.append(max(0, most - (held if taken is None else taken)))
    if node is not None:
        left.append(node)
    if not left:
        raise EnvironmentFailure(
            "this system does not say how much memory is free: give the process a memory limit (a service's MemoryMax, "
            "a container's), set agents.observe=simulated, or for `flexfleet profile` name it (--memory MB)"
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
    """The number behind a name at the begin of a line; empty where there is none."""
    match = re.search(rf"^{re.escape(name)}\s+([0-9]{{1,20}})(?: kB)?\s*$", text, re.MULTILINE)
    return match[1] if match else ""
