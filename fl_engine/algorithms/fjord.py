"""FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout (Horvath et al.,
NeurIPS 2021), Algorithm 1.

Widths are nested; a device has a largest width p_max that it can hold. In every local step it draws a width
uniformly from those up to p_max and trains that sub-network. The mean is per element: a channel is averaged over the
clients whose p_max reaches it.

Departs from the paper: no self-distillation between widths (its Sec. 3.2 offers it as an option); a device with less
free than p_max needs goes down to the largest width that fits. The widths are the paper's: they make other sizes than
the levels of FlexFL's comparison (`widths: [0.5, 0.71, 1.0]`), and avg is the mean over all of them. Batch norm has no
running statistics here, so there are none to keep per width; its affine parameters are shared, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Fraction
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import LocalTask, Pool, Prepared, TaskContext, WorkOrder


@dataclass(frozen=True)
class FjORD(PooledAlgorithm):
    widths: tuple[Fraction, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """The widths p, ascending to 1; all are reported."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        if any(is_statistic(name) for name in family.layout().slots):
            raise PoolError("model.norm must be batch: fjord keeps no running statistics, which differ between widths")
        return prefix_pool(self, family, self.widths)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        largest = self.largest_fitting(ctx, range(order.level + 1))
        widths = tuple(m.spec for m in ctx.pool[: largest + 1])
        return self.local_task(order, ctx.pool[largest].spec, widths=widths)
