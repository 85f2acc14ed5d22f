"""Student's paired t test, and Holm's adjustment where several are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev
from typing import NamedTuple

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
