"""ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients (Ilhan et al., CVPR 2023).

A level is narrower *and* shallower: its first channels, its first blocks, and an early exit at the end. A client
trains all exits that its level has, weighted (j + 1) / sum, and the last teaches the earlier ones. The mean is per
element; what no client's level has (the deeper blocks) is left out of it.

Departs from the paper: exits are a global pooling and one linear layer; where they sit follows from the sizes
(`widths.choose_exits`): the deepest point at which a level, at its width, has at most its target plus 5 points. The
default `widths` make levels of 24.6, 33.7 and 100 % of VGG16 (FlexFL's comparison has large heads; with `widths:
[0.75, 0.99, 1.0]` 33.7 becomes 49.1), and of 22.1, 52.6 and 100 % of ResNet34 (FlexFL's `widths: [0.81, 0.95,
1.0]`: 25.9, 51.1 and 100 %). The authors' code distils after a quarter of the rounds: `kd_from`, in rounds. In FlexFL's
and AdaptiveFL's comparisons the distillation is in effect off (`kd_weight: 0`) and updates are weighted by sample
counts; ScaleFL's own mean is plain (`weighting: uniform`). A device with less free than its level needs steps down to
the next. Clients are drawn uniformly and get the largest level they can hold; FlexFL's comparison draws the level first
(`selection: {name: resource_table}`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import exit_pool
from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction, Index, NotNegative, Positive
from fl_engine.core.types import ExitLoss, LocalTask, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.core.widths import choose_exits, with_exits


@dataclass(frozen=True)
class ScaleFL(PooledAlgorithm):
    widths: tuple[Fraction, ...] = (0.75, 0.82, 1.0)
    """Width ratio of each level, the last one 1 (FlexFL's comparison: these for VGG16, 0.81/0.95/1 for ResNet34,
    0.87/0.89/1 for MobileNetV2)."""
    targets: tuple[Positive, ...] = (25.0, 50.0, 100.0)
    """Size of each level in % of the full network, which limits how deep it is."""
    exits: tuple[str, ...] | None = None
    """The block after which each level but the last ends; null: chosen by the targets."""
    kd_weight: NotNegative = 0.05
    """Weight of the distillation from the last exit; 0: none."""
    temperature: Positive = 3.0
    """Temperature of this distillation."""
    kd_from: Index = 0
    """The first round that distils, counted from 0; the authors' code takes a quarter of all rounds."""

    def _ends(self, family: ModelFamily) -> tuple[str, ...]:
        return choose_exits(family, self.widths, self.targets) if self.exits is None else self.exits

    def network(self, family: ModelFamily) -> ModelFamily:
        return with_exits(family, self._ends(family))

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return exit_pool(self, family, self.widths, self._ends(family))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        """Eq. 4 and 5: cross entropy of all exits, and distillation from the last exit to the others."""
        level = self.largest_fitting(ctx, range(order.level + 1))
        spec = ctx.pool[level].spec
        exits = sum(1 for b in ctx.layout.blocks if b.startswith("exit_") and ctx.layout.has_block(spec, b))
        outputs = exits + ctx.layout.has_block(spec, ctx.layout.blocks[-1])
        weights = tuple((j + 1) / (outputs * (outputs + 1) / 2) for j in range(outputs))
        kd_weight = self.kd_weight if order.round >= self.kd_from else 0.0
        exit_loss = ExitLoss(weights, kd_weight, self.temperature, teachers="last")
        return self.local_task(order, spec, self.widths[level], exits=exit_loss)
