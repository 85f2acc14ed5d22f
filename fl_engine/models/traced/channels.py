"""Finds the axes of tensors that hold the same channels, by tying them to each other.

An axis is a row of parts: each has the channels of one variable, with equally many entries per channel. When the
network adds two tensors, their axes are tied: their variables become one. A variable that is tied to the axis of a
concatenation is split. One whose channels a group norm combines becomes coarser. One that is tied to an axis that is
never cut is pinned: every sub-model keeps all its channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

_order = count()


@dataclass(eq=False)
class Channels:
    """A variable: `size` channels of the layer or parameter at `origin`."""

    size: int
    origin: str = ""
    pinned: bool = False
    """Never cut."""
    loose: bool = False
    """Whether it belongs to a parameter that no layer uses yet. It is pinned if nothing else decides."""

    def __post_init__(self) -> None:
        self.order = next(_order)
        self.bound: Dim | None = None
        """The parts that replace this variable."""


class Part(NamedTuple):
    of: Channels
    repeat: int = 1
    """Consecutive entries of one channel."""

    @property
    def entries(self) -> int:
        return self.of.size * self.repeat


Dim = tuple[Part, ...]
"""One axis of a tensor."""


def fixed(size: int) -> Dim:
    """An axis that is never cut, such as the batch, pixels, steps or the input's channels."""
    return (Part(Channels(size, pinned=True)),)


def made(size: int, origin: str, *, loose: bool = False) -> Dim:
    """The axis of new channels. A single channel cannot be cut."""
    return (Part(Channels(size, origin, pinned=size == 1, loose=loose and size > 1)),)


def resolved(dim: Dim) -> Dim:
    """The axis with bound variables replaced."""
    out: list[Part] = []
    for part in dim:
        bound = part.of.bound
        out += (part,) if bound is None else resolved(tuple(Part(p.of, p.repeat * part.repeat) for p in bound))
    return tuple(out)


def free(*dims: Dim) -> list[Channels]:
    """The variables of these axes that can be cut, in order, each once."""
    return list(dict.fromkeys(part.of for dim in dims for part in resolved(dim) if not part.of.pinned))


def length(dim: Dim) -> int:
    return sum(part.entries for part in dim)


def pin(*dims: Dim) -> None:
    for channels in free(*dims):
        channels.pinned = True


def scaled(dim: Dim, times: int) -> Dim:
    """The axis with `times` entries for each entry."""
    return tuple(Part(part.of, part.repeat * times) for part in dim)


def merged(outer: Dim, inner: Dim) -> Dim | None:
    """Two neighbouring axes flattened into one; None if the channels of both would mix."""
    if not free(inner):
        return scaled(outer, length(inner))
    return inner * length(outer) if not free(outer) else None


def coarser(channels: Channels, times: int) -> None:
    """Keep or drop `times` neighbouring channels together; pin all if their number is not a multiple."""
    if times == 1 or channels.pinned:
        return
    if channels.size % times or channels.size == times:
        channels.pinned = True
        return
    channels.bound = (Part(Channels(channels.size // times, channels.origin, loose=channels.loose), times),)


def aligned(dim: Dim, to: int) -> None:
    """Make the channels so coarse that no block of `to` neighbouring entries is cut."""
    for part in resolved(dim):
        coarser(part.of, math.lcm(part.repeat, to) // part.repeat)
    if any(part.entries % to for part in resolved(dim)):
        pin(dim)


def tie(one: Dim, other: Dim) -> None:
    """Let both axes, of equal length, have the same channels."""
    left, right = list(resolved(one)), list(resolved(other))
    while left and right:
        a, b = left[0], right[0]
        if a == b:
            left, right = left[1:], right[1:]
            continue
        if a.of.pinned or b.of.pinned or a.of is b.of:
            pin((a, b))
            short = min(a.entries, b.entries)
            left, right = _rest(a, short) + left[1:], _rest(b, short) + right[1:]
            continue
        if a.repeat != b.repeat:
            both = math.lcm(a.repeat, b.repeat)
            coarser(a.of, both // a.repeat)
            coarser(b.of, both // b.repeat)
        elif a.of.size == b.of.size:
            first, second = sorted((a.of, b.of), key=lambda channels: (channels.loose, channels.order))
            second.bound = (Part(first),)
        else:
            large, small = (a.of, b.of) if a.of.size > b.of.size else (b.of, a.of)
            sizes = (small.size, large.size - small.size)
            large.bound = tuple(Part(Channels(n, large.origin, loose=large.loose)) for n in sizes)
        left, right = list(resolved(tuple(left))), list(resolved(tuple(right)))


def _rest(part: Part, gone: int) -> list[Part]:
    """The rest of a pinned part without its first entries."""
    return list(fixed(part.entries - gone)) if part.entries > gone else []


def compact(parts: Iterable[Part]) -> list[tuple[Part, int]]:
    """(part, how often it repeats in a row), with neighbouring pinned parts as one."""
    out: list[tuple[Part, int]] = []
    for part in parts:
        if out and part.of.pinned and out[-1][0].of.pinned:
            out[-1] = (fixed(out[-1][0].entries + part.entries)[0], 1)
        elif out and out[-1][0] == part:
            out[-1] = (part, out[-1][1] + 1)
        else:
            out.append((part, 1))
    return out
