"""Clipping bounds how far one update can move the global model's weights: their change, over all tensors together, is
scaled down to an L2 norm of at most `clip`. It comes before any aggregation. Running statistics travel as they are;
`rounds.norm_bound` bounds them. (A private aggregation, which has a `clip` of its own, counts every tensor, and refuses
networks with running statistics.)"""

from __future__ import annotations

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.protocol import Aggregate
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec


def clipped(aggregate: Aggregate, old: Params, layout: ParamLayout, clip: float | None) -> Aggregate:
    """The aggregate, fed with clipped updates; with None, with updates as they are."""
    return aggregate if clip is None else Clipped(aggregate, old, layout, clip)


class Clipped:
    """Feeds another aggregate with updates whose weights change by at most `clip`."""

    def __init__(self, inner: Aggregate, old: Params, layout: ParamLayout, clip: float) -> None:
        self._inner = inner
        self._old = old
        self._regions = Regions(old, layout)
        self._clip = clip

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        self._inner.add(limited(payload, spec, self._old, self._regions, self._clip), spec, weight)

    @property
    def empty(self) -> bool:
        return self._inner.empty

    def trained(self) -> Params:
        return self._inner.trained()

    def result(self) -> Params:
        return self._inner.result()
