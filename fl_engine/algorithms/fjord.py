"""FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout (Horvath et al.,
NeurIPS 2021; arXiv:2102.13451), Algorithm 1.

Sub-networks of smaller widths are nested in sub-networks of larger widths. p_max is the largest width that fits into a
device's maximum memory. In every local step, the device draws a width up to p_max uniformly and trains the sub-network
of this width. The server averages each channel over the clients whose p_max includes the channel.

Departs from the paper: the distillation from larger to smaller widths, which is optional in Sec. 3.2, is not
implemented. If p_max does not fit into the free memory of a round, the device uses the largest width that fits. The
default widths are from the paper. FlexFL's comparison uses `widths: [0.5, 0.71, 1.0]`. The metric `avg` is the mean
over all widths. The paper stores the running statistics of batch norm per width. Here batch norm has no running
statistics. All widths share the affine parameters, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Fraction
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Assignment, LocalTask, Pool, Prepared, TaskContext


@dataclass(frozen=True)
class FjORD(PooledAlgorithm):
    widths: tuple[Fraction, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """Width ratios p in ascending order; the last must be 1. All widths are evaluated."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        if any(is_statistic(name) for name in family.layout().slots):
            raise PoolError(
                "the network must not store running statistics, because the statistics differ between widths. Set "
                "model.norm=batch, or set track_running_stats=False in your own network",
                path="model.norm",
            )
        return prefix_pool(self, family, self.widths)

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        largest = self.largest_fitting(ctx, range(assignment.level + 1))
        widths = tuple(m.spec for m in ctx.pool[: largest + 1])
        return self.local_task(assignment, ctx.pool[largest].spec, widths=widths)
