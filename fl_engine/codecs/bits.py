"""Write integers to a bit stream with a fixed number of bits per integer, or in Elias's omega code.

Integers are stored in bit planes, so that encoding and decoding are array operations. A bit plane contains the bits at
one position of all integers. `pack` writes n integers of w bits in exactly ceil(n * w / 8) bytes.

The omega code for positive integers was published by Elias ("Universal codeword sets and representations of the
integers", IEEE Transactions on Information Theory 21(2), 1975). Decoding starts with N = 1. If the next bit is 0, the
codeword ends and the decoded integer is N. If the next bit is 1, this bit and the N following bits are the binary
digits of the new N. For example, the codeword for 9 is 11 1001 0, which consists of two groups and the final 0.

Departs from the usual layout: codewords are not concatenated, because a decoder would have to read them one after
another. Instead, the stream starts with the first bits of all codewords. Then the first groups (without the leading 1)
of all longer codewords follow in bit planes, sorted by width. Next come the bits that tell whether a second group
follows, then the second groups, and so on. This layout does not change the total number of bits. Decoding takes one
pass per group. A codeword has at most four groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import IntegrityError

Bits = NDArray[np.uint8]
"""Array with one bit (0 or 1) per byte."""
Bytes = NDArray[np.uint8]


def planes(numbers: NDArray[Any], width: int) -> Bits:
    """Return the low `width` bits of n integers as bit planes (width, n). The first plane contains the highest bits."""
    found = np.empty((width, len(numbers)), np.uint8)
    for rank in range(width):
        found[rank] = (numbers >> (width - 1 - rank)) & 1
    return found


def numbers(bits: Bits, dtype: type[np.integer[Any]] = np.int32) -> NDArray[Any]:
    """Return the integers whose bit planes are `bits`."""
    found = np.zeros(bits.shape[1], dtype)
    for plane in bits:
        found <<= 1
        found |= plane
    return found


def packed_size(count: int, width: int) -> int:
    """Return the number of bytes that `pack` writes for `count` integers."""
    return -(-count * width // 8)


def pack(numbers: NDArray[np.int32], width: int) -> Bytes:
    """Return a stream with the low `width` bits of each integer. Starting with the highest bits, each group of 8 bits
    is stored as a plane of bytes. Each remaining low bit is stored as a bit plane."""
    whole, rest = divmod(width, 8)
    high = [(numbers >> (width - 8 * (at + 1))).astype(np.uint8) for at in range(whole)]
    return np.concatenate([*high, np.packbits(planes(numbers.astype(np.uint8), rest))])


def unpack(stream: Bytes, count: int, width: int) -> NDArray[np.int32]:
    """Return the integers in the stream. Raises IntegrityError unless the stream contains exactly `count` integers."""
    whole, rest = divmod(width, 8)
    if len(stream) != packed_size(count, width):
        problem = "ends early" if len(stream) < packed_size(count, width) else "has bytes left over"
        raise IntegrityError(f"the stream {problem}: expected {packed_size(count, width)} bytes, got {len(stream)}")
    found = np.zeros(count, np.int32)
    for plane in stream[: whole * count].reshape(whole, count):
        found <<= 8
        found |= plane
    left = np.unpackbits(stream[whole * count :])
    low, at = take(left, 0, rest * count)
    ended(left, at)
    found <<= rest
    found |= numbers(low.reshape(rest, count))
    return found


def take(stream: Bits, at: int, count: int) -> tuple[Bits, int]:
    """Read `count` bits from position `at` on. Return the bits and the next position. Raises IntegrityError if the
    stream ends early."""
    if count > len(stream) - at:
        raise IntegrityError(f"the stream ends early: expected {count} more bits, got {len(stream) - at}")
    return stream[at : at + count], at + count


def ended(stream: Bits, at: int) -> None:
    """Raise IntegrityError if 8 or more bits remain from position `at` on, or if one of these bits is not zero."""
    if len(stream) - at >= 8:
        raise IntegrityError(f"the stream has {(len(stream) - at) // 8} unexpected bytes at the end")
    if stream[at:].any():
        raise IntegrityError("unused bits in the stream's last byte must be 0, got 1")


Whole = NDArray[Any]
"""Array of integers of any NumPy type."""
LEAST = (1, 2, 4, 16, 255)
"""Minimum floor(log2) of integers whose codewords have 1, 2, 3 and 4 groups. The last value is never reached."""


def omega_size(values: Whole) -> int:
    """Return the total number of bits in the codewords of `values`, which must be from 1 to 2^53 - 1."""
    if not len(values):
        return 0
    counts = np.bincount(_log2(values))
    return int(counts @ [_size(1 << rank) for rank in range(len(counts))])


def _size(value: int) -> int:
    return 1 if value == 1 else value.bit_length() + _size(value.bit_length() - 1)


def omega_encode(values: Whole) -> list[Bits]:
    """Encode `values`, which must be from 1 to 2^53 - 1. Return consecutive parts of a bit stream."""
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


def omega_decode(stream: Bits, at: int, count: int, most: int) -> tuple[Whole, int]:
    """Decode `count` integers, whose codewords start at bit `at`. Return the integers and the position after the
    codewords. Raises IntegrityError if the stream ends early or an integer exceeds `most`."""
    dtype = np.int32 if most < 2**31 else np.int64
    ranks: list[tuple[Whole, NDArray[np.intp]]] = []
    values = np.ones(count, dtype)
    while len(values):
        flags, at = take(stream, at, len(values))
        on = np.flatnonzero(flags.view(bool))
        ranks.append((values, on))
        before = values[on]
        if len(before) and before.max() >= most.bit_length():
            got = f"an integer of {before.max() + 1} bits"
            raise IntegrityError(f"integers in the stream must be at most {most}, got {got}")
        values = np.empty_like(before)
        for width in np.flatnonzero(np.bincount(before)).tolist():
            indices = np.flatnonzero(before == width)
            low, at = take(stream, at, width * len(indices))
            values[indices] = numbers(low.reshape(width, len(indices)), dtype) | 1 << width
    for before, on in reversed(ranks):
        before[on] = values
        values = before
    if count and values.max() > most:
        raise IntegrityError(f"integers in the stream must be at most {most}, got {values.max()}")
    return values, at


def _log2(values: Whole) -> NDArray[np.uint8]:
    """Return floor(log2) of `values`, read from the exponents of float64 numbers."""
    return ((values.astype(np.float64).view(np.int64) >> 52) - 1023).astype(np.uint8)


def _small_log2(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return floor(log2) of integers from 1 to 63."""
    found = (values >= 2).view(np.uint8)
    for least in (4, 8, 16, 32):
        found = found + (values >= least).view(np.uint8)
    return found
