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

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, StaticBN, Weighting
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction
from fl_engine.core.types import (
    LocalTask,
    ParamLayout,
    Pool,
    Prepared,
    RoundContext,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)
from fl_engine.core.widths import rolling, window_start


@dataclass(frozen=True)
class FedRolex(PooledAlgorithm):
    moving: ClassVar[bool] = True

    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """The clients' capacities beta, ascending; the last may be below 1."""
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """r of Sec. 3.3.7: the window advances by 1 + floor(beta * (1 - r) * K_i) channels per round. Below 1, some
    channels may never be trained, if the stride divides K_i."""
    weighting: Weighting = "uniform"
    static_bn: StaticBN = True
    scaler: bool = True

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """The sizes that clients train, and the full model. `submodel` gives the channels."""
        return prefix_pool(self, family, self.widths, "floor", full_only=True)

    def submodel(self, state: PooledState, context: RoundContext, client: int, level: int) -> SubmodelSpec:
        return self._window(state.layout, self.widths[level], self.widths[level], context.round)

    def _window(self, layout: ParamLayout, sent: float, width: float, round: int) -> SubmodelSpec:
        """The first `width` of the window that clients of capacity `sent` train in this round."""
        return rolling(layout, width, window_start(layout, sent, round, self.overlap))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(order.level + 1))
        spec, width = order.spec, self.widths[level]
        if level < order.level:
            spec = self._window(ctx.layout, self.widths[order.level], width, order.round)
        return self.local_task(order, spec, width)
