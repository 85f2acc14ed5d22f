"""Format metrics for display: accuracies in percent, other metrics as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_engine.core.text import PERCENT

LOWER = ("mae",)
"""Metrics for which lower values are better. None of these metrics can be the main metric."""


@dataclass(frozen=True)
class Measure:
    """A metric: its name in history.json, and the factor and unit for the display of its values."""

    name: str = "accuracy"

    @property
    def scale(self) -> float:
        return 100 if self.name in PERCENT else 1

    @property
    def unit(self) -> str:
        return "%" if self.name in PERCENT else ""

    @property
    def title(self) -> str:
        """Title of an axis, such as `test accuracy (%)`."""
        return f"test {self.name} ({self.unit})" if self.unit else f"test {self.name}"

    @property
    def column(self) -> str:
        """Header of a table column, such as `top5 %`."""
        return f"{self.name} {self.unit}".rstrip()

    @property
    def direction(self) -> str:
        """Suffix ` (better when lower)`; empty if higher values are better."""
        return " (better when lower)" if self.name in LOWER else ""

    def number(self, value: float, sign: str = "") -> str:
        """Format the value without its unit, as `58.60` or `0.5860`. With sign='+', positive values begin with `+`."""
        return f"{self.scale * value:{sign}.{2 if self.unit else 4}f}"

    def points(self, change: float) -> str:
        """Format a change as `+2.50 points` for an accuracy, and as `+0.0250` for other metrics."""
        return self.number(change, "+") + (" points" if self.unit else "")

    def with_unit(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}".rstrip()


ACCURACY = Measure()


def decimals(value: float, least: int) -> int:
    """Return the number of decimals, from `least` to six, that shows two significant digits of `value`."""
    return max(least, min(6, 1 - math.floor(math.log10(abs(value))))) if value and math.isfinite(value) else least


def measure_in(values: Mapping[str, float]) -> Measure:
    """Return ACCURACY if the main metric of a round is an accuracy, otherwise a `Measure` without a name."""
    scored, accurate = (any(name.startswith(kind) for name in values) for kind in ("loss/", "accuracy/"))
    return Measure("") if scored and not accurate else ACCURACY


def levels_in(values: Mapping[str, float]) -> dict[str, float]:
    """Map each level to its main metric, with the full model last; empty if the round was not evaluated."""
    names = [key.removeprefix("loss/") for key in values if key.startswith("loss/")]
    if not names or "avg" not in values or "full" not in values:
        return {}
    metrics = (key.removesuffix(f"/{names[-1]}") for key in values if key.endswith(f"/{names[-1]}"))
    metric = next((each for each in metrics if each != "loss" and values[f"{each}/{names[-1]}"] == values["full"]), "")
    return {name: values[f"{metric}/{name}"] for name in names if f"{metric}/{name}" in values}


SHARES = (50, 80, 100)
"""Percentages of the rounds for which `highest` returns a value."""


def highest(rounds: Sequence[Mapping[str, float]], key: str) -> dict[int, float | None]:
    """Map each percentage p in SHARES to the highest value of `key` in the first p % of the rounds. The value is None
    if none of these rounds was evaluated. FedAIoT's code reports the same values, which are selected on test data."""
    found: dict[int, float | None] = {}
    for share in SHARES:
        until = -(-len(rounds) * share // 100)
        found[share] = max((metrics[key] for metrics in rounds[:until] if key in metrics), default=None)
    return found
