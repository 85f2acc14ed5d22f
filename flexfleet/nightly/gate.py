"""Decides whether a figure is worse than it was, beyond what noise explains.

A night has figures of a few seeds. The gate compares them with those of the champion (the last night that passed) and
of the reference in git, which has at least 20 seeds. It compares the means of each metric. The earlier figures show how
far seeds spread: with s their pooled standard deviation, n seeds now and m before, a difference of means beyond

    t(1 - alpha) * s * sqrt(1/n + 1/m)

is not noise (one-sided two-sample t test; the night's own spread is left out, since broken code may also spread more).
`alpha` is ALPHA divided by the number of comparisons of the night (Bonferroni). A difference fails the gate only if
it is also larger than its threshold. Small drops from champion to champion cannot add up unseen, since the reference
does not change by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from flexfleet.comparisons.paired import t_quantile

ALPHA = 0.002
"""The share of nights that noise alone fails, for normally distributed figures. Real figures have longer tails: in
draws from the digits suite's 20 seeds, fewer than one night in a hundred fails (a test)."""
FEWEST_SEEDS = 3

HIGHER = ("avg", "full")
"""Metrics that are better when higher; their thresholds are absolute. The thresholds of the others are shares of the
earlier figure."""
OF_MACHINE = ("peak_mb_rounds", "pace")
"""Metrics that can only be compared between equal machines."""
METRICS = {
    "avg": "accuracy, mean over the levels",
    "full": "accuracy of the full model",
    "rounds": "rounds to the accuracy",
    "mb": "MB sent to the accuracy",
    "peak_mb_rounds": "peak memory of the rounds, MB",
    "pace": "seconds by those of a plain loop",
}

Values = Mapping[str, Sequence[float]]
"""By metric, a value for each seed (for pace: for each turn)."""


class Check(BaseModel):
    """One metric of one label, now and before."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    label: str
    metric: str
    measured: str = "accuracy"
    """The task's metric that decides: what avg and full are values of, and what is reached in so many rounds and MB."""
    against: str
    """champion or reference."""
    now: float
    before: float
    worse_by: float
    """Below zero if it is better."""
    threshold: float
    noise: float
    """Differences up to this are noise."""
    failed: bool


@dataclass(frozen=True)
class Before:
    """What the night is compared with."""

    name: str
    labels: Mapping[str, Values]
    same_machine: bool


def said(check: Check) -> str:
    """What a check compares, for people."""
    return METRICS[check.metric].replace("accuracy", check.measured)


def judge(
    now: Mapping[str, Values],
    before: Sequence[Before],
    thresholds: Mapping[str, float],
    measured: Mapping[str, str] = MappingProxyType({}),
) -> list[Check]:
    """All comparisons that can be made, in the order of the labels. `measured`: by label, the task's metric where that
    is another than accuracy."""
    asked = [
        (label, metric, other)
        for label, values in now.items()
        for metric in METRICS
        for other in before
        if values.get(metric)
        and other.labels.get(label, {}).get(metric)
        and (other.same_machine or metric not in OF_MACHINE)
    ]
    checks = []
    for label, metric, other in asked:
        known = [b.labels[label][metric] for b in before
                 if b.labels.get(label, {}).get(metric) and (b.same_machine or metric not in OF_MACHINE)]  # fmt: skip
        alpha = ALPHA / len(asked)
        check = _check(label, metric, other, now[label][metric], known, thresholds[metric], alpha)
        checks.append(check.model_copy(update={"measured": measured.get(label, check.measured)}))
    return checks


def _check(
    label: str,
    metric: str,
    other: Before,
    now: Sequence[float],
    known: Sequence[Sequence[float]],
    threshold: float,
    alpha: float,
) -> Check:
    before = other.labels[label][metric]
    better = 1 if metric in HIGHER else -1
    worse = better * (fmean(before) - fmean(now)) + 0.0  # which makes 0 of a -0
    allowed = threshold if metric in HIGHER else threshold * abs(fmean(before))
    bound = noise(now, before, known, alpha)
    return Check(
        label=label,
        metric=metric,
        against=other.name,
        now=fmean(now),
        before=fmean(before),
        worse_by=worse,
        threshold=allowed,
        noise=bound,
        failed=worse > allowed and worse > bound,
    )


def noise(now: Sequence[float], before: Sequence[float], known: Sequence[Sequence[float]], alpha: float) -> float:
    """The largest difference of the means that noise explains. `known`: groups whose spread shows what noise is."""
    freedom = sum(len(values) - 1 for values in known)
    if freedom < 1:
        return math.inf
    squares = sum((value - fmean(values)) ** 2 for values in known for value in values)
    return t_quantile(1 - alpha, freedom) * math.sqrt(squares / freedom * (1 / len(now) + 1 / len(before)))
