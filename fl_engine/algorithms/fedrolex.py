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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms import pooled
from fl_engine.algorithms.pooled import (
    PooledState,
    TooSmall,
    Training,
    cutter,
    largest_fitting,
    local_task,
    order_for,
    prefix_pool,
    select,
    wanted,
)
from fl_engine.core import workload
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import STRICT, Fraction
from fl_engine.core.types import (
    HEAD,
    ClientUpdate,
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
from fl_engine.core.widths import rolling, window_start
from fl_engine.selection import Selection, Uniform

Weight = Literal["uniform", "model_size", "updates", "hybrid"]


@dataclass(frozen=True)
class FedRolex:
    __pydantic_config__: ClassVar = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """The clients' capacities beta, ascending; the last may be below 1."""
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """r of Sec. 3.3.7: the window advances by 1 + floor(beta * (1 - r) * K_i) channels per round. Below 1, as
    printed, a stride that divides K_i can leave channels out for good."""
    weighting: Weight = "uniform"
    """How much a client counts (Sec. 3.3.6): all alike, by the kernels of its model, by its local steps, or by the
    product of both. A client that says it took more steps than its order makes of its samples counts by those."""
    scaler: bool = True
    mask_labels: bool = False
    static_bn: bool = True
    on_too_small: TooSmall = "train"
    """What a device does that has less free than the smallest width needs."""
    selection: Selection = Uniform()
    aggregation: Aggregation = Mean()
    server: Server = Average()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """The sizes that clients train, and the full model; which channels, each round's orders say."""
        return prefix_pool(family, self.widths, "floor", full_only=True, static_bn=self.static_bn)

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
        level = largest_fitting(order, ctx, range(sent + 1), self.on_too_small)
        first = window_start(ctx.layout, self.widths[sent], order.round, self.overlap)
        return local_task(
            self.training,
            order,
            order.spec if level == sent else rolling(ctx.layout, self.widths[level], first),
            scaler=self.widths[level] if self.scaler else 1.0,
            mask_labels=self.mask_labels,
        )

    def merge(
        self, state: PooledState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> PooledState:
        return pooled.merged(self, state, plan, answers, self._weight(state.layout, server), moving=True)

    def _weight(self, layout: ParamLayout, server: ServerContext) -> Callable[[ClientUpdate], float]:
        by_size = self.weighting in ("model_size", "hybrid")
        by_steps = self.weighting in ("updates", "hybrid")

        def steps(update: ClientUpdate) -> float:
            """What the client says, from one to as many as its order makes of its samples."""
            most = workload.steps(self.training, server.samples[update.client])
            return min(max(1.0, update.metrics["steps"]), most)

        def weight(update: ClientUpdate) -> float:
            size = kernels(layout, update.payload) if by_size else 1
            return size * (steps(update) if by_steps else 1.0)

        return weight


def kernels(layout: ParamLayout, params: Params) -> int:
    """Output channels over all layers, the output layer's left out."""
    return sum(
        tensor.shape[0]
        for name, tensor in params.items()
        if tensor.dim() > 1 and layout.slots[name].axes[0].group != HEAD
    )
