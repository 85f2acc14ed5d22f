"""Which of the updates that arrived a round takes.

Refused, in this order:

    validate  moved further than `norm_bound` times the median of the round and of those before it
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
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
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

History = tuple[Moved, ...]
"""Of the last updates, round by round, in client order."""

REMEMBERED = 128
FIRST_ONES = 3
FIRST = 0.25


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


def remembered(history: History, moved: Mapping[int, Moved]) -> History:
    """What the next round compares with."""
    return (*history, *(moved[client] for client in sorted(moved)))[-REMEMBERED:]


def middle(history: History, moved: Iterable[Moved], size: Moved) -> Moved:
    """What is usual. `size`: root mean square of what was sent, likewise; of a model of zeros nothing follows."""
    known, missing = [*history, *moved], FIRST_ONES - len(history)

    def of(values: Iterable[float], large: float) -> float:
        return statistics.median_low([*values, *[FIRST * large] * (missing if large > 0 else 0)])

    return Moved(*map(of, zip(*known, strict=True), size))


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
            for code, moved, median in zip(("norm", "statistics"), arrival.moved, usual, strict=True):
                if client not in found and not moved <= terms.norm_bound * median:
                    limit = f"{terms.norm_bound:g} times the median is {terms.norm_bound * median:.3g}"
                    refuse(client, "validate", f"{code}: moved {moved:.3g} a number, {limit}")
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
