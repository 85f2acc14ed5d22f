"""Curves of many points, for drawing: a page of ten thousand rounds stays quick to make and small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_engine.data.partition_rules import Ints

MOST_POINTS = 1000
"""The most points that are drawn of a curve. A longer one is cut into half as many parts, and the lowest and the
highest point of each part are drawn: on a page nobody sees the difference."""


def _parts(points: int) -> Ints:
    """Where each of MOST_POINTS / 2 parts of a curve begins."""
    return np.unique(np.linspace(0, points, MOST_POINTS // 2, endpoint=False).astype(np.int64))


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """A curve for drawing: itself, or of more than MOST_POINTS points the lowest and the highest of each part, in their
    order."""
    if len(x) <= MOST_POINTS:
        return x, y
    starts, values = _parts(len(x)), np.asarray(y, dtype=np.float64)
    ends = [*starts[1:], len(x)]
    parts = [(a, values[a:b]) for a, b in zip(starts, ends, strict=True)]
    kept = sorted({int(a + found) for a, part in parts for found in (part.argmin(), part.argmax())})
    return [x[i] for i in kept], [y[i] for i in kept]


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """A band for drawing: itself, or of more than MOST_POINTS points the lowest low and the highest high of each
    part."""
    if len(x) <= MOST_POINTS:
        return x, low, high
    starts = _parts(len(x))
    return [x[i] for i in starts], list(np.minimum.reduceat(low, starts)), list(np.maximum.reduceat(high, starts))
