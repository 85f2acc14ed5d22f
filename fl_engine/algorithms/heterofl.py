"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients (Diao et al., ICLR
2021).

Every level has one width ratio for all layers and takes each layer's first channels. The mean is per element.
Its three additions are options of every algorithm here, and on as published: the scaler, masked
cross entropy, and static batch norm (see `evaluation.collect_statistics` for what that costs in privacy).

Departs from the paper: a device with less free than its level needs steps down to the next (in FlexFL's comparison,
too, levels follow what is free). FlexFL's and AdaptiveFL's comparisons have the three switches off, weight by sample
counts (`scaler: false, mask_labels: false, static_bn: false`), and draw a level before its device (`selection: {name:
resource_table}`); by default clients are drawn uniformly, as in HeteroFL, and get the largest level that they can hold
(`by_capacity`).
HeteroFL's own setting: `weighting: uniform`, `training.clip_norm: 1`, learning rate 0.1, batch 10, preresnet18.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, StaticBN
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction
from fl_engine.core.types import LocalTask, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.core.widths import Rounding


@dataclass(frozen=True)
class HeteroFL(PooledAlgorithm):
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """Width ratio of each level, ascending to 1; these make about 25, 50 and 100 % of the parameters."""
    rounding: Rounding = "ceil"
    """How ratio * channels is rounded: up, as in HeteroFL's code, or down (FedRolex Eq. 3.6), to at least one."""
    static_bn: StaticBN = True
    scaler: bool = True
    mask_labels: bool = True

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return prefix_pool(self, family, self.widths, self.rounding)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(order.level + 1))
        return self.local_task(order, ctx.pool[level].spec, self.widths[level])
