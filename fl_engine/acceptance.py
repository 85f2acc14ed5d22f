"""Which of the updates that arrived a round takes.

Refused, in this order:

    validate  moved further than `norm_bound` times the median of the round and of those before it
    validate  moved further than half of that on average, over the client's last AVERAGED updates
    straggle  later than `deadline_s` on the simulated clock
    straggle  later than as many others as `training.fraction` wants, where more were asked (`over_provision`)
    quorum    all, where fewer than `quorum` of those that were wanted are left: the model is carried forward unchanged

All of it follows from what the updates are, not from when this machine had them: the same in every backend. A cluster's
own deadline, quorum and first-come rule (`kubernetes`) come before.

The median is over how far the round's updates moved and the last REMEMBERED of the rounds before, those of refused
updates too: were they left out, a run whose honest updates come to move further would refuse all of them for good. Who
is fewer than half of the clients shifts it by some ranks, whichever way. Where there are fewer than FIRST_ONES of the
rounds before, the places are taken by a FIRST part of how large the sent weights are. Weights and batch norm's running
statistics, which no gradient moves, are compared each with their own.

A single honest update may be several times as long as most; the same client's are not again and again. So a client that
stays just below the bound in every round is refused from its second update on. Every update is remembered with its
client and how many times the median it was then: movements shrink while a run learns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


class Past(NamedTuple):
    client: int
    moved: Moved
    times: Moved
    """The median of its round, at most MOST_TIMES."""


History = tuple[Past, ...]
"""The last updates, round by round, in client order."""

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
    usual = middle(history, moved.values(), size) if moved else NOTHING
    return (*history, *(Past(client, moved[client], _times(moved[client], usual)) for client in sorted(moved)))[
        -REMEMBERED:
    ]


def middle(history: History, moved: Iterable[Moved], size: Moved) -> Moved:
    """What is usual. `size`: root mean square of what was sent, likewise; of a model of zeros nothing follows."""
    known, missing = [*(past.moved for past in history), *moved], FIRST_ONES - len(history)

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
    history: History = (),
    size: Moved = NOTHING,
) -> dict[int, ClientFailure]:
    """By client, why not. `size` as in `middle`."""
    found: dict[int, ClientFailure] = {}

    def refuse(client: int, stage: str, reason: str) -> None:
        found[client] = ClientFailure(round, client, stage, reason)

    if terms.norm_bound is not None and arrived:
        usual = middle(history, (arrival.moved for arrival in arrived.values()), size)
        for client, arrival in arrived.items():
            said = _too_far(arrival.moved, usual, [p.times for p in history if p.client == client], terms.norm_bound)
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
    last = [*before[1 - AVERAGED :], _times(moved, usual)]
    average = Moved(*(statistics.fmean(times) for times in zip(*last, strict=True)))
    for code, far, median, often in zip(("norm", "statistics"), moved, usual, average, strict=True):
        if not far <= bound * median:
            return f"{code}: moved {far:.3g} a number, {bound:g} times the median is {bound * median:.3g}"
        if len(last) > 1 and often > bound / 2:
            said = f"moved {often:.3g} times the median on average over its last {len(last)} updates"
            return f"{code}: {said}, at most {bound / 2:g} are taken"
    return None
