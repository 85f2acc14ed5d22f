"""FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction (Alam et al., NeurIPS 2022;
thesis ch. 3).

A client of capacity beta trains floor(beta * K_i) channels of layer i, a window that moves by one channel per round,
around the end of the layer, so that all channels are trained evenly (Eq. 3.4). The mean is per element, over the
clients alike (Eq. 3.10). The output layer is never cut. With all widths below 1 the server's model is larger than any
client's.

Departs from the paper: a device with less free than its width needs trains a part of the window it received (the
paper's capacities are fixed); at least one channel stays where beta * K_i is below 1. Widths default to this project's
common fleet; the paper's are 1/16, 1/8, 1/4, 1/2 and 1 on the fleet `capacities`. Only the full model is reported, as
in the paper: a sub-model of one round is nothing to deploy. Weighting by updates takes a client's local steps (the
paper says "number of updates"; the code counts how often each parameter was updated). The authors' code rolls the
window backwards and rounds up; this follows the paper. It also redraws every client's capacity in every round
(`dynamic`); here a client's capacity is its device's, as the paper describes it. `selection: {name: uniform, model:
random}` draws the level of each selected client anew in every round, each alike: on a fleet that holds all levels
(`fleet.tiers: [{name: any, share: 1, memory: 125}]`) these are the code's dynamic capacities. `mask_labels` is the
code's label-masked output layer, with batch norm and scaler as in HeteroFL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms import pooled, terms
from fl_engine.algorithms.pooled import (
    PooledState,
    TooSmall,
    cutter,
    largest_fitting,
    order_for,
    prefix_pool,
    select,
    wanted,
)
from fl_engine.algorithms.terms import StaticBN, Terms, Weighting, local_task
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import STRICT, Fraction
from fl_engine.core.types import (
    LocalTask,
    Outcome,
    Pool,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)
from fl_engine.core.widths import rolling, window_start
from fl_engine.selection import ByCapacity, Selection


@dataclass(frozen=True)
class FedRolex(Terms):
    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """The clients' capacities beta, ascending; the last may be below 1."""
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """r of Sec. 3.3.7: the window advances by 1 + floor(beta * (1 - r) * K_i) channels per round. Below 1, this
    rule may never train some channels, where the stride divides K_i."""
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
        orders, cut = [], cutter(state)
        for client, level in select(self, state, context):
            width = self.widths[level]
            first = window_start(state.layout, width, context.round, self.overlap)
            spec = rolling(state.layout, width, first)
            orders.append(order_for(state, (client, level), context, cut(spec), spec))
        return RoundPlan(context.round, tuple(orders), wanted(self.training, context, len(orders)))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        sent = order.level
        level = largest_fitting(ctx, range(sent + 1), self.on_too_small)
        first = window_start(ctx.layout, self.widths[sent], order.round, self.overlap)
        width = self.widths[level]
        spec = order.spec if level == sent else rolling(ctx.layout, width, first)
        return local_task(self, order, spec, width)

    def merge(
        self, state: PooledState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> PooledState:
        return terms.merge(self, state, plan, answers, server, moving=True)
