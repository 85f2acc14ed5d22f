"""Clipping bounds how far one update moves the global model: its change, all of its tensors together, is scaled down to
an L2 norm of at most `clip`. It goes before any aggregation."""

from __future__ import annotations

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.protocol import Aggregate
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec


def clipped(aggregate: Aggregate, old: Params, layout: ParamLayout, clip: float | None) -> Aggregate:
    """The aggregate, of clipped updates; with None, of updates as they are."""
    return aggregate if clip is None else Clipped(aggregate, old, layout, clip)


class Clipped:
    """Another aggregate, of updates that move by no more than `clip`."""

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
