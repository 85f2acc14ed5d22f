"""How much memory a container can still take, read anew each time: what its cgroup (version 2 or 1) and its node say.

    room = min(limit - used, what the node has available) * (1 - share of the time in which everything waits for memory)

`used` is the working set, as the kubelet counts it: without the page cache that the kernel can drop (`inactive_file`).
The last factor is a rule of this project: what the node lends to several pods can be gone before a limit is reached.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from fl_engine.core.errors import EnvironmentFailure

NO_LIMIT = 2**60
"""From this value on there is no limit: version 1 of the cgroup file system writes about 2^63 for none."""


class _Version(NamedTuple):
    limit: str
    usage: str
    stat: str
    cache: str
    """The line of `stat` with the page cache that can be dropped, in bytes."""


VERSIONS = (
    _Version("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Version(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""2, then 1."""


def _cgroup(root: Path | None) -> Path:
    return root or Path(os.environ.get("FLEXFLEET_CGROUP", "/sys/fs/cgroup"))


def _proc(proc: Path | None) -> Path:
    return proc or Path(os.environ.get("FLEXFLEET_PROC", "/proc"))


def limit(root: Path | None = None) -> int:
    """This container's memory limit in bytes, read from the cgroup file system (version 2 or 1) at `root`, by default
    FLEXFLEET_CGROUP or /sys/fs/cgroup. Raises EnvironmentFailure if there is no limit."""
    for version in VERSIONS:
        found = _number(_text(_cgroup(root) / version.limit))
        if found is not None and found < NO_LIMIT:
            return found
    raise EnvironmentFailure(
        f"kubernetes.observe=cgroup, but {_cgroup(root)} has no memory limit: set one for the tier's pool "
        "(kubernetes.pools)"
    )


def used(root: Path | None = None) -> int | None:
    """The container's working set in bytes; None: the cgroup does not say."""
    for version in VERSIONS:
        usage = _number(_text(_cgroup(root) / version.usage))
        if usage is not None:
            cache = _number(_field(_text(_cgroup(root) / version.stat), version.cache)) or 0
            return max(0, usage - cache)
    return None


def available(proc: Path | None = None) -> int | None:
    """Bytes that the node can give without swapping; None: it does not say."""
    kilobytes = _number(_field(_text(_proc(proc) / "meminfo"), "MemAvailable:"))
    return None if kilobytes is None else 1024 * kilobytes


def stalled(root: Path | None = None, proc: Path | None = None) -> float:
    """The share of the last ten seconds in which all that ran had to wait for memory, in the cgroup or on the node,
    whichever is larger (pressure stall information, `full avg10`). 0 where the kernel does not measure it."""
    texts = (_text(_cgroup(root) / "memory.pressure"), _text(_proc(proc) / "pressure" / "memory"))
    found = [re.search(r"^full avg10=([0-9]{1,3}(?:\.[0-9]{1,6})?) ", text, re.MULTILINE) for text in texts]
    return max((min(1.0, float(match[1]) / 100) for match in found if match), default=0.0)


def room(held: int, root: Path | None = None, proc: Path | None = None) -> int:
    """Bytes that this container can take now on top of what it holds. `held`: counts as used where the cgroup does not
    say what is. Raises EnvironmentFailure where there is no limit."""
    taken, node = used(root), available(proc)
    left = max(0, limit(root) - (held if taken is None else taken))
    return int((left if node is None else min(left, node)) * (1.0 - stalled(root, proc)))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,20}", text := text.strip()) else None


def _field(text: str, name: str) -> str:
    """The number behind a name at the begin of a line; empty where there is none."""
    match = re.search(rf"^{re.escape(name)}\s+([0-9]{{1,20}})(?: kB)?\s*$", text, re.MULTILINE)
    return match[1] if match else ""
