"""FlexFL: Heterogeneous Federated Learning via APoZ-Guided Flexible Pruning in Uncertain Scenarios (Chen et al.,
IEEE TCAD 2024; arXiv:2407.12729), Sections III-B to III-F, Algorithms 1 and 2.

Before the first round, the server pre-trains the network on proxy data, measures APoZ (the fraction of zeros after a
ReLU) and builds a nested pool M1 < M2' < M2 < M3' < M3 (`pool`). In each round, the server sends each selected device a
model that fits into the device's maximum memory (`plan`). The device prunes the model to fit its free memory and trains
it with self-distillation from the smaller nested models (`task`). Each parameter is averaged over the updates that
contain it (`merge`).

Departs from the paper:
- The proxy data are split off from the training data before the partition. The authors' code uses a part of the test
  set.
- Pre-training uses one Adam optimizer for all epochs. The authors' code creates a new optimizer in each epoch.
- A bisection on the number of all parameters finds gamma (`pool.py`), and a model fits if the free memory exceeds the
  model's size. `rule: authors` uses the search of the authors' code. This search finds models that are larger than the
  targets, but devices compare their free memory with the targets.
- Devices are drawn uniformly from all devices that can hold the level (`selection.ResourceTable`).
- The distillation term is the mean over batch and classes, as in the authors' code (`losses.py`). `kd_reduction: batch`
  is the mean over the batch, as in the text.
- As in the code, all smaller models of the pool are teachers, including M2' and M3', but here teachers never use
  dropout. In the code, teachers use dropout only in the first round, because the first evaluation leaves them in
  evaluation mode. `teachers: authors` reproduces this behaviour.
- The ablation "without APoZ" sets each A_i to 0.5. With A_i = 1, the largest layer keeps at most 1 % of its channels.
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
from fl_engine.core.types import FULL, Assignment, Distillation, LocalTask, Pool, PoolModel, Prepared, TaskContext
from fl_engine.selection import ResourceTable, Selection


@dataclass(frozen=True)
class FlexFL(PooledAlgorithm):
    symbols: ClassVar[dict[str, str]] = {
        "kd_weight": "λ",
        "adaptive_size": "Γ",
        "gammas": "\N{GREEK SMALL LETTER GAMMA}",
    }
    """Map options to their symbols in the paper, for reports."""

    targets: tuple[Positive, ...] = (25.0, 50.0, 100.0)
    """L_p: ascending model sizes in % of the full model; the last must be 100."""
    adaptive_size: Positive | None = 10.0
    """Gamma: difference between the sizes of M and M', in percentage points; null: no adaptive models M' (ablation)."""
    gammas: tuple[Positive, ...] | None = None
    """Fixed gamma for each target below 100; null: search. If fixed, `targets` only define the order of the models."""
    epsilon: Positive | None = None
    """Tolerance between a model's size and its target, in percentage points; null: the maximum of 0.5, one channel of
    the widest layer, and half a channel of the layer with the most parameters per channel."""
    rule: pools.Rule = "closest"
    """Search for gamma. closest: the size closest to the target; authors: the largest size within 5 points of the
    target, as in the authors' code. With `authors`, a device compares its free memory with targets instead of sizes."""
    apoz: tuple[Share, ...] | None = None
    """APoZ A_i of each prunable layer, in network order; null: pre-train and measure APoZ."""
    use_apoz: bool = True
    """false: set every A_i to 0.5 and ignore `apoz` (ablation)."""
    use_adjustment: bool = True
    """false: set every adjustment weight AdjW_i to 1 (ablation)."""
    kd_weight: NotNegative = 10.0
    """Weight lambda of the distillation; 0: no distillation (ablation)."""
    temperature: Positive = 3.0
    """Temperature tau of the distillation."""
    kd_reduction: Literal["classes", "batch"] = "classes"
    """Average KL over batch and classes (authors' code) or only over the `batch` (paper)."""
    teachers: Literal["authors", "eval"] = "eval"
    """Dropout in the teachers. eval: no dropout; authors: dropout only in the first round, as in the authors' code."""
    selection: Selection = ResourceTable()

    @property
    def preparations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("apoz",) if self.use_apoz and self.apoz is None else ()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return M1, M2', M2, ... Each model is nested in the next one (Alg. 1). Raises PoolError for targets that
        cannot be reached."""
        if list(self.targets) != sorted(set(self.targets)) or not self.targets or self.targets[-1] != 100:
            raise PoolError.at(f"algorithm.targets must be ascending and end with 100, got {list(self.targets)}")
        if self.gammas is not None and len(self.gammas) != len(self.targets) - 1:
            raise PoolError.at(f"algorithm.gammas must have a value for each target below 100, got {list(self.gammas)}")
        layers = family.prunable()
        scores = self._scores(prepared, len(layers))
        if len(scores) != len(layers):
            names = ", ".join(layer.group for layer in layers)
            raise PoolError.at(f"algorithm.apoz must have a score for each of the layers {names}, got {len(scores)}")
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
        gaps = [b - a for a, b in pairwise(percent)]
        if gaps and self.adaptive_size >= min(gaps):  # Sec. III-C
            raise PoolError.at(
                f"algorithm.adaptive_size must be below {min(gaps):.4f}, the smallest difference between the sizes of "
                f"two models, got {self.adaptive_size}"
            )
        models = mains[:1]
        for size, main in zip(percent[1:], mains[1:], strict=True):
            models += [build(f"{main.name}'", size - self.adaptive_size, None, sent=False), main]
        return pools.check_nested(family, tuple(models))

    def _scores(self, prepared: Prepared, layers: int) -> tuple[float, ...]:
        if not self.use_apoz:
            return (0.5,) * layers
        scores: tuple[float, ...] = prepared["apoz"].scores if self.apoz is None else self.apoz
        return scores

    def _percent(self, mains: Sequence[PoolModel]) -> list[float]:
        """Return the nominal sizes of the dispatched models in % of the full model."""
        return [100 * m.share for m in mains] if self.gammas else list(self.targets)

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        """Prune the received model (Section III-C) and train it with self-distillation (Section III-D, Eq. 4)."""
        thresholds = self._nominal(ctx.pool) if self.rule == "authors" else None
        trained = self.largest_fitting(ctx, range(assignment.level + 1), thresholds)
        smaller = ctx.pool[:trained]
        drops = self.teachers == "authors" and assignment.round == 0
        specs = tuple(m.spec for m in smaller)
        teachers = Distillation(specs, self.kd_weight, self.temperature, drops, self.kd_reduction)
        distils = bool(smaller) and self.kd_weight > 0
        return self.local_task(assignment, ctx.pool[trained].spec, distillation=teachers if distils else None)

    def _nominal(self, pool: Pool) -> list[float]:
        """Return the nominal size of each model in % of the full model: 25, 40, 50, 90 and 100 by default."""
        smallest, *larger = self._percent([m for m in pool if m.dispatched])
        if self.adaptive_size is None:
            return [smallest, *larger]
        return [smallest, *(size for main in larger for size in (main - self.adaptive_size, main))]

    def search_space(self, pool: Pool) -> dict[str, Interval]:
        """Return the search ranges of every dispatched model's gamma, and of lambda and Gamma unless they are disabled.
        Each gamma may vary by a factor of up to 1.2, but not beyond its geometric mean with a neighbouring gamma."""
        if len(pool) == 1:
            return {}
        solved, ranges = [m.gamma for m in pool if m.dispatched and m.gamma is not None], dict[str, Interval]()
        middles = [math.sqrt(a * b) for a, b in pairwise(solved)]
        for i, (gamma, low, high) in enumerate(zip(solved, [0.0, *middles], [*middles, math.inf], strict=True)):
            ranges[f"gammas.{i}"] = Interval(max(gamma / 1.2, low), min(gamma * 1.2, high), log=True, start=gamma)
        if self.kd_weight > 0:
            ranges["kd_weight"] = around(self.kd_weight, 0.1, 100.0, log=True)
        if self.adaptive_size is not None:
            ranges["adaptive_size"] = around(self.adaptive_size, 2.0, 20.0)
        return ranges
