"""Elias's omega code for whole numbers from 1 on; small numbers have short codewords.

P. Elias, "Universal codeword sets and representations of the integers", IEEE Transactions on Information Theory 21(2),
1975. Decoding starts with N = 1; a 0 ends the codeword, and N is the number; a 1 begins a group of N + 1 bits, which is
the next N. 9 is 11 1001 0.

Departs from the usual layout: codewords are not concatenated, because then each must be decoded before the next one is
found. The bits of all numbers are stored by rank: the first bit of every codeword, then the first groups (without their
leading 1) of those that continue, sorted by width, in planes; then the second bits and groups. These are the same bits
in another order. Decoding takes one pass for each of at most five ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_engine.codecs.bits import Bits, numbers, planes, take
from fl_engine.core.errors import IntegrityError

Whole = NDArray[Any]
"""Integers of any type."""
LEAST = (1, 2, 4, 16, 255)
"""The least logarithm of a number with 1, 2, 3 and 4 groups. No number here has five."""


def size(values: Whole) -> int:
    """Return the bits of all codewords of numbers from 1 to 2^53 - 1."""
    if not len(values):
        return 0
    counts = np.bincount(_log2(values))
    return int(counts @ [_size(1 << rank) for rank in range(len(counts))])


def _size(value: int) -> int:
    return 1 if value == 1 else value.bit_length() + _size(value.bit_length() - 1)


def encode(values: Whole) -> list[Bits]:
    """Return the codewords of numbers from 1 to 2^53 - 1, as parts of a stream of bits."""
    log2 = _log2(values)
    more = log2 >= LEAST[0]
    found = [more.view(np.uint8)]
    for rank in range(1, len(LEAST)):
        on = np.flatnonzero(more)  # faster than a mask
        values, log2 = values[on], log2[on]
        if not len(values):
            break
        more, group = log2 >= LEAST[rank], log2
        for least in LEAST[rank + 1 :]:
            group = np.where(log2 >= least, _small_log2(group), group)
        width, group = np.where(more, _small_log2(group), log2), np.where(more, group, values)
        for each in np.flatnonzero(np.bincount(width)).tolist():
            found.append(planes(group[np.flatnonzero(width == each)], each).ravel())
        found.append(more.view(np.uint8))
    return found


def decode(stream: Bits, at: int, count: int, most: int) -> tuple[Whole, int]:
    """Return `count` numbers from 1 to `most` whose codewords begin at bit `at`, and where these end. Raises
    IntegrityError for a stream that ends early, and for a larger number."""
    dtype = np.int32 if most < 2**31 else np.int64
    ranks: list[tuple[Whole, NDArray[np.intp]]] = []
    values = np.ones(count, dtype)
    while len(values):
        flags, at = take(stream, at, len(values))
        on = np.flatnonzero(flags.view(bool))
        ranks.append((values, on))
        before = values[on]
        if len(before) and before.max() >= most.bit_length():
            raise IntegrityError(f"the stream holds a number of {before.max() + 1} bits, at most {most} is expected")
        values = np.empty_like(before)
        for width in np.flatnonzero(np.bincount(before)).tolist():
            those = np.flatnonzero(before == width)
            low, at = take(stream, at, width * len(those))
            values[those] = numbers(low.reshape(width, len(those)), dtype) | 1 << width
    for before, on in reversed(ranks):
        before[on] = values
        values = before
    if count and values.max() > most:
        raise IntegrityError(f"the stream holds the number {values.max()}, at most {most} is expected")
    return values, at


def _log2(values: Whole) -> NDArray[np.uint8]:
    """Return the logarithm, rounded down: the exponent of a float64."""
    return ((values.astype(np.float64).view(np.int64) >> 52) - 1023).astype(np.uint8)


def _small_log2(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the logarithm of numbers from 1 to 63, rounded down."""
    found = (values >= 2).view(np.uint8)
    for least in (4, 8, 16, 32):
        found = found + (values >= least).view(np.uint8)
    return found
