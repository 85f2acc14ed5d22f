"""Federated Dropout (Caldas et al., 2018), in the form that FedRolex compares with (thesis ch. 3, Eq. 3.5).

A client of capacity beta trains a random set of floor(beta * K_i) channels of each layer, drawn anew for every client
and round. Each convolution draws by itself, as in FedRolex's code; only those whose outputs a shortcut adds have the
same channels. The mean is per element. The output layer is never cut; the full model is the one reported.

Departs from the paper: its lossy compression is left out, as in that comparison; a device with less free than its
width needs trains a random part of what it received.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms import pooled, terms
from fl_engine.algorithms.pooled import (
    PooledState,
    TooSmall,
    largest_fitting,
    order_for,
    prefix_pool,
    select,
    wanted,
)
from fl_engine.algorithms.terms import StaticBN, Terms, Weighting, local_task
from fl_engine.algorithms.training import Training
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import STRICT, Fraction
from fl_engine.core.slicing import take
from fl_engine.core.types import LocalTask, Outcome, Pool, Prepared, RoundContext, RoundPlan, TaskContext, WorkOrder
from fl_engine.core.widths import random_drop
from fl_engine.selection import ByCapacity, Selection


@dataclass(frozen=True)
class FederatedDropout(Terms):
    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """The clients' capacities beta, ascending; the last may be below 1."""
    weighting: Weighting = "uniform"
    static_bn: StaticBN = True
    scaler: bool = True
    on_too_small: TooSmall = "train"
    """What a device does that has less free than the smallest width needs."""
    selection: Selection = ByCapacity()
    aggregation: Aggregation = Mean()
    server: Server = Average()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """The sizes that clients train, and the full model; which channels, each round's orders say."""
        return prefix_pool(family, self.widths, "floor", full_only=True, static_bn=terms.static_bn(self, family))

    selector, init = pooled.selector, pooled.init

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        orders = []
        for client, level in select(self, state, context):
            rng = seeds.rng(context.seed, "dropout", context.round, client)
            spec = random_drop(state.layout, self.widths[level], rng)
            orders.append(order_for(state, (client, level), context, take(state.params, state.layout, spec), spec))
        return RoundPlan(context.round, tuple(orders), wanted(self.training, context, len(orders)))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        sent = order.level
        level = largest_fitting(ctx, range(sent + 1), self.on_too_small)
        rng = seeds.rng(order.seed, "shrink")
        width = self.widths[level]
        spec = order.spec if level == sent else random_drop(ctx.layout, width, rng, inside=order.spec)
        return local_task(self, order, spec, width)

    def merge(
        self, state: PooledState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> PooledState:
        return terms.merge(self, state, plan, answers, server, moving=True)
