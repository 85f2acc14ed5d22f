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
from typing import ClassVar

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms import pooled, terms
from fl_engine.algorithms.pooled import TooSmall, largest_fitting, prefix_pool
from fl_engine.algorithms.terms import Terms, local_task
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import STRICT, Fraction
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import LocalTask, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.selection import ByCapacity, Selection


@dataclass(frozen=True)
class FjORD(Terms):
    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    widths: tuple[Fraction, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """The widths p, ascending to 1; all are reported."""
    on_too_small: TooSmall = "train"
    """What a device does that has less free than the smallest width needs."""
    selection: Selection = ByCapacity()
    aggregation: Aggregation = Mean()
    server: Server = Average()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        if any(is_statistic(name) for name in family.layout().slots):
            raise PoolError("fjord keeps no running statistics (they differ by width): set model.norm=batch")
        pool = prefix_pool(family, self.widths, "ceil", static_bn=terms.static_bn(self, family))
        return terms.some_narrower(self, family, pool)

    selector, init, plan = pooled.selector, pooled.init, pooled.plan

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        largest = largest_fitting(ctx, range(order.level + 1), self.on_too_small)
        widths = tuple(m.spec for m in ctx.pool[: largest + 1])
        return local_task(self, order, ctx.pool[largest].spec, widths=widths)

    merge = terms.merge
