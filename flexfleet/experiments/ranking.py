"""Rank the labels of a comparison by paired t tests over the seeds.

The label with the highest mean is first only if its difference to every other label is significant at 5 %, by Student's
two-sided paired t test after Holm's adjustment. With fewer than three seeds no label is first. Labels are ranked within
a case: the same data, partition, noise and network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from flexfleet.files.measure import Measure
from flexfleet.reports.report import NONE, plain

LEVEL = 0.05
"""A p below this level counts as a difference; intervals cover the rest."""
ROUNDING = 1e-12
"""Differences within this share of the figures are equal, except for rounding."""
FEWEST = 3
"""The fewest seeds with which a label may be called first."""
TITLES = {
    "avg": "avg last",
    "full": "full last",
    "best_avg": "avg at best",
    "best_full": "full at best",
    "local_avg": "local avg",
    "local_full": "local full",
}
"""Map the figures that are tested, by their names in MLflow, to their columns in a comparison's table."""


class TTest(NamedTuple):
    """Mean of the differences, half of the width of its 95 % interval, and the two-sided p."""

    mean: float
    half: float
    p: float


def tested(a: Sequence[float], b: Sequence[float]) -> TTest | None:
    """Test the differences a - b, (n,) each. None with one pair, and if all differences are equal."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < 2 or max(differences) - min(differences) <= ROUNDING * max(map(abs, (*a, *b))):
        return None
    from scipy.stats import ttest_1samp

    found, mean = ttest_1samp(differences, 0.0), fmean(differences)
    return TTest(mean, float(found.confidence_interval(1 - LEVEL).high) - mean, float(found.pvalue))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p values of m tests (Holm, 1979): the smallest times m, the next times m - 1, and so on; each at least
    as large as the one before, and at most 1."""
    out, before = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        before = out[i] = max(before, min(1.0, (len(p) - rank) * p[i]))
    return out


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Behind(_Part):
    """How far a label is behind the highest label: the differences highest - label, one for each seed."""

    mean: float
    """In the figure's own unit; for accuracies, which are shares, 0.01 is one point."""
    std: float
    """The sample standard deviation (n - 1)."""
    p: float | None
    """Two-sided p of the paired t test; null if all differences are equal."""
    p_holm: float | None
    """`p` after Holm's adjustment."""

    @property
    def apart(self) -> bool:
        """Whether the label differs significantly from the highest label."""
        return self.p_holm is not None and self.p_holm < LEVEL


class First(_Part):
    """The label that is first by one figure."""

    highest: str
    """The label with the highest mean over the seeds; with ties, the first by name."""
    first: bool
    """Whether it differs significantly from every other label that has the figure."""
    not_told_apart: tuple[str, ...]
    """The labels that do not differ significantly from it, in the comparison's order."""
    behind: dict[str, Behind]
    """Every other label that has the figure."""


class RankedCase(_Part):
    """The labels that share these settings of data, partition, noise and network, and which of them is first."""

    settings: dict[str, Any]
    """By dotted name."""
    labels: tuple[str, ...]
    first: dict[str, First]
    """By figure; empty for a single label."""

    def __str__(self) -> str:
        return ", ".join(f"{path} {plain(value)}" for path, value in self.settings.items())


def firsts(values: Mapping[str, Mapping[str, Sequence[float | None]]]) -> dict[str, First] | None:
    """Return the label that is first by each figure that two labels have; None with fewer than FEWEST seeds. `values`:
    for each figure and label, a value for each seed; None if the label does not have the figure."""
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
    # A label without a test counts as not significant.
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


def rows(found: Mapping[str, First], labels: Sequence[str], measure: Measure) -> tuple[tuple[str, ...], ...]:
    """Return a row for each label, with a cell for each figure: `first`, `highest` without significance, or how far the
    label is behind, as `mean ± std, p`."""

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
    """Return sentences about the ranking."""
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
