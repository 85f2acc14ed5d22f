"""AdaptiveFL: Adaptive Heterogeneous Federated Learning for Resource-Constrained AIoT Systems (Jia et al., DAC 2024).

Server, once: a pool of 2p + 1 models, S_p < ... < S_1 < M_p < ... < M_1 < L_1, cut by a width ratio from a layer on
(Sec. 3.2). Round: models drawn at random, clients by what they brought back before (Sec. 3.3, Alg. 1; the tables are
in `selection.Curiosity`). A device prunes what it receives to the largest pool model inside it that fits what it has
free (`task`). The mean is per element (Alg. 2).

Departs from the paper:
- the device's search runs over the pool's (r_w, I), as in the authors' code, not over all pairs; unlike the code, it
  keeps to models that are nested in the one received (S_1 is not inside M_3);
- a model fits where more is free than its size, which is that of its parameters in % of the full model's; in the paper
  it fits from its size on (size <= Gamma). A device that has less free than the smallest model inside what it received
  trains that one all the same (`on_too_small`), where the paper's search would have no answer;
- for networks that neither paper nor code has, S_1 and M_1 have at most 30 and 60 % of the whole (Table 1: 25 and 50);
- R_s is divided by the number of models of the type (see `selection.Curiosity`).

The paper prints r_w and I of VGG16 (Table 1); those of ResNet18 and MobileNetV2 are those of the authors' code. The
devices are the fleets `adaptivefl` (VGG16) and `adaptivefl_resnet18`.
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
from fl_engine.core.types import FULL, LocalTask, Pool, PoolModel, Prepared, TaskContext, WorkOrder
from fl_engine.core.widths import from_layer
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
"""r_w of the S and the M models, and I, by the layers that can be pruned: VGG16 (Table 1), ResNet18 and MobileNetV2
(the authors' code). The stem and each stage are a layer."""

OTHERS: Widths = (0.40, 0.66)
"""r_w for other networks."""

LIMITS = (30.0, 60.0)
"""For other networks: the largest I with which S_1 and M_1 stay within these % of the whole."""


@dataclass(frozen=True)
class AdaptiveFL(PooledAlgorithm):
    widths: Widths | None = None
    """r_w of the S and the M models. null: the authors' for ResNet18 (0.43, 0.68; also for other networks of a stem and
    four stages) and MobileNetV2 (0.46, 0.69); the paper's for VGG16, 0.4 and 0.66, for all other networks too."""
    p: Count = 3
    """Models per level: 3 is fine-grained, 1 coarse (the ablation of Table 4)."""
    starts: tuple[Index, ...] | None = None
    """I of the models 1 .. p of a level: so many layers keep full width. null: the paper's for VGG16 (8, 6, 4), the
    authors' for ResNet18 (3, 2, 1) and MobileNetV2 (4, 3, 2); for other networks, and where those do not
    serve p and `widths`, the largest with which S_1 has at most 30 and M_1 at most 60 % of the whole, and the next
    smaller ones (fewer than p where the network has too few layers)."""
    variant: Variant = "cs"
    """How clients are selected: by curiosity and resources (cs), by one of them (c, s), at random (random), or the
    full model to random clients (greed)."""
    selection: Selection | None = None  # type: ignore[assignment]
    """null: the variant's."""

    # ------------------------------------------------------------------------------------ before the rounds
    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """S_p .. S_1, M_p .. M_1, L_1 (Sec. 3.2, Table 1). avg is the mean of S_1, M_1 and L_1."""
        published = PUBLISHED.get(tuple(layer.group for layer in family.prunable()), (OTHERS, ()))
        widths = published[0] if self.widths is None else self.widths
        if not widths[0] < widths[1] < 1:
            raise PoolError(f"algorithm.widths must be two ratios, S below M below 1, got {list(widths)}")
        starts = self._starts(family, widths, published[1])
        models: list[PoolModel] = []
        for level, width in zip("SM", widths, strict=True):
            for i in range(len(starts), 0, -1):
                spec = from_layer(family, width, starts[i - 1])
                models.append(self.member(family, f"{level}{i}", spec, reported=i == 1))
        models.append(self.member(family, "L1", FULL))
        return pools.ascending(tuple(models))

    def _starts(self, family: ModelFamily, widths: Widths, published: tuple[int, ...]) -> tuple[int, ...]:
        """I of the models 1 .. p, descending; `published`: the paper's or the authors', if any."""
        layers, whole = len(family.prunable()), count_params(family)

        def shares(starts: Sequence[int], width: float) -> list[float]:
            return [100 * count_params(family, from_layer(family, width, i)) / whole for i in starts]

        if self.starts is not None:
            starts = self.starts
            if len(starts) != self.p or list(starts) != sorted(set(starts), reverse=True) or starts[0] >= layers:
                raise PoolError(
                    f"algorithm.starts: p = {self.p} descending numbers of layers below {layers} are expected, "
                    f"got {list(starts)}"
                )
            return starts
        if len(published) >= self.p and shares(published, widths[0])[0] < shares(published, widths[1])[-1]:
            return published[: self.p]
        for first in range(layers - 1, -1, -1):
            if all(shares((first,), w)[0] <= limit for w, limit in zip(widths, LIMITS, strict=True)):
                return tuple(range(first, max(-1, first - self.p), -1))
        raise PoolError(
            f"{type(family).__name__} has no I with which S1 and M1, of widths {list(widths)}, stay within "
            f"{LIMITS[0]:g} and {LIMITS[1]:g} % of the whole: give algorithm.starts, or smaller algorithm.widths"
        )

    def selector(self, pool: Pool) -> Selector:
        if self.selection is not None:
            return self.selection
        match self.variant:
            case "greed":
                return Uniform(model="largest")
            case "random":
                return Uniform(model="random")
            case score:
                return Curiosity(score=score, per_type=(len(pool) - 1) // 2)

    # --------------------------------------------------------------------------------------------- a round
    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        """On the device: available-resource-aware pruning (Sec. 3.2)."""
        inside = [i for i in range(order.level + 1) if contains(ctx.layout, order.spec, ctx.pool[i].spec)]
        trained = self.largest_fitting(ctx, inside)
        return self.local_task(order, ctx.pool[trained].spec)
