"""Rank the variants of a comparison by paired t tests over the seeds.

The variant with the highest mean is ranked first only if it differs significantly (at 5 %) from every other variant.
The test is Student's two-sided paired t test, and its p values are adjusted by Holm's method. With fewer than three
seeds, variants are not ranked. Only variants with the same data, partition, noise and network are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fl_engine.core.records import Strict
from flexfleet.files.measure import Measure
from flexfleet.reports.finished_run import plain
from flexfleet.reports.page import NONE

LEVEL = 0.05
"""Significance level of the tests. The confidence level of intervals is 1 - LEVEL."""
ROUNDING = 1e-12
"""Paired differences count as equal if they vary by at most this fraction of the largest value."""
FEWEST = 3
"""Minimum number of seeds for a ranking."""
TITLES = {
    "avg": "avg last",
    "full": "full last",
    "best_avg": "avg at best",
    "best_full": "full at best",
    "local_avg": "local avg",
    "local_full": "local full",
    "clients_mean": "clients mean",
    "clients_p10": "clients p10",
}
"""Map the MLflow name of each tested metric to its column header in the tables of a comparison."""


class TTest(NamedTuple):
    """Mean difference, half the width of its 95 % confidence interval, and two-sided p value of a paired t test."""

    mean: float
    half: float
    p: float


def tested(a: Sequence[float], b: Sequence[float]) -> TTest | None:
    """Test whether the mean of a - b differs from 0. Returns None if all differences are equal."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < 2 or max(differences) - min(differences) <= ROUNDING * max(map(abs, (*a, *b))):
        return None
    from scipy.stats import ttest_1samp

    found, mean = ttest_1samp(differences, 0.0), fmean(differences)
    return TTest(mean, float(found.confidence_interval(1 - LEVEL).high) - mean, float(found.pvalue))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p values of m tests (Holm, 1979). The smallest p is multiplied by m, the next p by m - 1, and so on.
    Adjusted p values are at most 1, and keep the order of the p values."""
    out, before = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        before = out[i] = max(before, min(1.0, (len(p) - rank) * p[i]))
    return out


class Behind(Strict):
    """Difference between the variant with the highest mean and one other variant, with statistics over the seeds."""

    mean: float
    """Mean difference in the unit of the metric. Accuracies are fractions, so 0.01 is one percentage point."""
    std: float
    """Sample standard deviation of the differences (n - 1)."""
    p: float | None
    """Two-sided p value of the paired t test; null if all differences are equal."""
    p_holm: float | None
    """Value of `p`, adjusted by Holm's method."""

    @property
    def apart(self) -> bool:
        """True if the variant differs significantly from the variant with the highest mean."""
        return self.p_holm is not None and self.p_holm < LEVEL


class First(Strict):
    """Ranking of the variants by one metric."""

    highest: str
    """Label of the variant with the highest mean over the seeds; in a tie, the first label in alphabetical order."""
    first: bool
    """True if `highest` differs significantly from every other variant."""
    not_told_apart: tuple[str, ...]
    """Labels of the variants that do not differ significantly from `highest`, in the order of the comparison."""
    behind: dict[str, Behind]
    """Map the label of each other variant to statistics of its differences. Variants without the metric are omitted."""


class RankedCase(Strict):
    """Variants with the same data, partition, noise and network, and the ranking of these variants."""

    settings: dict[str, Any]
    """Map dotted names of settings to values."""
    labels: tuple[str, ...]
    first: dict[str, First]
    """Map each metric to a ranking. Empty if there is only one variant."""

    def __str__(self) -> str:
        return ", ".join(f"{path} {plain(value)}" for path, value in self.settings.items())


def firsts(values: Mapping[str, Mapping[str, Sequence[float | None]]]) -> dict[str, First] | None:
    """Return {metric: ranking} for each metric that at least two variants have. Return None if there are fewer than
    FEWEST seeds. `values` is {metric: {label: value of each seed}}. Missing values are None."""
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
    # If no test is possible, the difference does not count as significant.
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
    """Return a row for each variant with a cell for each metric. For the variant with the highest mean, the cell is
    `first` if the variant differs significantly from all others, otherwise `highest`. All other cells contain the mean,
    std and p value of the differences to this variant."""

    def cell(figure: str, ranked: First, label: str) -> str:
        if label == ranked.highest:
            return "first" if ranked.first else "highest"
        if (behind := ranked.behind.get(label)) is None:
            return NONE
        unit = Measure() if figure.startswith("local") else measure
        p = "no spread" if behind.p_holm is None else f"p {behind.p_holm:.3f}"
        return f"{unit.number(behind.mean)} ± {unit.number(behind.std)}, {p.replace('p 0.000', 'p < 0.001')}"

    return tuple((label, *(cell(figure, ranked, label) for figure, ranked in found.items())) for label in labels)


def notes(found: Mapping[str, First] | None, seeds: int, cases: Sequence[RankedCase] = ()) -> list[str]:
    """Return sentences that explain the ranking."""
    if seeds < FEWEST:
        return [f"Fewer than {FEWEST} seeds: there is no paired test, so no variant is ranked first."]
    groups: list[tuple[str, Mapping[str, First]]] = [(f" with {case}", case.first) for case in cases]
    groups = groups or [("", found or {})]
    if not any(firsts for _, firsts in groups):
        return []
    lines = [
        "Behind the highest: the mean difference over equal seeds ± its sample standard deviation, and p of Student's "
        f"paired t test ({seeds - 1} degrees of freedom, two-sided), adjusted by Holm's method for all variants that "
        f"the highest is compared with. The highest is first if every p is below {LEVEL:g}. It is selected by the same "
        "values that are tested."
    ]
    if cases:
        lines.append("Only variants with the same data, partition, noise and network are compared.")
    for where, firsts in groups:
        for figure, of in firsts.items():
            close = f"highest, but does not differ significantly from {', '.join(of.not_told_apart)}"
            lines.append(f"{TITLES[figure]}{where}: {of.highest} is {'first' if of.first else close}.")
    return lines
