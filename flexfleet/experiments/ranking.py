"""Who is first, by a paired test: the label with the highest mean against each other label, seed by seed.

A label is first only where its difference to every other one is significant at 5 %: by Student's paired t test,
two-sided, adjusted by Holm's method for the labels that it is compared with. With fewer than three seeds there is no
such claim. Labels with other data, another partition, other noise or another network are another case, and a label is
compared with those of its case. Where no two labels are of one case, it is the cases that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from flexfleet.files.measure import Measure
from flexfleet.reports.report import NONE, plain

FEWEST = 3
"""Seeds with which a label may be called first."""
TITLES = {
    "avg": "avg last",
    "full": "full last",
    "best_avg": "avg at best",
    "best_full": "full at best",
    "local_avg": "local avg",
    "local_full": "local full",
}
"""The figures that are tested, by their names in MLflow, and the columns of a comparison that they are."""
Rows = tuple[tuple[str, ...], ...]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Behind(_Part):
    """How far a label is behind the highest one: the differences highest - label, one for each seed."""

    mean: float
    """In the figure's own unit: of accuracies as shares, 0.01 is one point."""
    std: float
    """The sample standard deviation (n - 1)."""
    p: float | None
    """Two-sided, of the paired t test; null where all differences are equal: without a spread there is no test."""
    p_holm: float | None
    """The same, adjusted for the labels that the highest is compared with; null as `p`."""

    @property
    def apart(self) -> bool:
        """Whether the test tells the label apart from the highest one."""
        return self.p_holm is not None and self.p_holm < LEVEL


class First(_Part):
    """Who is first by one figure."""

    highest: str
    """The label with the highest mean over the seeds; of several, the first by name."""
    first: bool
    """Whether it is told apart from every other label that has the figure."""
    not_told_apart: tuple[str, ...]
    """The labels that it is not told apart from, as the comparison orders them."""
    behind: dict[str, Behind]
    """Every other label that has the figure."""


class RankedCase(_Part):
    """Who is first among the labels with these settings of data, partition, noise and network, where other labels have
    others."""

    settings: dict[str, Any]
    """By dotted name."""
    labels: tuple[str, ...]
    first: dict[str, First]
    """By figure; empty for a label that is alone."""

    def __str__(self) -> str:
        return ", ".join(f"{path} {plain(value)}" for path, value in self.settings.items())


def firsts(values: Mapping[str, Mapping[str, Sequence[float | None]]]) -> dict[str, First] | None:
    """By figure. `values`: of each figure and label, a value for each seed, in the same order; a label without the
    figure has None, and a figure that fewer than two labels have is left out. None with fewer than FEWEST seeds."""
    if any(len(each) < FEWEST for labels in values.values() for each in labels.values()):
        return None
    known = {
        figure: {label: [v for v in each if v is not None] for label, each in labels.items() if None not in each}
        for figure, labels in values.items()
    }
    return {figure: _first(labels) for figure, labels in known.items() if len(labels) > 1}


def _first(values: Mapping[str, Sequence[float]]) -> First:
    highest = min(values, key=lambda label: (-fmean(values[label]), label))
    others = {label: each for label, each in values.items() if label != highest}
    tests = [tested(values[highest], each) for each in others.values()]
    # A label without a test counts as one that shows nothing.
    adjusted = holm([1.0 if test is None else test.p for test in tests])
    behind = {}
    for (label, each), test, p_holm in zip(others.items(), tests, adjusted, strict=True):
        differences = [a - b for a, b in zip(values[highest], each, strict=True)]
        behind[label] = Behind(
            mean=fmean(differences),
            std=stdev(differences),
            p=None if test is None else test.p,
            p_holm=None if test is None else p_holm,
        )
    close = tuple(label for label, each in behind.items() if not each.apart)
    return First(highest=highest, first=not close, not_told_apart=close, behind=behind)


# ------------------------------------------------------------------------------------------- shown to people
def rows(found: Mapping[str, First], labels: Sequence[str], measure: Measure) -> Rows:
    """A row for each label, with a cell for each figure: `first`, `highest` where it is not first, or how far it is
    behind, as `mean ± std, p`."""

    def cell(figure: str, of: First, label: str) -> str:
        if label == of.highest:
            return "first" if of.first else "highest"
        if label not in of.behind:
            return NONE
        one, shown = of.behind[label], Measure() if figure.startswith("local") else measure
        p = "no spread" if one.p_holm is None else f"p {one.p_holm:.3f}" if one.p_holm >= 0.001 else "p < 0.001"
        return f"{shown.said(one.mean)} ± {shown.said(one.std)}, {p}"

    return tuple((label, *(cell(figure, of, label) for figure, of in found.items())) for label in labels)


def notes(found: Mapping[str, First] | None, seeds: int, cases: Sequence[RankedCase] = ()) -> list[str]:
    """Who is first, in words; that nobody is where there are too few seeds."""
    if seeds < FEWEST:
        return [f"Fewer than {FEWEST} seeds: there is no paired test, so no row is called first."]
    told: list[tuple[str, Mapping[str, First]]] = [(f" with {case}", case.first) for case in cases]
    told = told or [("", found or {})]
    if not any(firsts for _, firsts in told):
        return []
    lines = [
        "Behind the highest: the mean difference over equal seeds ± its sample standard deviation, and p of Student's "
        f"paired t test ({seeds - 1} degrees of freedom, two-sided) after Holm over the rows that the highest is "
        f"compared with. A row is first where every p is below {LEVEL:g}; the highest is chosen by these same figures."
    ]
    if cases:
        lines.append("Rows are compared with those that have the same data, partition, noise and network.")
    for where, firsts in told:
        for figure, of in firsts.items():
            said = "first" if of.first else f"highest, but not told apart from {', '.join(of.not_told_apart)}"
            lines.append(f"{TITLES[figure]}{where}: {of.highest} is {said}.")
    return lines


LEVEL = 0.05
"""Intervals leave out this much; a p below it counts as a difference."""
ROUNDING = 1e-12
"""Differences that lie closer together than this share of the figures are equal, but for rounding."""


class TTest(NamedTuple):
    """A t test of n differences: their mean and half of the width of its 95 % interval, in the differences' unit, and
    the two-sided p."""

    mean: float
    half: float
    p: float


def tested(a: Sequence[float], b: Sequence[float]) -> TTest | None:
    """The t test of the differences a - b, (n,) each. None where nothing can be tested: one pair, or differences that
    are all the same."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, n = fmean(differences), len(differences)
    if n < 2 or max(differences) - min(differences) <= ROUNDING * max(map(abs, (*a, *b))):
        return None
    error = stdev(differences) / math.sqrt(n)
    return TTest(mean, t_quantile(1 - LEVEL / 2, n - 1) * error, two_sided(mean / error, n - 1))


def holm(p: Sequence[float]) -> list[float]:
    """Adjusts the p values of several tests (Holm, 1979): the smallest of m times m, the next times m - 1, and so on,
    each at least as large as the one before and at most 1."""
    out, before = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        before = out[i] = max(before, min(1.0, (len(p) - rank) * p[i]))
    return out


# ------------------------------------------------------------------------------------------- Student's t
def two_sided(t: float, freedom: int) -> float:
    """The probability that Student's t with so many degrees of freedom, at least 1, is further from 0 than `t`
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1.0 - inside)


@cache
def t_quantile(share: float, freedom: int) -> float:
    """The value that Student's t stays below with this probability, 0.5 to 1, found by halving."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) / 2 > 1 - share:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if two_sided(middle, freedom) / 2 > 1 - share else (low, middle)
    return middle
