"""Answer the question of a report in one sentence and four tiles. The terminal and the page show the same sentence.

The answer is about two rows: the first one, which the user named first, and the best of the other rows. Pages show
these two rows in colour, and all other rows in grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_engine.algorithms import ALGORITHMS, PRESETS
from flexfleet.files.measure import Measure


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """Beginning of a page. `id` names the run, comparison, study or nightly regression run."""

    id: str
    sentence: str
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Standing:
    """Result of a run, or means over the runs of a variant."""

    label: str
    name: str
    """Name in sentences, as returned by `named`."""
    value: float
    """Main metric after the last round."""
    rounds: float
    mb: float
    """MB sent in both directions."""
    shown: tuple[str, str, str, str]
    """Texts for the tiles: the metric, the MB, the time and the number of failed clients."""
    notes: tuple[str, str, str, str] = ("", "", "", "")
    """Texts below `shown`, if no other row is compared with this row."""


def interest(values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the rows of interest: the first label, and of the others the label with the highest value."""
    first, *others = values
    return (first, *([max(others, key=lambda label: values[label])] if others else ()))


def named(label: str, algorithm: str, eligible: object = None) -> str:
    """Return the name of a variant in sentences: its label, or the algorithm's name in its paper if the label is the
    algorithm's registered name. FedAvg's name states which devices train the full model."""
    preset = PRESETS.get(algorithm)
    kind = ALGORITHMS.get(preset.algorithm if preset else algorithm)
    if label != algorithm or kind is None:
        return label
    name, colon, _ = preset.meaning.partition(":") if preset else ("", "", "")
    name = name if colon else kind.__name__
    if eligible == "capable":
        return f"{name} on the devices that hold the full model"
    return f"{name} with the full model on every device" if algorithm == "all_large" else name


@dataclass(frozen=True)
class Metric:
    """The metric of an answer: avg, the mean over the levels, or the mean over the clients' models."""

    measure: Measure
    on_clients: bool = False
    """True if all runs have metrics that clients measured on their own held-out samples."""
    personal: bool = False
    """True if clients have their own values of some parameters, which the global model does not have."""

    @property
    def title(self) -> str:
        """Label of the tile."""
        return f"test {self.measure.name}, mean over the {'clients' if self.on_clients else 'levels'}"

    @property
    def name(self) -> str:
        """Name of the metric in sentences."""
        if self.on_clients:
            return f"{self.measure.name} on the clients' own samples"
        return f"{self.measure.name} of the global model" if self.personal else self.measure.name

    def number(self, value: float) -> str:
        """Format a value with the precision of a sentence, such as `98.6 %` or `0.586`."""
        unit = self.measure.unit
        return f"{self.measure.scale * value:.{1 if unit else 3}f} {unit}".rstrip()

    def score(self, value: float) -> str:
        return f"{self.number(value)} {self.name}"

    def gap(self, gap: float) -> str:
        """Format a difference with a preposition, such as `+1.9 points over`."""
        unit, size = self.measure.unit, abs(self.measure.scale * gap)
        shown = f"{size:.{3 if not unit else 1 if size >= 0.05 else 2}f}{' points' * bool(unit)}"
        if not float(shown.partition(" ")[0]):
            return "the same as"
        return f"+{shown} over" if gap > 0 else f"{shown} below"


def compared(
    main: Standing, other: Standing, metric: Metric, seeds: int, p: float | None = None, apart: bool = False
) -> str:
    """Return the sentence that compares two rows.

    Args:
        seeds: Number of seeds over which the values are means.
        p: Adjusted p value of the paired test between the rows; None if they were not tested.
        apart: True if the rows differ significantly.
    """
    after, sent = f"after {count(main.rounds, 'round')}", traffic(main.mb, other.mb)
    if p is not None and not apart:
        both = " and ".join(f"{each.name} ({metric.number(each.value)})" for each in (main, other))
        how = f"{after} ({p_value(p)}, {count(seeds, 'seed')}); {main.name} sends {sent}"
        return f"No significant difference between {both} in {metric.name} {how}"
    how = f" ({p_value(p)}, {count(seeds, 'seed')})" if p is not None else ""
    untested = f"; {count(seeds, 'seed')}, not tested" if p is None else ""
    gap = f"{metric.gap(main.value - other.value)} {other.name}{how}"
    return f"{main.name} reaches {metric.score(main.value)} {after}; {gap}, with {sent}{untested}"


def traffic(mine: float, other: float) -> str:
    """Compare two numbers of bytes, as in `36 % fewer bytes` or `2.1 times the bytes`."""
    if not other or not mine:
        return "the same bytes" if mine == other else f"{mine:,.1f} MB instead of {other:,.1f} MB"
    if mine >= 2 * other:
        return f"{mine / other:.1f} times the bytes"
    percent = round(100 * (mine / other - 1))
    return f"{abs(percent)} % {'more' if percent > 0 else 'fewer'} bytes" if percent else "the same bytes"


def p_value(p: float) -> str:
    """Format a p value without its leading zero. Round down, so that a value below the level is shown below it."""
    if p < 0.001:
        return "p < .001"
    digits = 2 if p >= 0.1 else 3
    return f"p = {math.floor(p * 10**digits + 1e-9) / 10**digits:.{digits}f}".replace("= 0.", "= .")


def count(number: float, noun: str) -> str:
    """Format a number with its noun in the singular or plural, as in `one seed` or `40 rounds`."""
    return f"one {noun}" if number == 1 else f"{number:,.0f} {noun}s"


def tiles(metric: Metric, main: Standing, other: Standing | None = None, time: str = "time") -> list[Tile]:
    """Return the four tiles of a row. The notes in the tiles are the values of the other row, if there is one."""
    labels = (metric.title, "sent, down + up", time, "failed clients")
    notes = main.notes if other is None else [f"{other.label}: {text}" for text in other.shown]
    return [Tile(*each) for each in zip(labels, main.shown, notes, strict=True)]
