"""Which of the waiting orders a free device is lent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice

from fl_engine.backends.agents.keeper import Keeper
from fl_engine.backends.agents.open_round import OpenRound
from fl_engine.backends.agents.post import Agent

ClientOf = Mapping[str, int] | None
"""By device, the client that it is, where devices hold their own data; None: they do not."""


def chosen(
    r: OpenRound, there: Sequence[Agent], keeper: Keeper, seats: ClientOf, now: float
) -> Iterator[tuple[Agent, list[int]]]:
    """Clients whose orders wait, for free devices, first for those that were heard last: as many for each as it has
    room for, and no more than its share, of what waits and of the round. The caller lends them before it goes on."""
    free = [a for a in there if a.held is None and a.rests <= now]
    waiting, takers = Counter(map(keeper.place, r.waiting)), Counter(a.member.tier for a in free)
    most = cache(partial(r.most, there=[a for a in there if not a.failures]))
    for agent in sorted(free, key=lambda a: (a.failures, -a.heard)):
        tier = agent.member.tier
        share = math.ceil(waiting[tier] / takers[tier]) if tier is not None else 1
        suited = _suited(agent, r, there, keeper, seats, most)
        clients = list(islice(suited, max(1, min(keeper.room, share))))
        if first := [client for client in clients if client in r.alone][:1]:
            clients = first
        if clients:
            yield agent, clients
        if tier is not None:
            waiting[tier], takers[tier] = waiting[tier] - len(clients), takers[tier] - 1


def _suited(
    agent: Agent,
    r: OpenRound,
    there: Sequence[Agent],
    keeper: Keeper,
    seats: ClientOf,
    most: Callable[[str, frozenset[str]], int],
) -> Iterator[int]:
    """The waiting orders that the device may have."""
    has = Counter[str]()
    for client in r.waiting:
        place = keeper.place(client)
        has_room = not keeper.strangers or (
            r.answered[agent.name, place] + has[place] < most(place, frozenset(r.tried[client]))
        )
        if has_room and suits(agent, client, r, there, keeper, seats):
            has[place] += 1
            yield client


def suits(agent: Agent, client: int, r: OpenRound, there: Iterable[Agent], keeper: Keeper, seats: ClientOf) -> bool:
    """Whether the device may have the client's order. Where devices hold their own data, it suits the device that is
    its client, and no other."""
    if seats is not None:
        return seats.get(agent.name) == client
    return r.suits(agent, client, keeper.place(client), there)
