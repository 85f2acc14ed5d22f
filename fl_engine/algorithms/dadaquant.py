"""DAdaQuant: Doubly-adaptive quantization for communication-efficient Federated Learning (Hoenig, Zhao, Mullins, ICML
2022): what clients send up is quantised in levels that grow while the run learns less, and differ between clients.

In time, q begins at `q_min` and doubles, up to `q_max`, when the moving average of the clients' loss,

    L_t = psi L_{t-1} + (1 - psi) (mean loss of the round's clients),

is not below what it was phi rounds ago; then phi rounds pass before it can double again. Between clients, those whose
updates weigh more in the mean get more levels: the fewest in total with the variance of the same q for all clients:

    q_k = sqrt(a / b) w_k^(2/3),  a = sum_j w_j^(2/3),  b = sum_j w_j^2 / q^2       over the clients of the round

with the weights w of the mean. With any other aggregation all clients weigh the same here, and q_k is q. The server's
weights go down as they are, and the changes come back by QSGD with q_k levels per sign, then zero run-length and
Elias-omega, or fixed width where that is shorter: the paper compresses the client's way to the server. As FedX's rival
each device trains the largest of three nested sub-networks that it can hold. For FedX's comparison (Section IV-D),
where "the server has data, fine-tunes without regularization", set `fine_tuning: {gamma: 0}`.

Written without the paper's text, from its abstract and what is known of it. Decided here, or different:

- q_k is rounded to the nearest whole number, halves up, at least 1. Elements that not all clients hold, whose weights
  therefore differ, count like the others.
- the first L is the first round's loss. phi is a number of rounds, by default a tenth of 40: the paper's is a tenth of
  all, but a run may be prolonged, which must not change its past.
- a client's loss counts from 0 up to twice the round's median. As long as fewer than half of the clients lie, their
  mean stays between 0 and twice the largest loss among the others. The level never falls, never exceeds `q_max`, and
  at most doubles every phi rounds: all that lies can gain is that it doubles as soon as it may, which costs bits, or
  that it is held, which costs accuracy.
- a norm for every 512 elements. The paper's single norm of a tensor is `bucket: null`: with few levels the error is
  then many times the change (of n elements about sqrt(n) / q of it, root of the mean square), and only the mean over
  clients and rounds takes it away.

The levels follow the clients' losses, which no noise hides: with a private aggregation set `phi: null`, so that all
clients have `q_min` levels in every round. The run's `codec` is not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

from pydantic import Field

from fl_engine.aggregation.privacy import is_private
from fl_engine.aggregation.rules import Mean
from fl_engine.algorithms.fine_tuning import FineTuning, check_tuning, tuned
from fl_engine.algorithms.levels import WIDTHS, Widths, nested_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, StaticBN, counted
from fl_engine.codecs.qsgd import MOST_LEVELS, Qsgd
from fl_engine.core import costs
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count
from fl_engine.core.types import (
    ClientUpdate,
    Codecs,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)

Levels = Annotated[int, Field(ge=1, le=MOST_LEVELS)]


@dataclass(frozen=True, kw_only=True)
class DAdaQuantState(PooledState):
    """`level`: q of the next round, levels per sign. `averages`: L after each round since q last changed, the latest
    last, at most phi + 1 of them."""

    level: int
    averages: tuple[float, ...] = ()


@dataclass(frozen=True)
class DAdaQuant(PooledAlgorithm):
    widths: Widths = WIDTHS
    """Width ratios of small, medium and large, ascending to 1, of a network that has no nested sub-networks of its
    own."""
    q_min: Levels = 1
    """Levels per sign in the first round; 2^bits - 1 of them take `bits` bits, and one for the sign."""
    q_max: Levels = 2047
    """The most levels per sign of a round; a client that weighs more than others may have more."""
    psi: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """How much of the moving average of the loss stays from round to round."""
    phi: Count | None = 4
    """q doubles when the average is no lower than this many rounds ago; null: q stays `q_min`."""
    bucket: Count | None = 512
    """Elements that share a norm in QSGD; null: one norm per tensor."""
    fine_tuning: FineTuning | None = None
    """The server's training after each merge, on its own data; null: none. FedX's comparison: {gamma: 0}."""
    static_bn: StaticBN = "kept"

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return nested_pool(self, family, self.widths, Codecs(up=self._codec(self.q_max)))

    def _codec(self, levels: int) -> Qsgd:
        return Qsgd(levels=levels, bucket=self.bucket)

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> DAdaQuantState:
        """Raises ConfigError if the levels would reveal what a private aggregation hides, if q_max is below q_min, and
        for fine-tuning without data."""
        check_tuning(self.fine_tuning, server)
        if self.phi is not None and is_private(self):
            raise ConfigError(
                "dadaquant's levels follow the clients' losses, which a private aggregation does not hide: set "
                "algorithm.phi=null, so that they stay at algorithm.q_min"
            )
        if self.q_max < self.q_min:
            raise ConfigError(f"algorithm.q_max = {self.q_max} is below algorithm.q_min = {self.q_min}: raise it")
        return DAdaQuantState(**vars(super().init(params, layout, fleet, pool, server)), level=self.q_min)

    def plan(self, state: DAdaQuantState, context: RoundContext) -> RoundPlan:
        if not context.samples:
            raise ConfigError(
                "dadaquant's levels follow from how many samples each client holds, and with partition.rule=local the "
                "server does not know: take another algorithm, or another rule"
            )
        plan = super().plan(state, context)
        weights = [1.0] * len(plan.orders)
        if isinstance(self.aggregation, Mean):
            held = (context.samples[order.client] for order in plan.orders)
            weights = [self._expected(state, order, n) for order, n in zip(plan.orders, held, strict=True)]
        shares = zip(plan.orders, levels_of(weights, state.level), strict=True)
        orders = tuple(replace(order, codecs=Codecs(up=self._codec(levels))) for order, levels in shares)
        return replace(plan, orders=orders)

    def _expected(self, state: DAdaQuantState, order: WorkOrder, samples: int) -> float:
        """The weight of the update if the client trains all that it is sent."""
        steps = costs.steps(self.training, samples)
        return float(counted(self.weighting, state.layout, order.payload, samples, steps))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return self.whole(order, ctx)

    def merge(
        self, state: DAdaQuantState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> DAdaQuantState:
        losses: list[float] = []
        merged: DAdaQuantState = super().merge(state, plan, _heard(answers, losses), server)
        if self.phi is not None and losses:
            average = averaged(losses, state.averages, self.psi)
            level, averages = doubled(state.level, (*state.averages, average), self.phi, self.q_max)
            merged = replace(merged, level=level, averages=averages)
        return tuned(self.fine_tuning, self.aggregation, state, merged, plan, server)


def _heard(answers: Iterable[Outcome], losses: list[float]) -> Iterator[Outcome]:
    """The same answers, to be read once; appends each loss that a client reports to `losses`."""
    for answer in answers:
        if isinstance(answer, ClientUpdate):
            losses.append(answer.metrics["loss"])
        yield answer


# ------------------------------------------------------------------------------------------------------ in time
def averaged(losses: Sequence[float], averages: Sequence[float], psi: float) -> float:
    """The next moving average, after `averages`. Each loss counts from 0 up to twice the median of `losses`, which are
    one or more."""
    most = 2 * max(0.0, median(losses))
    mean = math.fsum(min(max(0.0, loss), most) for loss in losses) / len(losses)
    return psi * averages[-1] + (1 - psi) * mean if averages else mean


def doubled(level: int, averages: Sequence[float], phi: int, q_max: int) -> tuple[int, tuple[float, ...]]:
    """The next round's level, and the averages that the one after it is decided by. `averages`: since the level last
    changed."""
    kept = tuple(averages)[-(phi + 1) :]
    if len(kept) > phi and kept[-1] >= kept[0]:
        return min(2 * level, q_max), kept[-1:]
    return level, kept


# --------------------------------------------------------------------------------------------- between clients
def levels_of(weights: Sequence[float], level: int) -> list[int]:
    """q_k of clients with these weights, of any unit, from 1 to MOST_LEVELS; where all weigh the same, `level`."""
    total = sum(weights)
    w = [weight / total if total else 1 / len(weights) for weight in weights]
    a = math.fsum(share ** (2 / 3) for share in w)
    b = math.fsum((share / level) ** 2 for share in w)
    exact = (math.sqrt(a / b) * share ** (2 / 3) for share in w)
    return [min(max(1, math.floor(each + 0.5)), MOST_LEVELS) for each in exact]
