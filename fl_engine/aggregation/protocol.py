"""The protocol of aggregations, and the clipping that may come before any of them."""

from __future__ import annotations

from typing import Protocol

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.privacy import Public
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec


class Aggregate(Protocol):
    """A round's updates and their aggregate."""

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add an update. Raises ModelError if it does not fit, without adding anything."""

    @property
    def empty(self) -> bool:
        """Whether the old model stays unchanged."""

    def trained(self) -> Params:
        """Return masks (bool, shapes of the model) of the elements that the server's step moves."""

    def result(self) -> Params:
        """Return the new model, on the CPU."""


class AggregationRule(Protocol):
    """How a round's updates become one model. A frozen dataclass of options."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        """Return an aggregate for a round that begins with the model `old`. `public` holds the round's facts that do
        not depend on any client's data."""


def clipped(aggregate: Aggregate, old: Params, layout: ParamLayout, clip: float | None) -> Aggregate:
    """Return the aggregate, fed with clipped updates unless `clip` is None."""
    return aggregate if clip is None else Clipped(aggregate, old, layout, clip)


class Clipped:
    """Scales the change of an update's weights, over all tensors together, down to an L2 norm of at most `clip`, and
    passes it on. Running statistics stay; `rounds.norm_bound` bounds them. (A private aggregation clips all tensors
    itself.)"""

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
