"""HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients (Diao et al., ICLR
2021; arXiv:2010.01264).

Every level has one width ratio and consists of the first channels of each layer. Each parameter is averaged over the
updates that contain it. The scaler, masked cross entropy and static batch norm are options of every algorithm, and
HeteroFL enables all three by default. `evaluation.collect_statistics` describes how static batch norm affects privacy.

Departs from the paper: a device trains the next smaller level if the assigned level does not fit into its free memory.
By default clients are drawn uniformly, as in HeteroFL, and get the largest level that fits into their maximum memory
(`by_capacity`).

HeteroFL's paper uses `weighting: uniform`, `training.clip_norm: 1`, learning rate 0.1, batch size 10 and the network
preresnet18. The comparisons of FlexFL and AdaptiveFL use `scaler: false, mask_labels: false, static_bn: false` and
weight updates by sample counts. These comparisons draw a level first and then a device for this level (`selection:
{name: resource_table}`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, StaticBN
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction
from fl_engine.core.types import Assignment, LocalTask, Pool, Prepared, TaskContext
from fl_engine.core.widths import Rounding


@dataclass(frozen=True)
class HeteroFL(PooledAlgorithm):
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """Ascending width ratios that end with 1. The defaults give about 25, 50 and 100 % of the parameters."""
    rounding: Rounding = "ceil"
    """Round ratio * channels up (`ceil`, HeteroFL's code) or down (`floor`, FedRolex Eq. 3.6), but at least to 1."""
    static_bn: StaticBN = True
    scaler: bool = True
    mask_labels: bool = True

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return prefix_pool(self, family, self.widths, self.rounding)

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(assignment.level + 1))
        return self.local_task(assignment, ctx.pool[level].spec, self.widths[level])
