"""Rejects received updates that a round must not merge.

The rules apply in this order. Each line begins with the stage of the failure.

    `validate`: The movement of the update exceeds `norm_bound` times the usual movement, as defined below.
    `validate`: The update's movement, and the mean of the client's last AVERAGED updates, exceed half of this bound.
    `straggle`: The update finished later than `deadline_s` on the simulated clock.
    `straggle`: More clients were selected than required (`over_provision`), and enough updates finished earlier.
    `validate`: The aggregation drops the update (`aggregation.rules.DropsUpdates`).
    `quorum`: Fewer updates remain than `quorum` times the required number, so all updates are rejected.

The rules do not depend on real time, so every backend rejects the same updates.

The movement of an update is the L2 norm of the weight change. This norm is similar for small and large sub-models. The
movement of running statistics is the root mean square of the change. The movements of weights and of running statistics
are compared separately.

The usual movement of an update is the larger of two estimates. The first estimate is the median movement of recent
updates. The second estimate is the median of movement / sqrt(steps), multiplied by the square root of the update's
number of steps. A client with more data trains more steps, so its update moves further, as in a random walk. The
coordinator computes the number of steps from the assignment.

The medians use the updates of this round and about 128 earlier updates, including rejected updates. If rejected updates
were excluded, a run would reject all updates as soon as honest updates begin to move further. A minority of Byzantine
clients can shift a median by only a few ranks. With fewer than three earlier updates, each missing movement is assumed
to be FIRST times the size of the sent weights.

A single honest update may move several times as far as most updates, so the bound for a single update is larger than
the bound for a client's average. The history stores a client's movements as multiples of the usual movement in the same
round, because movements become smaller during a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import Assignment, ClientFailure, ClientUpdate, Code, ParamLayout, Params, RoundPlan, Stage

if TYPE_CHECKING:  # the options import fault_injection, which measures movements
    from fl_engine.rounds.options import RoundsConfig

REMEMBERED = 128
AVERAGED = 4
CURE = "If the client is honest, increase rounds.norm_bound or set it to null"
MOST_TIMES = 1e6
FIRST_ONES = 3


class Moved(NamedTuple):
    """Distance between the weights of an update and the sent weights."""

    weights: float
    """L2 norm of the weight change."""
    statistics: float = 0.0
    """Root mean square of the change of the running statistics; 0 for a model without running statistics."""
    steps: float = 1.0


NOTHING = Moved(0.0)
FIRST = Moved(0.25, 0.5)
"""Assumed movement of a run's first updates, as fractions of the size of the sent weights and running statistics. In
experiments, the fractions were 0.05 to 0.35 for weights and 0.2 to 0.9 for running statistics."""


class Usual(NamedTuple):
    """Medians of the movements of many updates."""

    far: Moved
    rooted: Moved
    """Median of movement / sqrt(steps)."""

    def after(self, steps: float) -> Moved:
        """Return the usual movement of an honest update after `steps` training steps."""
        root = math.sqrt(steps)
        weights = max(self.far.weights, root * self.rooted.weights)
        return Moved(weights, max(self.far.statistics, root * self.rooted.statistics), steps)


@dataclass(frozen=True)
class MovementHistory:
    rounds: tuple[tuple[Moved, ...], ...] = ()
    """Movements of the updates in the last rounds, in client order within each round."""
    times: dict[int, tuple[Moved, ...]] = field(default_factory=dict)
    """Map each client to the movements of its last updates, as multiples of the usual movement (at most 1e6)."""

    @property
    def count(self) -> int:
        return sum(len(moved) for moved in self.rounds)


def measure_movement(update: ClientUpdate, assignment: Assignment, layout: ParamLayout) -> Moved:
    """Return the movement of an update. The result does not depend on the memory layout of the tensors."""
    moved = _distance(update.payload, take(assignment.payload, layout, update.spec, have=assignment.spec))
    return moved._replace(steps=max(1.0, update.metrics.get("steps", 1.0)))


def size_sent(plan: RoundPlan) -> Moved:
    """Return the median L2 norm of the sent weights and the median root mean square of the sent running statistics."""
    payloads = {assignment.level: assignment.payload for assignment in plan.assignments}
    sizes = {level: _distance(payload) for level, payload in payloads.items()}
    weights, running = ([sizes[assignment.level][kind] for assignment in plan.assignments] for kind in (0, 1))
    return Moved(statistics.median_low(weights), statistics.median_low(running))


def _distance(params: Params, sent: Params | None = None) -> Moved:
    """Return the distance between `params` and `sent`, or between `params` and zero if `sent` is None."""
    weights, running, count = [], [], 0
    for name, tensor in params.items():
        far = float(torch.dist(_plain(tensor), torch.zeros(()) if sent is None else _plain(sent[name])))
        if is_statistic(name):
            running.append(far)
            count += tensor.numel()
        else:
            weights.append(far)
    return Moved(math.hypot(*weights), math.hypot(*running) / math.sqrt(max(1, count)))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def usual_movement(history: MovementHistory, moved: Iterable[Moved], size: Moved) -> Usual:
    """Return the medians of the movements in `history` and `moved`. `size` is the result of `size_sent`."""
    known, missing = [*(far for round in history.rounds for far in round), *moved], FIRST_ONES - history.count
    weights, running, counts = ([far[kind] for far in known] for kind in range(3))
    steps = statistics.median_low(counts)
    roots = {count: math.pow(count, 0.5) for count in {steps, *counts}}

    def medians(values: list[float], first: float) -> tuple[float, float]:
        more = missing if first > 0 else 0
        rooted = [value / roots[count] for value, count in zip(values, counts, strict=True)]
        rooted += [first / roots[steps]] * more
        return statistics.median_low([*values, *[first] * more]), statistics.median_low(rooted)

    (far, far_rooted), (ran, ran_rooted) = (
        medians(values, first * sent) for values, first, sent in zip((weights, running), FIRST, size, strict=False)
    )
    return Usual(Moved(far, ran), Moved(far_rooted, ran_rooted))


def _times(moved: Moved, usual: Moved) -> Moved:
    def ratio(far: float, median: float) -> float:
        return min(MOST_TIMES, far / median) if median > 0 else MOST_TIMES * (far > 0)

    return Moved(ratio(moved.weights, usual.weights), ratio(moved.statistics, usual.statistics), moved.steps)


def remember(history: MovementHistory, moved: Mapping[int, Moved], size: Moved = NOTHING) -> MovementHistory:
    """Return the history for the next round. `size` is the result of `size_sent`."""
    if not moved:
        return history
    usual, times = usual_movement(history, moved.values(), size), dict(history.times)
    for client, far in moved.items():
        times[client] = (*times.get(client, ()), _times(far, usual.after(far.steps)))[1 - AVERAGED :]
    rounds = (*history.rounds, tuple(moved[client] for client in sorted(moved)))
    while sum(map(len, rounds[1:])) >= REMEMBERED:
        rounds = rounds[1:]
    return MovementHistory(rounds, times)


def find_refused(
    plan: RoundPlan,
    moved: Mapping[int, Moved],
    seconds: Mapping[int, float],
    options: RoundsConfig,
    history: MovementHistory = MovementHistory(),
    size: Moved = NOTHING,
    drop: Callable[[Collection[int]], Mapping[int, str]] = lambda clients: {},
) -> dict[int, ClientFailure]:
    """Return the failures of all clients with a rejected update. Each received update has an entry in `moved` and in
    `seconds`, which contains simulated seconds. `size` is the result of `size_sent`. `drop` maps each client whose
    update the aggregation drops to the reason. Its argument contains the clients that no other rule rejects."""
    found: dict[int, ClientFailure] = {}

    def refuse(client: int, stage: Stage, reason: str, code: Code | None = None) -> None:
        found[client] = ClientFailure(plan.round, client, stage, reason, code)

    if options.bound is not None and moved:
        usual = usual_movement(history, moved.values(), size)
        for client, far in moved.items():
            wrong = _too_far(far, usual.after(far.steps), history.times.get(client, ()), options.bound)
            if wrong is not None:
                refuse(client, "validate", f"{wrong[0]}: {wrong[1]}", wrong[0])
    if options.deadline_s is not None:
        for client in moved:
            if client not in found and seconds[client] > options.deadline_s:
                took = f"the update took {seconds[client]:g} simulated seconds"
                refuse(client, "straggle", f"{took}, but rounds.deadline_s = {options.deadline_s:g}")
    left = sorted((seconds[client], client) for client in moved if client not in found)
    enough = plan.enough
    for _, client in left[enough:]:
        refuse(client, "straggle", f"{enough} updates finished earlier, enough for the round (rounds.over_provision)")
    for client, reason in drop([client for _, client in left[:enough]]).items():
        refuse(client, "validate", reason, "dropped")
    left = [(second, client) for second, client in left[:enough] if client not in found]
    count, least = len(left), math.ceil(options.quorum * enough - 1e-9)
    if count < least:
        for _, client in left:
            missing = f"rounds.quorum = {options.quorum:g} requires {least} of {enough} updates, got {count}"
            refuse(client, "quorum", f"{missing}. The model does not change")
    return found


def _too_far(moved: Moved, usual: Moved, before: Sequence[Moved], bound: float) -> tuple[Code, str] | None:
    """Return a tuple (code, reason) if an update moved too far; otherwise None. `usual` is the usual movement for this
    number of steps. `before` contains the client's earlier movements, as multiples of the usual movement."""
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
            most_often = f"{bound / 2:g} times the usual movement on average over a client's last {len(last)} updates"
            return code, f"rounds.norm_bound = {bound:g} allows {most_often}, got {often:.3g}. {CURE}"
    return None
