"""Multi-Krum: merge only the updates that are closest to the others.

Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017, Sections 3, 4.
With n updates, of which at most f are Byzantine, the score of an update is

    score = -(sum of its squared L2 distances to the n - f - 2 closest other updates).

The f updates with the lowest scores are dropped, and another aggregation merges the others.

Departs from the paper, in which every client trains the whole model. Here the distances are computed on the weights
that all updates of the round contain, which are the smallest sub-model's weights if the sub-models are nested. An
attack on other weights is not detected. Those weights have fewer holders, so a Byzantine client has a larger influence
on them. If the updates have no weights in common, or if n < f + 3, no update is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.aggregation.rules import Dropping, Received, Scores
from fl_engine.core.contracts import ServerContext
from fl_engine.core.slicing import common, is_statistic, take
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec


@dataclass(frozen=True)
class MultiKrum(Dropping):
    """Drop the updates that are farthest from the others (Multi-Krum, NeurIPS 2017), and merge the rest."""

    name: Literal["multi_krum"] = "multi_krum"
    byzantine: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Fraction of the updates that is dropped: f = floor(byzantine * n)."""

    def scores(self, updates: Received, layout: ParamLayout, server: ServerContext, algorithm: Any) -> Scores:
        received = [update for _, update in updates]
        shared: SubmodelSpec | None = received[0].spec
        for update in received:
            shared = common(layout, shared, update.spec)
        n, f = len(received), self._most(len(received))
        if shared is None or n - f < 3:
            return {update.client: 0.0 for update in received}
        parts = [take(update.payload, layout, shared, have=update.spec) for update in received]
        nearest = _squared_distances(parts).sort(1).values[:, 1 : n - f - 1]  # column 0 is the distance to itself
        return {u.client: -score for u, score in zip(received, nearest.sum(1).tolist(), strict=True)}

    def lowest(self, scores: Scores) -> float:
        return sorted(scores.values())[self._most(len(scores))]

    def _most(self, updates: int) -> int:
        return int(self.byzantine * updates + 1e-9)


def _squared_distances(parts: Sequence[Params]) -> Tensor:
    """Return the squared L2 distances (n, n) between the weights that all parts contain, without running statistics."""
    out = torch.zeros(len(parts), len(parts), dtype=torch.float64)
    for name in (name for name in parts[0] if not is_statistic(name) and all(name in part for part in parts)):
        values = torch.stack([part[name].flatten() for part in parts]).double()
        for i, row in enumerate(values):
            out[i] += (values - row).square().sum(1)
    return out
