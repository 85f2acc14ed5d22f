"""What an algorithm says of a search over its hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fl_engine.core.types import Pool


@dataclass(frozen=True)
class Interval:
    """The values that a search draws of one hyper-parameter: from `low` to `high`, or one of `choices`. The configured
    value is among them, so that the search learns from its first trial, which runs the configuration unchanged."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """As likely between 1 and 10 as between 10 and 100."""
    whole: bool = False
    """Whole numbers only, low and high too."""
    start: float | None = None
    """The value that the algorithm computes by itself if its field is null."""
    choices: tuple[Any, ...] = ()
    """The values of a parameter of a closed set; they stand alone."""


def around(value: float, low: float, high: float, *, log: bool = False) -> Interval:
    """From `low` to `high`, or to the configured value where that lies beyond."""
    return Interval(min(low, value), max(high, value), log=log)


@runtime_checkable
class Searched(Protocol):
    """An algorithm that has a search space of its own."""

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """By the path of a field: `kd_weight`, or `gammas.0` for the first entry of a list. `pool` is that of the
        algorithm as it is configured. A parameter that is switched off there is left out: a search that drew values
        for it would switch it on."""
