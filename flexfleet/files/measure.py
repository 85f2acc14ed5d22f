"""How metrics are displayed: accuracies in %, other metrics as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_engine.core.text import PERCENT

LOWER = ("mae",)
"""Metrics that are better when lower. None of them is a deciding metric."""


@dataclass(frozen=True)
class Measure:
    """A metric by its name in histories, with the factor and the unit for showing its values."""

    name: str = "accuracy"

    @property
    def scale(self) -> float:
        return 100 if self.name in PERCENT else 1

    @property
    def unit(self) -> str:
        return "%" if self.name in PERCENT else ""

    @property
    def title(self) -> str:
        """The title of an axis: `test accuracy (%)`."""
        return f"test {self.name} ({self.unit})" if self.unit else f"test {self.name}"

    @property
    def column(self) -> str:
        """The head of a table's column: `top5 %`."""
        return f"{self.name} {self.unit}".rstrip()

    @property
    def direction(self) -> str:
        """` (better when lower)`; empty for a metric that is better when higher."""
        return " (better when lower)" if self.name in LOWER else ""

    def said(self, value: float, sign: str = "") -> str:
        """Without the unit: `58.60`, or `0.5860`; with the sign `+` a gain is `+1.20`."""
        return f"{self.scale * value:{sign}.{2 if self.unit else 4}f}"

    def with_unit(self, value: float) -> str:
        return f"{self.said(value)} {self.unit}".rstrip()


ACCURACY = Measure()


def decimals(value: float, least: int) -> int:
    """The number of decimals that show two significant digits of a small value, at most six."""
    return max(least, min(6, 1 - math.floor(math.log10(abs(value))))) if value and math.isfinite(value) else least


def measure_in(values: Mapping[str, float]) -> Measure:
    """The deciding metric of a round's measurements. If levels were evaluated without accuracy, it is another
    metric."""
    scored, accurate = (any(name.startswith(kind) for name in values) for kind in ("loss/", "accuracy/"))
    return Measure("") if scored and not accurate else ACCURACY


SHARES = (50, 80, 100)
"""Shares of the rounds, in %."""


def highest(rounds: Sequence[Mapping[str, float]], key: str) -> dict[int, float | None]:
    """Map each of SHARES to the highest value within that share of the rounds, or None. FedAIoT's code reports these
    values. Like the best round they are chosen on test data."""
    found: dict[int, float | None] = {}
    for share in SHARES:
        until = -(-len(rounds) * share // 100)
        found[share] = max((metrics[key] for metrics in rounds[:until] if key in metrics), default=None)
    return found
