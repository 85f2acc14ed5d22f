"""Numbers of a few bits each in a stream of bytes. Bits of the same rank are stored together, in planes, so that both
directions are array operations. `pack` writes n numbers of w bits in exactly the bytes that n * w bits take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import IntegrityError

Bits = NDArray[np.uint8]
"""A 0 or 1 in each byte."""
Bytes = NDArray[np.uint8]


def planes(numbers: NDArray[Any], width: int) -> Bits:
    """Return the low `width` bits of n numbers, (width, n), the highest bits first."""
    found = np.empty((width, len(numbers)), np.uint8)
    for rank in range(width):
        found[rank] = (numbers >> (width - 1 - rank)) & 1
    return found


def numbers(of: Bits, dtype: type[np.integer[Any]] = np.int32) -> NDArray[Any]:
    """Return the numbers of these planes."""
    found = np.zeros(of.shape[1], dtype)
    for plane in of:
        found <<= 1
        found |= plane
    return found


def packed_size(count: int, width: int) -> int:
    """Return the number of bytes."""
    return -(-count * width // 8)


def pack(numbers: NDArray[np.int32], width: int) -> Bytes:
    """Return the low `width` bits of each number: a plane of bytes for every whole byte of `width`, the highest first,
    then a plane of bits for every other bit."""
    whole, rest = divmod(width, 8)
    high = [(numbers >> (width - 8 * (at + 1))).astype(np.uint8) for at in range(whole)]
    return np.concatenate([*high, np.packbits(planes(numbers.astype(np.uint8), rest))])


def unpack(stream: Bytes, count: int, width: int) -> NDArray[np.int32]:
    """Unpack. Raises IntegrityError for a stream that is not a packing of `count` numbers."""
    whole, rest = divmod(width, 8)
    if len(stream) != packed_size(count, width):
        wrong = "ends early" if len(stream) < packed_size(count, width) else "has bytes left over"
        raise IntegrityError(
            f"the stream {wrong}: {count} numbers of {width} bits take {packed_size(count, width)} bytes, "
            f"it has {len(stream)}"
        )
    found = np.zeros(count, np.int32)
    for plane in stream[: whole * count].reshape(whole, count):
        found <<= 8
        found |= plane
    left = unpacked(stream[whole * count :])
    low, at = take(left, 0, rest * count)
    ended(left, at)
    found <<= rest
    found |= numbers(low.reshape(rest, count))
    return found


# ----------------------------------------------------------------------------------------------- a stream of bits
def packed(parts: list[Bits]) -> Bytes:
    """Return bits in bytes, filled up with zeros."""
    return np.packbits(np.concatenate(parts))


def unpacked(stream: Bytes) -> Bits:
    return np.unpackbits(stream)


def take(stream: Bits, at: int, count: int) -> tuple[Bits, int]:
    """Return `count` bits from `at` on, and the next position. Raises IntegrityError if there are fewer."""
    if count > len(stream) - at:
        raise IntegrityError(f"the stream ends early: {count} bits are expected, it has {len(stream) - at} more")
    return stream[at : at + count], at + count


def ended(stream: Bits, at: int) -> None:
    """Raise IntegrityError unless only zeros of the last byte are left."""
    if len(stream) - at >= 8:
        raise IntegrityError(f"the stream has {(len(stream) - at) // 8} bytes left over")
    if stream[at:].any():
        raise IntegrityError("the stream's last byte is filled up with ones, not with zeros")
