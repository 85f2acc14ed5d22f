"""How processes are cut off from the object store at random: in which request, how, and for how long."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from tests.harness.way import Cut, How, Way

HOWS: tuple[How, ...] = ("refused", "hangs", "breaks")
AFTER = 4.5
"""Up to 10 to this power bytes of the request pass: some end before that, and the cut begins after them."""
FOR_GOOD = 0.25
"""How often what befalls a process has no end."""
WHILE_S = (0.3, 8.0)
"""The least and the most seconds that it lasts otherwise: twice a lease (`world.LEASE_S`), so some are back before
theirs has ended."""
MEETS_S = 10.0
"""Seconds to wait for the request in which a process is to be cut off."""

Until = Callable[[Callable[[], bool], float], bool]
"""Waits for a condition for so many seconds, and says whether it has come about."""


def how_long(rng: random.Random, for_good: bool = True) -> float:
    """Seconds; infinite: for good, where that may be."""
    lasts_s = rng.uniform(*WHILE_S)
    return math.inf if rng.random() < FOR_GOOD and for_good else lasts_s


def cut_off(
    way: Way, pid: int, moments: Mapping[str, tuple[bytes, ...]], seconds: float, rng: random.Random, until: Until,
    hows: Sequence[How] | None = None,
) -> str:  # fmt: skip
    """Cuts a process off in a request of one of these kinds, each with what its keys contain. Gives how and in which;
    empty: no such request was made in time. `hows`: None for HOWS."""
    moment, how = rng.choice(sorted(moments)), rng.choice(hows or HOWS)
    way.cut_off(pid, Cut(how, moments[moment], int(10 ** rng.uniform(0, AFTER)), seconds))
    if not until(lambda: way.has_begun(pid), MEETS_S):
        way.let_back(pid)
        return ""
    return f"{how} in {moment}" + ", for good" * math.isinf(seconds)
