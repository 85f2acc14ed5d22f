"""ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients (Ilhan et al., CVPR 2023, pages 24532-24541;
https://openaccess.thecvf.com/CVPR2023).

A smaller level has fewer channels and fewer blocks, and ends with an early exit. A client trains all exits of its
level. The loss of exit j (from 0) has a weight proportional to j + 1, and the last exit is the teacher of the earlier
exits. Each parameter is averaged over the updates that contain it.

Departs from the paper:

- An exit consists of global pooling and one linear layer. The exit of a level follows the deepest block for which the
  level's size is at most 5 percentage points above the target (`widths.choose_exits`). With the default `widths`, the
  levels contain 24.6, 33.7 and 100 % of the parameters of VGG16, and 22.1, 52.6 and 100 % of those of ResNet34.
  FlexFL's comparison uses larger exit heads. With `widths: [0.75, 0.99, 1.0]`, the second level contains 49.1 % of the
  parameters of VGG16. With FlexFL's `widths: [0.81, 0.95, 1.0]`, the levels contain 25.9, 51.1 and 100 % of the
  parameters of ResNet34.
- Distillation starts after `kd_from` rounds. In the authors' code, distillation starts after a quarter of the rounds.
- A device trains the next smaller level if the assigned level does not fit into its free memory.
- Clients are drawn uniformly and get the largest level that fits into their maximum memory. FlexFL's comparison draws
  the level first (`selection: {name: resource_table}`).

FlexFL's and AdaptiveFL's comparisons disable distillation (`kd_weight: 0`) and weight updates by sample counts.
ScaleFL's paper weights all updates equally (`weighting: uniform`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import ExitLevels
from fl_engine.core.fields import Fraction, Index, NotNegative, Positive
from fl_engine.core.types import Assignment, ExitLoss, LocalTask, TaskContext


@dataclass(frozen=True)
class ScaleFL(ExitLevels):
    widths: tuple[Fraction, ...] = (0.75, 0.82, 1.0)
    """Width ratio of each level, ending with 1. FlexFL's comparison uses the defaults for VGG16, 0.81/0.95/1 for
    ResNet34 and 0.87/0.89/1 for MobileNetV2."""
    kd_weight: NotNegative = 0.05
    """Weight of the distillation from the last exit; 0: no distillation."""
    temperature: Positive = 3.0
    """Temperature of the distillation from the last exit."""
    kd_from: Index = 0
    """Number of rounds before distillation starts. The authors' code uses a quarter of all rounds."""

    def ratios(self) -> tuple[float, ...]:
        return self.widths

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        """Train all exits with cross entropy, and distil from the last exit to the earlier exits (Eq. 4 and 5)."""
        level = self.largest_fitting(ctx, range(assignment.level + 1))
        spec = ctx.pool[level].spec
        exits = sum(1 for b in ctx.layout.blocks if b.startswith("exit_") and ctx.layout.has_block(spec, b))
        outputs = exits + ctx.layout.has_block(spec, ctx.layout.blocks[-1])
        weights = tuple((j + 1) / (outputs * (outputs + 1) / 2) for j in range(outputs))
        kd_weight = self.kd_weight if assignment.round >= self.kd_from else 0.0
        exit_loss = ExitLoss(weights, kd_weight, self.temperature, teachers="last")
        return self.local_task(assignment, spec, self.widths[level], exits=exit_loss)
