"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients (Diao et al., ICLR
2021).

Every level has one width ratio for all layers and takes each layer's first channels. The mean is per element.
Its three additions are switches, here as in every other algorithm (`terms`), and on as published: the scaler, masked
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
from typing import ClassVar

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms import pooled, terms
from fl_engine.algorithms.pooled import TooSmall, largest_fitting, prefix_pool
from fl_engine.algorithms.terms import StaticBN, Terms, local_task
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import STRICT, Fraction
from fl_engine.core.types import LocalTask, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.core.widths import Rounding
from fl_engine.selection import ByCapacity, Selection


@dataclass(frozen=True)
class HeteroFL(Terms):
    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """Width ratio of each level, ascending to 1; these make about 25, 50 and 100 % of the parameters."""
    rounding: Rounding = "ceil"
    """Of ratio * channels: up, as in HeteroFL's code, or down (FedRolex Eq. 3.6), at least one."""
    static_bn: StaticBN = True
    scaler: bool = True
    mask_labels: bool = True
    on_too_small: TooSmall = "train"
    """What a device does that has less free than the smallest level needs."""
    selection: Selection = ByCapacity()
    aggregation: Aggregation = Mean()
    server: Server = Average()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return prefix_pool(family, self.widths, self.rounding, static_bn=terms.static_bn(self, family))

    selector, init, plan = pooled.selector, pooled.init, pooled.plan

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        level = largest_fitting(ctx, range(order.level + 1), self.on_too_small)
        return local_task(self, order, ctx.pool[level].spec, self.widths[level])

    merge = terms.merge
