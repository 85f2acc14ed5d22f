"""Mean and standard deviation of data whose authors publish none, rounded so that all machines agree."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

COUNTED = 4096
"""The number of images whose bytes are counted at a time."""
SMALL = 1e-3
"""Smaller standard deviations have fewer than four digits in six decimals."""
EQUAL = 1e-6
"""Smaller deviations, as a share of the mean, are rounding errors of float32."""


def byte_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of images (N, C, H, W), in units of 255, to four decimals.

    They are computed from sums of integers, so that all machines agree. A constant channel has the deviation 1.
    """
    mean, std = [], []
    for channel in range(images.shape[1]):
        # Some images at a time, because `bincount` converts its input to 8-byte integers.
        counts = np.zeros(256, dtype=np.int64)
        for at in range(0, len(images), COUNTED):
            counts += np.bincount(images[at : at + COUNTED, channel].ravel(), minlength=256)
        number, values = int(counts.sum()), range(256)
        total = sum(value * int(count) for value, count in zip(values, counts, strict=True))
        squares = sum(value * value * int(count) for value, count in zip(values, counts, strict=True))
        deviation = math.sqrt(number * squares - total * total) / number / 255
        mean.append(round(total / number / 255, 4))
        std.append(round(deviation, 4) or 1.0)
    return tuple(mean), tuple(std)


def moments(x: NDArray[np.float32], axis: int = -1) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per entry of `axis`, rounded so that all machines agree: to six decimals, or
    for a deviation below SMALL to its sixth digit. A deviation that rounding to float32 explains is 0."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean, std = x.mean(others, dtype=np.float64), x.std(others, dtype=np.float64)
    pairs = [_rounded(float(m), float(s)) for m, s in zip(mean, std, strict=True)]
    return tuple(m for m, _ in pairs), tuple(s for _, s in pairs)


def _rounded(mean: float, std: float) -> tuple[float, float]:
    if min(5e-7, EQUAL * abs(mean)) < std < SMALL:
        decimals = 5 - math.floor(math.log10(std))
        return round(mean, decimals) + 0.0, round(std, decimals)
    return float(np.round(mean, 6)) + 0.0, float(np.round(std, 6))  # + 0.0: no negative zero
