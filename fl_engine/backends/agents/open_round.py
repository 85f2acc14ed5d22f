"""Where a round stands whose orders are lent to devices."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fl_engine.backends.agents.post import Agent
from fl_engine.core.contracts import Algorithm
from fl_engine.core.types import RoundPlan


@dataclass
class OpenRound:
    algorithm: Algorithm
    plan: RoundPlan
    names: Mapping[int, list[str]]
    """By client, the keys of its order in the store."""
    asked: Mapping[str, int]
    """By tier (`Keeper.place`), its orders."""
    open_: set[int]
    waiting: deque[int]
    """Clients whose order no device holds."""
    moved: float
    """When a device last answered an order."""
    hopeful: float
    """When a device was last at work."""
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By device and tier, the orders that it has answered."""
    lost: Counter[int] = field(default_factory=Counter)
    """By client: how often its order has failed."""
    tried: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By client, the devices that failed its order: they get it again only where no other device is there."""
    killed: Counter[int] = field(default_factory=Counter)
    """By client: how many pods have ended by themselves that held its order alone, most often for lack of memory."""
    alone: set[int] = field(default_factory=set)
    """Clients whose order a device failed: it is lent by itself from then on."""
    gone: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By device and client: how often the device was ended while it held the client's order."""
    idle: set[str] = field(default_factory=set)
    """Devices that beat while they let an order lie, and have taken none since."""
    said: float = -math.inf
    """When it was last said what the round waits for."""

    def suits(self, agent: Agent, client: int, tier: str, there: Iterable[Agent]) -> bool:
        """Whether the device may have the order of a client of this tier (`Keeper.place`): one that failed it only
        where all the devices that are `there` did."""
        tried = self.tried[client]
        if agent.member.tier not in (None, tier):
            return False
        others = (a for a in there if a.name not in tried and a.member.tier in (None, tier))
        return agent.name not in tried or next(others, None) is None

    def most(self, tier: str, tried: Collection[str], there: Iterable[Agent]) -> int:
        """How many of the tier's orders one device may have: twice as many as if each got the same, so that one which
        answers at once, whatever it likes, is no majority among many. The faster half of the devices has room for the
        whole round, so no order waits for the slower one. `there`: devices that have not failed since their last
        answer; those that have `tried` the order do not count either, so at least one that may have it has room."""
        takers = sum(a.name not in tried and a.member.tier in (None, tier) for a in there)
        return math.ceil(2 * self.asked[tier] / max(1, takers))
