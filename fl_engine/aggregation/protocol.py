"""What every aggregation has: a configured rule, which starts one aggregate for each round."""

from __future__ import annotations

from typing import Protocol

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.privacy import Public
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec


class Aggregate(Protocol):
    """A round's updates, one after the other, and what they make."""

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Raises ModelError for an update that does not fit; nothing has been added then."""

    @property
    def empty(self) -> bool:
        """Whether the old model stays as it is."""

    def trained(self) -> Params:
        """bool, shaped like the model: the elements that the server's step moves."""

    def result(self) -> Params:
        """On the CPU."""


class AggregationRule(Protocol):
    """How a round's updates become one model: a frozen dataclass whose fields are the options."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        """An aggregate for a round that begins with the model `old`. `public` is what is known of the round without
        looking at any client's data."""


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
