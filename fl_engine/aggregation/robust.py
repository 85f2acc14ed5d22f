"""Byzantine-robust aggregation: the element-wise median and trimmed mean of the updates (Yin et al.,
Byzantine-Robust Distributed Learning, ICML 2018, Definitions 1 and 2).

    median        the middle value of p_m, or the mean of the two middle ones
    trimmed_mean  the mean of p_m without the floor(trim * n) smallest and as many of the largest

for each element p, over the n updates m that hold it. All clients have the same weight. An element that no update holds
keeps its old value.

Departs from the paper: it has one model for all, here clients hold different elements. An element is safe if few of its
holders are Byzantine. If it has so few holders that no value is dropped (two for the median, floor(trim * n) < 1), it
moves by the smallest of their changes if all have the same sign, else it keeps its old value. It also keeps its old
value with a single holder. With `trim: 0` it is the plain mean of all holders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.aggregation.averaging import Kind, Region, Regions
from fl_engine.aggregation.privacy import Public
from fl_engine.aggregation.protocol import Aggregate, clipped
from fl_engine.aggregation.spool import Spool
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec

CHUNK_BYTES = 32 * 2**20
"""Bytes of the clients' values in memory at a time: as many rows of a tensor as fit, at least one."""


@dataclass(frozen=True)
class Median:
    """The median: withstands Byzantine clients as long as they are fewer than half of an element's holders."""

    __pydantic_config__ = STRICT
    name: Literal["median"] = "median"
    clip: Positive | None = None

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return clipped(Middle(old, layout, 0.5), old, layout, self.clip)


@dataclass(frozen=True)
class TrimmedMean:
    """The trimmed mean: withstands Byzantine clients up to the share `trim` of an element's holders."""

    __pydantic_config__ = STRICT
    name: Literal["trimmed_mean"] = "trimmed_mean"
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of the values dropped at either end."""
    clip: Positive | None = None

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return clipped(Middle(old, layout, self.trim), old, layout, self.clip)


# --------------------------------------------------------------------------------------- median, trimmed mean
class Middle:
    """The mean of an element's values without a share `trim` of them at either end: 0.5 is the median, 0 the plain
    mean.

    All updates are stored until the end (beyond `spool.IN_MEMORY_BYTES` in a file) and read in chunks of rows. Values
    are sorted before they are added, so the order of the updates does not change a bit of the result.
    """

    def __init__(self, old: Params, layout: ParamLayout, trim: float) -> None:
        self._old = old
        self._regions = Regions(old, layout)
        self._trim = trim
        self._spool = Spool()
        self._kinds: list[Kind] = []
        """The kind of each entry of the spool."""
        self._count: dict[Kind, float] = {}

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        kind = self._regions.fit(payload, spec)
        self._spool.put({name: tensor.to(_wide(self._old[name])) for name, tensor in payload.items()})
        self._kinds.append(kind)
        self._count[kind] = self._count.get(kind, 0) + 1

    @property
    def empty(self) -> bool:
        return not any(names for _, names in self._count)

    def trained(self) -> Params:
        return {name: self._regions.total(name, self._count) > 0 for name in self._old}

    def result(self) -> Params:
        return {name: self._middle(name, old) for name, old in self._old.items()}

    def _middle(self, name: str, old: Tensor) -> Tensor:
        entries = [entry for entry, (_, names) in enumerate(self._kinds) if name in names]
        if not entries:
            return old
        holders, out = self._regions.total(name, self._count), old.clone()
        if not old.dim():
            values = torch.stack([self._spool.rows(entry, name) for entry in entries])
            return _middle_of(values, holders, old, self._trim).to(old.dtype)
        row = len(entries) * _wide(old).itemsize * max(1, math.prod(old.shape[1:]))
        step = max(1, CHUNK_BYTES // row)
        for first in range(0, len(old), step):
            last = min(len(old), first + step)
            values = torch.full((len(entries), last - first, *old.shape[1:]), math.nan, dtype=_wide(old))
            for place, entry in enumerate(entries):
                low, high, within = _rows(self._regions.of(self._kinds[entry])[name], first, last)
                if low < high:
                    values[place][within] = self._spool.rows(entry, name, low, high)
            count = holders[first:last]
            out[first:last] = _middle_of(values, count, old[first:last], self._trim).to(old.dtype)
        return out


def _rows(region: Region, first: int, last: int) -> tuple[int, int, Region]:
    """Return which of an update's rows are within the global rows `first` to `last`, and their places there."""
    head, *rest = region
    if isinstance(head, slice):  # a prefix, of every axis
        high = max(first, min(last, head.stop))
        return first, high, (slice(0, high - first), *rest)
    low, high = torch.searchsorted(head.flatten(), torch.tensor([first, last])).tolist()
    return low, high, (head[low:high] - first, *rest)


def _middle_of(values: Tensor, holders: Tensor, old: Tensor, trim: float) -> Tensor:
    """Return the mean of `values` (n, ...) without both ends, or `old` moved as far as all holders agree, float64. NaN
    marks clients that do not hold an element, and `holders` (...) counts the others. Sorts `values` in place."""
    values.numpy().sort(axis=0)  # NaN goes last
    low = torch.minimum((trim * holders + 1e-9).floor(), ((holders - 1) / 2).floor()).clamp_min(0)
    high = holders - low
    total = torch.zeros_like(holders)
    for rank in range(int(low.min()), int(high.max())):
        total += torch.where((rank >= low) & (rank < high), values[rank], 0.0)
    middle, old = total / (high - low).clamp_min(1), old.double()
    if trim == 0:
        return torch.where(holders > 0, middle, old)
    last = (holders.long() - 1).clamp_min(0)
    agreed = old.clamp(values[0].double(), values.gather(0, last[None])[0].double())
    return torch.where(low > 0, middle, torch.where(holders > 1, agreed, old))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
