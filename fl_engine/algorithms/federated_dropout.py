"""Federated Dropout (Caldas et al., 2018), in the form that FedRolex compares with (thesis ch. 3, Eq. 3.5).

A client of capacity beta trains a random set of floor(beta * K_i) channels of each layer, drawn anew for every client
and round. Each convolution draws by itself, as in FedRolex's code; only those whose outputs a shortcut adds have the
same channels. The mean is per element. The output layer is never cut; the full model is the one reported.

Departs from the paper: its lossy compression is left out, as in that comparison; a device with less free than its
width needs trains a random part of what it received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, StaticBN, Weighting
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction
from fl_engine.core.types import LocalTask, Pool, Prepared, RoundContext, SubmodelSpec, TaskContext, WorkOrder
from fl_engine.core.widths import random_drop


@dataclass(frozen=True)
class FederatedDropout(PooledAlgorithm):
    moving: ClassVar[bool] = True

    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """The clients' capacities beta, ascending; the last may be below 1."""
    weighting: Weighting = "uniform"
    static_bn: StaticBN = True
    scaler: bool = True

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """The sizes that clients train, and the full model. `submodel` draws the channels."""
        return prefix_pool(self, family, self.widths, "floor", full_only=True)

    def submodel(self, state: PooledState, context: RoundContext, client: int, level: int) -> SubmodelSpec:
        rng = seeds.rng(context.seed, "dropout", context.round, client)
        return random_drop(state.layout, self.widths[level], rng)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(order.level + 1))
        spec, width = order.spec, self.widths[level]
        if level < order.level:
            spec = random_drop(ctx.layout, width, seeds.rng(order.seed, "shrink"), inside=order.spec)
        return self.local_task(order, spec, width)
