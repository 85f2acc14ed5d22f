"""What every aggregation has: a configured rule, which starts one aggregate for each round."""

from __future__ import annotations

from typing import Protocol

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
