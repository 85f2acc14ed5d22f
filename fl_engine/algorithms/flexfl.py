"""FlexFL: Heterogeneous Federated Learning via APoZ-Guided Flexible Pruning in Uncertain Scenarios (Chen et al.,
IEEE TCAD 2024), Sections III-B to III-F, Algorithms 1 and 2.

Server, once: pre-train on proxy data, measure APoZ, build a nested pool M1 < M2' < M2 < M3' < M3 (`pool`).
Round: send each selected device a model it can hold at its maximum capacity (`plan`); the device prunes it further
to what it has free now and trains it with self-distillation from the smaller models inside it (`task`); average
element by element (`merge`).

Departs from the paper:
- the proxy is cut from the training data before the clients get theirs (the authors' code takes it from the test set);
- one Adam pre-trains for all epochs; `pretrain.reset_adam` makes a new one each epoch, as the authors' code does;
- gamma is found by bisection on the size of all parameters (`pool.py`), and a model fits where more is free than its
  size; `rule: authors` is their search: its models are larger than the targets, and fit from the target size on;
- selection draws uniformly among the devices that can hold the level (`selection.ResourceTable`);
- the distillation term is reduced by the mean over batch and classes, as in the authors' code (`losses.py`);
- teachers are all smaller pool members, M2' and M3' included, as in the code, and drop no units; in the code they do
  in round one only, since the test of the pool then leaves them in evaluation mode (`teachers: authors`);
- "without APoZ" sets every A_i = 0.5: with A = 1 the largest layer could never be wider than 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.core import pool as pools
from fl_engine.core.contracts import Interval, ModelFamily, ServerContext, around
from fl_engine.core.costs import count_params
from fl_engine.core.errors import PoolError
from fl_engine.core.fields import NotNegative, Positive, Share
from fl_engine.core.types import FULL, Distillation, LocalTask, Pool, PoolModel, Prepared, TaskContext, WorkOrder
from fl_engine.preparation.apoz import measured
from fl_engine.selection import ResourceTable, Selection


@dataclass(frozen=True)
class FlexFL(PooledAlgorithm):
    symbols: ClassVar[dict[str, str]] = {
        "kd_weight": "λ",
        "adaptive_size": "Γ",
        "gammas": "\N{GREEK SMALL LETTER GAMMA}",
    }
    """The paper's symbols of the options, for reports."""

    targets: tuple[Positive, ...] = (25.0, 50.0, 100.0)
    """L_p: sizes of the dispatched models in % of the full one, ascending, the last 100."""
    adaptive_size: Positive | None = 10.0
    """Gamma: M' is this many points smaller than M; null: no adaptive models (ablation)."""
    gammas: tuple[Positive, ...] | None = None
    """Fixed gamma for each target below 100 instead of its size; the targets then only order the models."""
    epsilon: Positive | None = None
    """How far a model's size may be from its target, in points; null: the largest of 0.5, one channel of the widest
    layer, and half a channel of the layer whose channels are largest."""
    rule: pools.Rule = "closest"
    """`closest` (the paper's sizes) or `authors` (the published code's first hit from above). With `authors`, a device
    compares what it has free with the targets, as their code does, and not with the models' sizes, which are larger."""
    apoz: tuple[Share, ...] | None = None
    """A_i of each layer that can be pruned, in network order, instead of measured ones: nothing is pre-trained then."""
    use_apoz: bool = True
    """false: every A_i = 0.5, whatever `apoz` says (ablation)."""
    use_adjustment: bool = True
    """false: every AdjW_i = 1 (ablation)."""
    kd_weight: NotNegative = 10.0
    """lambda, the weight of the distillation; 0 runs no teachers (ablation)."""
    temperature: Positive = 3.0
    """tau, the temperature of the distillation."""
    teachers: Literal["authors", "eval", "train"] = "eval"
    """Whether teachers drop units, in networks with dropout: eval: never; train: always, each by its own mask;
    authors: in the first round only, as in the published code. Without dropout in the network it makes no
    difference."""
    selection: Selection = ResourceTable()

    # ------------------------------------------------------------------------------------ before the rounds
    @property
    def preparations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("apoz",) if self.use_apoz and self.apoz is None else ()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """M1, M2', M2, ..., each nested in the next (Alg. 1). Raises PoolError for impossible targets."""
        if list(self.targets) != sorted(set(self.targets)) or not self.targets or self.targets[-1] != 100:
            raise PoolError(f"algorithm.targets must ascend and end in 100, got {list(self.targets)}")
        if self.gammas is not None and len(self.gammas) != len(self.targets) - 1:
            raise PoolError(f"algorithm.gammas needs one value for each target below 100, got {list(self.gammas)}")
        layers = family.prunable()
        scores = self._scores(prepared, len(layers))
        if len(scores) != len(layers):
            given = "the APoZ scores at hand" if self.apoz is None else "those in algorithm.apoz"
            names = ", ".join(layer.group for layer in layers)
            raise PoolError(
                f"{len(layers)} layers can be pruned, {given} are {len(scores)}: give one for each of {names}"
            )
        sizes = pools.layer_sizes(family)
        adjust = pools.adjustment_weights(sizes) if self.use_adjustment else (1.0,) * len(layers)
        whole = count_params(family)
        epsilon = pools.default_epsilon(family) if self.epsilon is None else self.epsilon / 100 * whole

        def build(name: str, target: float, gamma: float | None, sent: bool) -> PoolModel:
            if target == 100:
                return self.member(family, name, FULL, ratios=(1.0,) * len(layers))
            if gamma is not None:
                spec = pools.spec_of(family, pools.ratios_at(gamma, scores, adjust))
            elif self.rule == "authors":
                gamma, spec = pools.solve_as_authors(family, scores, adjust, target / 100)
            else:
                gamma, spec = pools.solve(family, scores, adjust, target / 100 * whole, epsilon)
            ratios = pools.ratios_at(gamma, scores, adjust)
            return self.member(family, name, spec, sent, reported=sent, gamma=gamma, ratios=ratios)

        fixed = (*(self.gammas or ()), *(None for _ in self.targets))
        mains = [build(f"M{i + 1}", target, fixed[i], sent=True) for i, target in enumerate(self.targets)]
        pools.check_nested(family, tuple(mains))
        if self.adaptive_size is None:
            return tuple(mains)
        percent = self._percent(mains)
        _check_adaptive(self.adaptive_size, percent)
        models = mains[:1]
        for size, main in zip(percent[1:], mains[1:], strict=True):
            models += [build(f"{main.name}'", size - self.adaptive_size, None, sent=False), main]
        return pools.check_nested(family, tuple(models))

    def _scores(self, prepared: Prepared, layers: int) -> tuple[float, ...]:
        if not self.use_apoz:
            return (0.5,) * layers
        return measured(prepared) if self.apoz is None else self.apoz

    def _percent(self, mains: Sequence[PoolModel]) -> list[float]:
        """What the dispatched models are meant to have, in % of the full one."""
        return [100 * m.share for m in mains] if self.gammas else list(self.targets)

    # --------------------------------------------------------------------------------------------- a round
    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        """On the device: AdaPrune (Sec. III-C), then self-distillation (Sec. III-D, Eq. 4)."""
        thresholds = self._nominal(ctx.pool) if self.rule == "authors" else None
        trained = self.largest_fitting(ctx, range(order.level + 1), thresholds)
        smaller = ctx.pool[:trained]
        drops = self.teachers == "train" or (self.teachers == "authors" and order.round == 0)
        teachers = Distillation(tuple(m.spec for m in smaller), self.kd_weight, self.temperature, training=drops)
        distils = bool(smaller) and self.kd_weight > 0
        return self.local_task(order, ctx.pool[trained].spec, distillation=teachers if distils else None)

    def _nominal(self, pool: Pool) -> list[float]:
        """What each model is meant to have, in % of the full one: 25, 40, 50, 90 and 100 by default."""
        smallest, *larger = self._percent([m for m in pool if m.dispatched])
        if self.adaptive_size is None:
            return [smallest, *larger]
        return [smallest, *(size for main in larger for size in (main - self.adaptive_size, main))]

    # ---------------------------------------------------------------------------------------------- a search
    def search_space(self, pool: Pool) -> dict[str, Interval]:
        """gamma of each dispatched model below the full one: from its solved value / 1.2 to * 1.2, within the geometric
        means with its neighbours'; lambda and Gamma, unless switched off. Empty where the full model is alone."""
        if len(pool) == 1:
            return {}
        solved, found = [m.gamma for m in pool if m.dispatched and m.gamma is not None], dict[str, Interval]()
        middles = [math.sqrt(a * b) for a, b in pairwise(solved)]
        for i, (gamma, low, high) in enumerate(zip(solved, [0.0, *middles], [*middles, math.inf], strict=True)):
            found[f"gammas.{i}"] = Interval(max(gamma / 1.2, low), min(gamma * 1.2, high), log=True, start=gamma)
        if self.kd_weight > 0:
            found["kd_weight"] = around(self.kd_weight, 0.1, 100.0, log=True)
        if self.adaptive_size is not None:
            found["adaptive_size"] = around(self.adaptive_size, 2.0, 20.0)
        return found


def _check_adaptive(adaptive_size: float, sizes: Sequence[float]) -> None:
    """Sec. III-C: Gamma is smaller than the smallest difference between two models (all in % of the full one)."""
    gaps = [b - a for a, b in pairwise(sizes)]
    if gaps and adaptive_size >= min(gaps):
        raise PoolError(
            f"algorithm.adaptive_size (Gamma) = {adaptive_size} must be smaller than the smallest gap between two "
            f"models, {round(min(gaps), 4)} (sizes in %: {', '.join(str(round(s, 4)) for s in sizes)}): an adaptive "
            "model would not lie between them"
        )
