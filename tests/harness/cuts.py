"""Cuts processes off from the object store at random: in which request, how, and for how long."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from tests.harness.way import Cut, How, Way

HOWS: tuple[How, ...] = ("refused", "hangs", "breaks")
AFTER = 4.5
"""Up to 10 to this power bytes pass. If the request is shorter, the cut begins after it."""
FOR_GOOD = 0.25
"""The share of faults without an end."""
WHILE_S = (0.3, 8.0)
"""The least and the most seconds of the other faults: up to twice a lease, so some processes return before it ends."""
MEETS_S = 10.0
"""Seconds to wait for a request in which a process can be cut off."""

Until = Callable[[Callable[[], bool], float], bool]
"""Waits for a condition for so many seconds, and returns whether it holds."""


def how_long(rng: random.Random, for_good: bool = True) -> float:
    """Return the seconds of a fault; infinite, if `for_good` allows it, for one without an end."""
    lasts_s = rng.uniform(*WHILE_S)
    return math.inf if rng.random() < FOR_GOOD and for_good else lasts_s


def cut_off(
    way: Way, pid: int, moments: Mapping[str, tuple[bytes, ...]], seconds: float, rng: random.Random, until: Until,
    hows: Sequence[How] | None = None,
) -> str:  # fmt: skip
    """Cut a process off in a request of one of these kinds, whose values are parts of keys. Return how and in which;
    empty if there was no such request in time. `hows`: None for HOWS."""
    moment, how = rng.choice(sorted(moments)), rng.choice(hows or HOWS)
    way.cut_off(pid, Cut(how, moments[moment], int(10 ** rng.uniform(0, AFTER)), seconds))
    if not until(lambda: way.has_begun(pid), MEETS_S):
        way.let_back(pid)
        return ""
    return f"{how} in {moment}" + ", for good" * math.isinf(seconds)
