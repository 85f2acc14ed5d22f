"""Which of the updates that arrived a round takes.

Refused, in this order:

    validate  moved further than `norm_bound` times the median of the round and of those before it
    validate  moved further than half of that, and on average over the client's last AVERAGED updates too
    straggle  later than `deadline_s` on the simulated clock
    straggle  later than as many others as `training.fraction` wants, where more were asked (`over_provision`)
    quorum    all, where fewer than `quorum` of those that were wanted are left: the model is carried forward unchanged

All of it follows from what the updates are, not from when this machine had them: the same in every backend. A cluster's
own deadline, quorum and first-come rule (`kubernetes`) come before.

The median is over how far the round's updates moved and those of the rounds before it, as many whole rounds as hold
REMEMBERED of them, those of refused updates too: were they left out, a run whose honest updates come to move further
would refuse all of them for good. Who is fewer than half of the clients shifts it by some ranks, whichever way. Where
there are fewer than FIRST_ONES of the rounds before, the places are taken by a FIRST part of how large the sent weights
are. Weights and batch norm's running statistics, which no gradient moves, are compared each with their own.

A single honest update may be several times as long as most; the same client's are not again and again. So an update
that moved further than half of the bound is taken where the client's last AVERAGED ones, it included, did not on
average: a client that stays just below the bound in every round is refused from its second update on. What is
remembered of each client is how many times the median its updates were then: movements shrink while a run learns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fl_engine.types import ClientFailure


class Terms(Protocol):
    """The part of `rounds` in a configuration that this is about."""

    @property
    def norm_bound(self) -> float | None: ...
    @property
    def deadline_s(self) -> float | None: ...
    @property
    def over_provision(self) -> float: ...
    @property
    def quorum(self) -> float: ...


class Moved(NamedTuple):
    """How far an update moved: root mean square over its weights, and over its running statistics (0: it has none)."""

    weights: float
    statistics: float = 0.0


NOTHING = Moved(0.0)


@dataclass(frozen=True)
class History:
    rounds: tuple[tuple[Moved, ...], ...] = ()
    """How far the updates of the last rounds moved, each round in client order."""
    times: dict[int, tuple[Moved, ...]] = field(default_factory=dict)
    """By client: how many times the median of their rounds its last updates moved, at most MOST_TIMES."""

    @property
    def count(self) -> int:
        return sum(len(moved) for moved in self.rounds)


REMEMBERED = 128
AVERAGED = 4
MOST_TIMES = 1e6
FIRST_ONES = 3
FIRST = Moved(0.25, 0.5)
"""Measured first updates: weights 0.05 to 0.35 of what was sent, statistics, which begin as 0 and 1, 0.2 to 0.9."""


@dataclass(frozen=True)
class Arrival:
    """An update, as far as it matters here: how far it moved, and its seconds on the simulated clock."""

    moved: Moved
    seconds: float


def unconditional(terms: Terms) -> bool:
    """Whether every update is taken, whatever the others are."""
    return terms.norm_bound is None and terms.deadline_s is None and terms.over_provision == 1 and terms.quorum == 0


def wanted(terms: Terms, asked: int) -> int:
    """How many updates a round is to have of which so many clients were asked."""
    return math.ceil(asked / terms.over_provision - 1e-9)


def remembered(history: History, moved: Mapping[int, Moved], size: Moved = NOTHING) -> History:
    """What the next round compares with. `size` as in `middle`."""
    if not moved:
        return history
    usual, times = middle(history, moved.values(), size), dict(history.times)
    for client, far in moved.items():
        times[client] = (*times.get(client, ()), _times(far, usual))[1 - AVERAGED :]
    rounds = (*history.rounds, tuple(moved[client] for client in sorted(moved)))
    while sum(map(len, rounds[1:])) >= REMEMBERED:
        rounds = rounds[1:]
    return History(rounds, times)


def middle(history: History, moved: Iterable[Moved], size: Moved) -> Moved:
    """What is usual. `size`: root mean square of what was sent, likewise; of a model of zeros nothing follows."""
    known, missing = [*(far for round in history.rounds for far in round), *moved], FIRST_ONES - history.count

    def of(values: Iterable[float], part: float, large: float) -> float:
        return statistics.median_low([*values, *[part * large] * (missing if large > 0 else 0)])

    return Moved(*map(of, zip(*known, strict=True), FIRST, size))


def _times(moved: Moved, usual: Moved) -> Moved:
    def of(far: float, median: float) -> float:
        return min(MOST_TIMES, far / median) if median > 0 else MOST_TIMES * (far > 0)

    return Moved(*map(of, moved, usual))


def refused(
    round: int,
    asked: int,
    arrived: Mapping[int, Arrival],
    terms: Terms,
    history: History = History(),
    size: Moved = NOTHING,
) -> dict[int, ClientFailure]:
    """By client, why not. `size` as in `middle`."""
    found: dict[int, ClientFailure] = {}

    def refuse(client: int, stage: str, reason: str) -> None:
        found[client] = ClientFailure(round, client, stage, reason)

    if terms.norm_bound is not None and arrived:
        usual = middle(history, (arrival.moved for arrival in arrived.values()), size)
        for client, arrival in arrived.items():
            said = _too_far(arrival.moved, usual, history.times.get(client, ()), terms.norm_bound)
            if said is not None:
                refuse(client, "validate", said)
    if terms.deadline_s is not None:
        for client, arrival in arrived.items():
            if client not in found and arrival.seconds > terms.deadline_s:
                said = f"took {arrival.seconds:.1f} s on the simulated clock, the deadline is {terms.deadline_s:g} s"
                refuse(client, "straggle", said)
    left = sorted((arrival.seconds, client) for client, arrival in arrived.items() if client not in found)
    enough = wanted(terms, asked)
    for _, client in left[enough:]:
        refuse(client, "straggle", "the round had enough updates before this one")
    count, least = min(len(left), enough), math.ceil(terms.quorum * enough - 1e-9)
    if count < least:
        for _, client in left[:enough]:
            refuse(client, "quorum", f"{count} of {enough} updates, {least} are needed: the model is carried forward")
    return found


def _too_far(moved: Moved, usual: Moved, before: Sequence[Moved], bound: float) -> str | None:
    """What is wrong with how far an update moved, its code first. `before`: how many times the median the client's
    earlier updates moved."""
    now = _times(moved, usual)
    last = [*before, now]
    average = Moved(*(statistics.fmean(times) for times in zip(*last, strict=True)))
    for code, far, median, times, often in zip(("norm", "statistics"), moved, usual, now, average, strict=True):
        if not far <= bound * median:
            return f"{code}: moved {far:.3g} a number, {bound:g} times the median is {bound * median:.3g}"
        if len(last) > 1 and min(times, often) > bound / 2:
            said = f"moved {often:.3g} times the median on average over its last {len(last)} updates"
            return f"{code}: {said}, at most {bound / 2:g} are taken again and again"
    return None
