"""AdaptiveFL: Adaptive Heterogeneous Federated Learning for Resource-Constrained AIoT Systems (Jia et al., DAC 2024;
arXiv:2311.13166).

Before the first round, the server builds a pool of 2p + 1 models, S_p < ... < S_1 < M_p < ... < M_1 < L_1. The first I
layers of a model have full width, and the width ratio r_w applies to the later layers (Sec. 3.2). The server first
draws a random pool model, and then the client that receives it. A client's probability depends on the sizes of the
models that it returned before (Sec. 3.3, Alg. 1). A device prunes the received model to the largest nested pool model
that fits into its free memory (`task`). Each parameter is averaged over the updates that contain it (Alg. 2).

Departs from the paper:
- A device can prune only to the pairs (r_w, I) in the pool, as in the authors' code. Unlike in the code, the chosen
  model must be nested in the received model (S_1 is not nested in M_3).
- A model fits if its size is below the free memory, both in % of the full model's parameters. In the paper a model also
  fits if its size equals the free memory (size <= Gamma). If no model that is nested in the received model fits, the
  device still trains the smallest nested model (`on_too_small`). The paper's search would then fail.
- For networks that neither the paper nor the code uses, S_1 has at most 30 % and M_1 at most 60 % of the full size. The
  sizes in Table 1 are 25 and 50 %.
- The reward R_s is divided by the number of models of the same type (see `selection.Curiosity`).

The values of r_w and I are from the paper for VGG16 (Table 1), and from the authors' code for ResNet18 and MobileNetV2.
The fleets `adaptivefl` (for VGG16) and `adaptivefl_resnet18` contain the paper's devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily, Selector, ServerContext
from fl_engine.core.costs import count_params
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import Count, Fraction, Index
from fl_engine.core.slicing import contains
from fl_engine.core.types import FULL, Assignment, LocalTask, Pool, PoolModel, Prepared, TaskContext
from fl_engine.core.widths import check_cuttable, from_layer
from fl_engine.selection import Curiosity, Selection, Uniform

Variant = Literal["cs", "c", "s", "random", "greed"]

Widths = tuple[Fraction, Fraction]

_VGG16 = (*(f"conv{i}" for i in range(1, 14)), "fc1", "fc2")
_RESNET18 = ("stem", *(f"stage{i}" for i in range(1, 5)))
_MOBILENETV2 = ("stem", *(f"stage{i}" for i in range(1, 8)), "head")
PUBLISHED: dict[tuple[str, ...], tuple[Widths, tuple[int, ...]]] = {
    _VGG16: ((0.40, 0.66), (8, 6, 4)),
    _RESNET18: ((0.43, 0.68), (3, 2, 1)),
    _MOBILENETV2: ((0.46, 0.69), (4, 3, 2)),
}
"""Map a network's prunable layers to the published ratios r_w of the S and M models and the published values of I."""

OTHERS: Widths = (0.40, 0.66)
"""Width ratios r_w of networks without published values."""

LIMITS = (30.0, 60.0)
"""Maximum sizes of S_1 and M_1 in % of the full model, for networks without published values."""


@dataclass(frozen=True)
class AdaptiveFL(PooledAlgorithm):
    widths: Widths | None = None
    """Width ratios r_w of the S and M models. null selects (0.43, 0.68) for ResNet18 and other networks with a stem and
    four stages, (0.46, 0.69) for MobileNetV2, (0.4, 0.66) for all other networks."""
    p: Count = 3
    """Number of models in each of the levels S and M. The paper compares 3 (fine-grained) with 1 (coarse)."""
    starts: tuple[Index, ...] | None = None
    """Numbers I of full-width layers of a level's models, in descending order. null selects the published values for
    VGG16 (8, 6, 4), ResNet18 (3, 2, 1) and MobileNetV2 (4, 3, 2), and otherwise consecutive numbers, starting at the
    largest I for which S_1 has at most 30 % and M_1 at most 60 % of the parameters."""
    variant: Variant = "cs"
    """Rule for the selection of clients. cs: by curiosity and resources; c: only by curiosity; s: only by resources;
    random: at random; greed: at random, and every client receives the full model."""
    selection: Selection | None = None  # type: ignore[assignment]
    """null: the selection rule of the option `variant`."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return the models S_p to S_1, M_p to M_1 and L_1 (Sec. 3.2, Table 1). Only S_1, M_1 and L_1 are evaluated."""
        groups = tuple(layer.group for layer in family.prunable())
        check_cuttable(groups, family)
        published = PUBLISHED.get(groups, (OTHERS, ()))
        widths = published[0] if self.widths is None else self.widths
        if not widths[0] < widths[1] < 1:
            raise PoolError.at(f"algorithm.widths must be two ascending numbers below 1, got {list(widths)}")
        starts = self._starts(family, widths, published[1])
        models: list[PoolModel] = []
        for level, width in zip("SM", widths, strict=True):
            for i in range(len(starts), 0, -1):
                spec = from_layer(family, width, starts[i - 1])
                models.append(self.member(family, f"{level}{i}", spec, reported=i == 1))
        models.append(self.member(family, "L1", FULL))
        return pools.ascending(tuple(models))

    def _starts(self, family: ModelFamily, widths: Widths, published: tuple[int, ...]) -> tuple[int, ...]:
        """Return the values of I for the models 1 to p, in descending order."""
        layers, whole = len(family.prunable()), count_params(family)

        def shares(starts: Sequence[int], width: float) -> list[float]:
            return [100 * count_params(family, from_layer(family, width, i)) / whole for i in starts]

        if self.starts is not None:
            starts = self.starts
            if len(starts) != self.p or list(starts) != sorted(set(starts), reverse=True) or starts[0] >= layers:
                raise PoolError.at(
                    f"algorithm.starts must contain algorithm.p = {self.p} numbers below {layers} in descending order, "
                    f"got {list(starts)}"
                )
            return starts
        if len(published) >= self.p and shares(published, widths[0])[0] < shares(published, widths[1])[-1]:
            return published[: self.p]
        for first in range(layers - 1, -1, -1):
            if all(shares((first,), w)[0] <= limit for w, limit in zip(widths, LIMITS, strict=True)):
                return tuple(range(first, max(-1, first - self.p), -1))
        raise PoolError.at(
            f"algorithm.starts must be set, because with the widths {list(widths)}, S1 or M1 exceeds its limit "
            f"({LIMITS[0]:g} % or {LIMITS[1]:g} % of the full model) for every number of full-width layers"
        )

    def selector(self, pool: Pool) -> Selector:
        if self.selection is not None:
            return self.selection
        if self.variant == "greed":
            return Uniform(model="largest")
        if self.variant == "random":
            return Uniform(model="random")
        return Curiosity(score=self.variant, per_type=(len(pool) - 1) // 2)

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        inside = [i for i in range(assignment.level + 1) if contains(ctx.layout, assignment.spec, ctx.pool[i].spec)]
        return self.local_task(assignment, ctx.pool[self.largest_fitting(ctx, inside)].spec)
