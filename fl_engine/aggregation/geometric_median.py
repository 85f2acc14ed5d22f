"""Geometric median: the model with the smallest sum of distances to the updates.

RFA (Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing
2022, arXiv:1912.13445, Algorithm 2, the smoothed Weiszfeld algorithm). The geometric median z of the updates p_m
minimises sum_m ||z - p_m||. Each iteration replaces z with the mean of the updates with the weights

    1 / max(NU, ||z - p_m||),

so an update far from z gets a small weight. If fewer than half of the updates are Byzantine, z stays near the others,
however far the Byzantine updates are.

Departs from the paper:

- In the paper, every client trains the whole model. Here ||z - p_m|| is computed on the elements that the update m
  contains, without running statistics. Each element of z is the mean of the element's holders, the updates that
  contain the element. An update has one weight for all its elements, so a false value on one element also reduces the
  weight on all others.
- In the paper, the distance of an update is multiplied by the client's number of samples. Here the distances have
  equal weights, because a few clients may have half of all samples, or claim to have them.
- The authors' code starts from the mean, so huge updates disappear only after many iterations. Here the first z is the
  mean of the changes after clipping them to their median norm.

With few holders, only distances on other elements protect an element. An element with one holder gets this client's
value. An element with two holders gets a value between theirs, nearer to the client with the smaller distance. If a
round has only two updates, the result is nearer to the update with the smaller change.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_engine.aggregation.averaging import StoredUpdates, StreamingMean, norm_of
from fl_engine.aggregation.privacy import Public
from fl_engine.core.fields import Options, Positive
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import ParamLayout, Params

NU = 1e-6
"""Smallest distance by which a weight is divided, as in the paper."""
ITERATIONS = 5
"""If 6 of 20 updates are Byzantine, 5 iterations are within 0.1 % of the honest updates' spread from the optimum."""


@dataclass(frozen=True)
class GeometricMedian(Options):
    """Geometric median (RFA, IEEE TSP 2022): a mean in which updates far from the others have small weights."""

    name: Literal["geometric_median"] = "geometric_median"
    clip: Positive | None = None

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Weiszfeld:
        return Weiszfeld(old, layout, self.clip)


class Weiszfeld(StoredUpdates):
    """Geometric median by the smoothed Weiszfeld algorithm. `result` reads each update twice per iteration."""

    def result(self) -> Params:
        if self.empty:
            return self._old
        usual = statistics.median_low(self._distances(self._old))
        found = self._mean([1.0] * len(self._kinds), usual)
        for _ in range(ITERATIONS):
            found = self._mean([1 / max(NU, distance) for distance in self._distances(found)])
        return found

    def _distances(self, model: Params) -> list[float]:
        """Return the distance of each update from `model`."""
        return [
            norm_of(self._spool.get(entry), kind, model, self._regions, lambda name: not is_statistic(name))
            for entry, kind in enumerate(self._kinds)
        ]

    def _mean(self, weights: Sequence[float], clip: float | None = None) -> Params:
        mean = StreamingMean(self._old, self._layout, clip)
        for entry, ((spec, _), weight) in enumerate(zip(self._kinds, weights, strict=True)):
            mean.add(self._spool.get(entry), spec, weight)
        return mean.result()
