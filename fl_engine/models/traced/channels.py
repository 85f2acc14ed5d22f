"""Determine which axes of tensors have the same channels.

An axis is a sequence of parts. Each part refers to one variable, which represents a set of channels. Each channel of a
part takes up `repeat` consecutive entries of the axis. If the network adds two tensors, the axes of both tensors are
tied, which means that they refer to the same variables. A variable is split if one of the tied axes is a concatenation.
A variable is pinned if one of the tied axes is never cut. Sub-models keep all channels of a pinned variable. Group norm
combines channels, so it replaces a variable by a variable with fewer channels.
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
    """Variable for `size` channels that the layer or parameter at `origin` creates."""

    size: int
    origin: str = ""
    pinned: bool = False
    """True if sub-models must keep all channels."""
    loose: bool = False
    """True if the channels belong to a parameter that no layer uses. These channels are pinned unless they are tied to
    the channels of a layer."""

    def __post_init__(self) -> None:
        self.order = next(_order)
        self.bound: Dim | None = None
        """Parts that replace this variable; None if the variable has not been replaced."""


class Part(NamedTuple):
    of: Channels
    repeat: int = 1
    """Number of consecutive entries of each channel."""

    @property
    def entries(self) -> int:
        return self.of.size * self.repeat


Dim = tuple[Part, ...]


def fixed(size: int) -> Dim:
    """Return an axis that is never cut, such as the batch, pixels, steps or the input's channels."""
    return (Part(Channels(size, pinned=True)),)


def made(size: int, origin: str, *, loose: bool = False) -> Dim:
    """Return an axis with new channels. The channels are pinned if `size` is 1."""
    return (Part(Channels(size, origin, pinned=size == 1, loose=loose and size > 1)),)


def resolved(dim: Dim) -> Dim:
    """Replace every variable that has a `bound` by the parts in `bound`, and return the new axis."""
    out: list[Part] = []
    for part in dim:
        bound = part.of.bound
        out += (part,) if bound is None else resolved(tuple(Part(p.of, p.repeat * part.repeat) for p in bound))
    return tuple(out)


def free(*dims: Dim) -> list[Channels]:
    """Return all unpinned variables in the axes, in order and without duplicates."""
    return list(dict.fromkeys(part.of for dim in dims for part in resolved(dim) if not part.of.pinned))


def length(dim: Dim) -> int:
    return sum(part.entries for part in dim)


def pin(*dims: Dim) -> None:
    for channels in free(*dims):
        channels.pinned = True


def scaled(dim: Dim, times: int) -> Dim:
    """Return the axis with each entry repeated `times` times."""
    return tuple(Part(part.of, part.repeat * times) for part in dim)


def coarser(channels: Channels, times: int) -> None:
    """Combine every `times` neighbouring channels into one channel, or pin the variable if this is not possible."""
    if times == 1 or channels.pinned:
        return
    if channels.size % times or channels.size == times:
        channels.pinned = True
        return
    channels.bound = (Part(Channels(channels.size // times, channels.origin, loose=channels.loose), times),)


def aligned(dim: Dim, to: int) -> None:
    """Combine channels so that sub-models never cut through a block of `to` neighbouring entries."""
    for part in resolved(dim):
        coarser(part.of, math.lcm(part.repeat, to) // part.repeat)
    if any(part.entries % to for part in resolved(dim)):
        pin(dim)


def tie(one: Dim, other: Dim) -> None:
    """Tie two axes of equal length, so that both refer to the same channels."""
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
    """Return a pinned part without its first `gone` entries; [] if no entries remain."""
    return list(fixed(part.entries - gone)) if part.entries > gone else []


def compact(parts: Iterable[Part]) -> list[tuple[Part, int]]:
    """Merge neighbouring pinned parts, and return each part with the number of its consecutive repetitions."""
    out: list[tuple[Part, int]] = []
    for part in parts:
        if out and part.of.pinned and out[-1][0].of.pinned:
            out[-1] = (fixed(out[-1][0].entries + part.entries)[0], 1)
        elif out and out[-1][0] == part:
            out[-1] = (part, out[-1][1] + 1)
        else:
            out.append((part, 1))
    return out
