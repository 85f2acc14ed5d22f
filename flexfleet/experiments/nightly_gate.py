"""Decides whether a figure of a nightly regression run is worse than before by more than noise explains.

A nightly regression run trains some of the reference's seeds again. So figures are compared seed by seed, and the large
spread between seeds cancels out. Each figure is compared twice:

- with the reference, which does not change by itself, so small losses cannot add up unnoticed;
- with the mean of the nightly regression runs that passed since the reference was made.

A figure fails if its mean is worse by more than

    max(threshold, Z * s * sqrt(1/n + 1/m))

n is the number of values tonight, and m is the number of earlier values. s is the pooled standard deviation of the same
seed's values over the reference and all passed runs. Pace has turns instead of seeds, and s is their spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from flexfleet.experiments.nightly_suite import HIGHER, METRICS, OF_MACHINE, NightFigures

Z = 4.0
"""Noise alone exceeds so many standard errors in 1 of 30,000 comparisons, so it fails about 1 of 1,000 nightly
regression runs of 30 comparisons."""
REFERENCE, PASSED = "reference", "passed runs"

Groups = Mapping[int, Sequence[float]]
"""Values of one figure by seed. The turns of pace are one group."""


class Check(BaseModel):
    """Comparison of one figure with its earlier values."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    label: str
    metric: str
    measured: str = "accuracy"
    """The task's metric, to which avg, full, rounds and mb refer."""
    against: str
    """REFERENCE or PASSED."""
    before: float
    now: float
    worse_by: float
    """Below zero if the figure is better than before."""
    allowed: float
    """The smallest regression that fails: larger differences fail."""
    limit: float
    """The worst figure that passes."""
    failed: bool


def judge(
    now: NightFigures, reference: NightFigures, passed: Sequence[NightFigures], thresholds: Mapping[str, float]
) -> list[Check]:
    """Return all possible comparisons in the order of the labels. Memory and pace are only compared between equal
    machines."""
    checks = []
    for label, of in now.labels.items():
        for metric in METRICS:

            def values(*runs: NightFigures, label: str = label, metric: str = metric) -> Groups:
                comparable = [run for run in runs if metric not in OF_MACHINE or run.machine == now.machine]
                return _by_seed(comparable, label, metric)

            tonight, spread = values(now), pooled_spread(values(reference, *passed).values())
            for against, before in ((REFERENCE, values(reference)), (PASSED, values(*passed))):
                if seeds := tonight.keys() & before.keys():
                    pair = [tonight[seed] for seed in seeds], [before[seed] for seed in seeds]
                    compared = _compared(metric, *pair, thresholds[metric], spread)
                    checks.append(Check(label=label, metric=metric, measured=of.metric, against=against, **compared))
    return checks


def _compared(
    metric: str, now: Sequence[Sequence[float]], before: Sequence[Sequence[float]], threshold: float, spread: float
) -> dict[str, Any]:
    means = {"now": fmean(map(fmean, now)), "before": fmean(map(fmean, before))}
    sign = -1 if metric in HIGHER else 1
    worse = sign * (means["now"] - means["before"])
    least = threshold if metric in HIGHER else threshold * abs(means["before"])
    allowed = max(least, Z * spread * math.sqrt(1 / sum(map(len, now)) + 1 / sum(map(len, before))))
    limit = means["before"] + sign * allowed
    return {**means, "worse_by": worse, "allowed": allowed, "limit": limit, "failed": worse > allowed}


def pooled_spread(groups: Iterable[Sequence[float]]) -> float:
    """Return the pooled standard deviation within the groups; 0 if no group has two values."""
    many = [values for values in groups if len(values) > 1]
    squares = sum((value - fmean(values)) ** 2 for values in many for value in values)
    return math.sqrt(squares / sum(len(values) - 1 for values in many)) if many else 0.0


def _by_seed(runs: Sequence[NightFigures], label: str, metric: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        values = run.labels[label].values.get(metric, ()) if label in run.labels else ()
        seeds = run.seeds if values and metric != "pace" else (0,) * len(values)
        for seed, value in zip(seeds, values, strict=True):
            found.setdefault(seed, []).append(value)
    return found
