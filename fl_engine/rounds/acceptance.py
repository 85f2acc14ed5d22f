"""Which of the received updates a round merges.

Refused, in this order:

    validate  moved further than `norm_bound` times the usual movement
    validate  moved further than half of that, and on average over the client's last AVERAGED updates too
    straggle  later than `deadline_s` on the simulated clock
    straggle  later than as many others as the plan wants, if more clients were selected (`over_provision`)
    quorum    all, if fewer than `quorum` of the wanted updates are left: the model stays unchanged

These rules use the updates only, not their time of arrival, so every backend refuses the same. A cluster's own
deadline, quorum and first-come rule (`kubernetes`) come before.

The usual movement of an update of s steps is the larger of two medians: of how far updates moved, and sqrt(s) times how
far they moved divided by the square root of their own steps. A client with more data takes more steps and moves
further, about with the square root, like a random walk. The steps are those of the assignment (`updates`).

A movement is the length of the change of the weights (L2 norm). It is about the same for sub-models of all sizes,
because fewer numbers each move further. Medians of a level's updates on digits, over the median of all: 0.67 to 1.08 in
`multibranch`, 0.88 to 1.05 in `heterofl`, 0.90 to 1.36 in `flexfl`; as a root mean square they were 0.52 to 3.53, 0.64
to 1.19, 0.74 to 1.71. Running statistics move towards those of the data, whatever the size, so their movement is the
root mean square. Weights are compared with weights, and running statistics with running statistics.

The medians cover the round's updates and those of as many earlier rounds as hold REMEMBERED updates. Refused updates
count too: otherwise a run whose honest updates begin to move further would refuse all of them for good. A minority of
Byzantine clients shifts a median by some ranks only. If there are fewer than FIRST_ONES earlier updates, each missing
one is replaced by FIRST times the size of the weights that were sent.

An honest update may move several times as far as most, but the same client's updates do not do so again and again. A
client that stays just below the bound in every round is refused from its second update on. For each client the run
remembers its movements as multiples of the usual in their own rounds, because movements shrink while a run learns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from fl_engine.core.types import ClientFailure, Code, RoundPlan, Stage
from fl_engine.rounds.terms import RoundsConfig


class Moved(NamedTuple):
    """How far an update moved: length of the change of its weights, root mean square over its running statistics (0: it
    has none), and its steps."""

    weights: float
    statistics: float = 0.0
    steps: float = 1.0


NOTHING = Moved(0.0)


class Usual(NamedTuple):
    """Medians over many updates."""

    far: Moved
    rooted: Moved
    """The median of each movement divided by the square root of its steps."""

    def after(self, steps: float) -> Moved:
        """Return how far an update of this many steps usually moves."""
        root = math.sqrt(steps)
        weights = max(self.far.weights, root * self.rooted.weights)
        return Moved(weights, max(self.far.statistics, root * self.rooted.statistics), steps)


@dataclass(frozen=True)
class History:
    rounds: tuple[tuple[Moved, ...], ...] = ()
    """How far the updates of the last rounds moved, each round in client order."""
    times: dict[int, tuple[Moved, ...]] = field(default_factory=dict)
    """Map each client to the movements of its last updates, as multiples of the usual, at most MOST_TIMES."""

    @property
    def count(self) -> int:
        return sum(len(moved) for moved in self.rounds)


REMEMBERED = 128
AVERAGED = 4
CURE = "If the client is honest, increase rounds.norm_bound or set it to null"
MOST_TIMES = 1e6
FIRST_ONES = 3
FIRST = Moved(0.25, 0.5)
"""Measured first updates moved 0.05 to 0.35 of the sent weights, and 0.2 to 0.9 of the running statistics."""


@dataclass(frozen=True)
class Arrival:
    """What these rules use of an update: its movement, and its seconds on the simulated clock."""

    moved: Moved
    seconds: float


def unconditional(terms: RoundsConfig) -> bool:
    """Whether every update is merged."""
    return terms.bound is None and terms.deadline_s is None and terms.over_provision == 1 and terms.quorum == 0


def remembered(
    history: History, moved: Mapping[int, Moved], size: Moved = NOTHING, usual: Usual | None = None
) -> History:
    """Return the history for the next round. `size` as in `middle`; `usual`: the result of `middle`, if known."""
    if not moved:
        return history
    usual, times = usual or middle(history, moved.values(), size), dict(history.times)
    after = cache(usual.after)
    for client, far in moved.items():
        times[client] = (*times.get(client, ()), _times(far, after(far.steps)))[1 - AVERAGED :]
    rounds = (*history.rounds, tuple(moved[client] for client in sorted(moved)))
    while sum(map(len, rounds[1:])) >= REMEMBERED:
        rounds = rounds[1:]
    return History(rounds, times)


def middle(history: History, moved: Iterable[Moved], size: Moved) -> Usual:
    """Return the usual movement. `size`: of the sent weights, in the same measures; 0 for a model of zeros."""
    known, missing = [*(far for round in history.rounds for far in round), *moved], FIRST_ONES - history.count
    weights, running, counts = ([far[kind] for far in known] for kind in range(3))
    steps = statistics.median_low(counts)
    roots = {count: math.pow(count, 0.5) for count in {steps, *counts}}

    def of(values: list[float], first: float) -> tuple[float, float]:
        more = missing if first > 0 else 0
        rooted = [value / roots[count] for value, count in zip(values, counts, strict=True)]
        rooted += [first / roots[steps]] * more
        return statistics.median_low([*values, *[first] * more]), statistics.median_low(rooted)

    (far, far_rooted), (ran, ran_rooted) = (
        of(values, first * sent) for values, first, sent in zip((weights, running), FIRST, size, strict=False)
    )
    return Usual(Moved(far, ran), Moved(far_rooted, ran_rooted))


def _times(moved: Moved, usual: Moved) -> Moved:
    def of(far: float, median: float) -> float:
        return min(MOST_TIMES, far / median) if median > 0 else MOST_TIMES * (far > 0)

    return Moved(of(moved.weights, usual.weights), of(moved.statistics, usual.statistics), moved.steps)


def refused(
    plan: RoundPlan,
    arrived: Mapping[int, Arrival],
    terms: RoundsConfig,
    history: History = History(),
    size: Moved = NOTHING,
    usual: Usual | None = None,
) -> dict[int, ClientFailure]:
    """Map each refused client to its failure. `size` as in `middle`; `usual`: the result of `middle`, if known."""
    found: dict[int, ClientFailure] = {}

    def refuse(client: int, stage: Stage, reason: str, code: Code | None = None) -> None:
        found[client] = ClientFailure(plan.round, client, stage, reason, code)

    if terms.bound is not None and arrived:
        usual = usual or middle(history, (arrival.moved for arrival in arrived.values()), size)
        after = cache(usual.after)
        for client, arrival in arrived.items():
            moved = arrival.moved
            wrong = _too_far(moved, after(moved.steps), history.times.get(client, ()), terms.bound)
            if wrong is not None:
                code, said = wrong
                refuse(client, "validate", f"{code}: {said}", code)
    if terms.deadline_s is not None:
        for client, arrival in arrived.items():
            if client not in found and arrival.seconds > terms.deadline_s:
                said = f"rounds.deadline_s = {terms.deadline_s:g}, and the update took {arrival.seconds:g} s"
                refuse(client, "straggle", f"{said} on the simulated clock")
    left = sorted((arrival.seconds, client) for client, arrival in arrived.items() if client not in found)
    enough = plan.enough
    for _, client in left[enough:]:
        refuse(client, "straggle", f"the round had its {enough} updates before this one (rounds.over_provision)")
    count, least = min(len(left), enough), math.ceil(terms.quorum * enough - 1e-9)
    if count < least:
        for _, client in left[:enough]:
            said = f"rounds.quorum = {terms.quorum:g} needs {least} of {enough} updates, got {count}"
            refuse(client, "quorum", f"{said}. The model stays unchanged")
    return found


def _too_far(moved: Moved, usual: Moved, before: Sequence[Moved], bound: float) -> tuple[Code, str] | None:
    """Return why an update moved too far, or None if it did not. `usual` is the usual movement for its number of steps.
    `before` has the movements of the client's earlier updates, as multiples of the usual."""
    now = _times(moved, usual)
    last = [*before, now]
    kinds: tuple[tuple[Code, int], ...] = (("norm", 0), ("statistics", 1))
    for code, kind in kinds:
        far, most = moved[kind], bound * usual[kind]
        if not far <= most:
            return code, f"rounds.norm_bound = {bound:g} allows a movement of {most:.3g}, got {far:.3g}. {CURE}"
        if len(last) == 1 or now[kind] <= bound / 2:
            continue
        often = statistics.fmean(times[kind] for times in last)
        if often > bound / 2:
            said = f"rounds.norm_bound = {bound:g} allows {bound / 2:g} times the usual movement on average over"
            return code, f"{said} a client's last {len(last)} updates, got {often:.3g}. {CURE}"
    return None
