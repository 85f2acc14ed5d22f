"""Aggregations combine the updates of a round into one model.

`algorithm.aggregation.name` is a name in AGGREGATIONS, or a custom `AggregationRule` as `package.module:NAME`. The
server's optimizer (`server_opt`) then moves the global model towards the aggregate.

Median and trimmed mean are defined by Yin et al., Byzantine-Robust Distributed Learning, ICML 2018, Definitions 1 and
2. Each element p is aggregated over the n updates m that contain p, with equal weights:

    median        the middle value of p_m, or the mean of the two middle values
    trimmed_mean  the mean of p_m without the floor(trim * n) smallest and the floor(trim * n) largest values.

An element that no update contains keeps its old value.

Departs from the paper, in which every client trains the whole model. Here n differs between elements. An element is
protected if less than half (median) or at most the fraction `trim` (trimmed mean) of its n updates are Byzantine. If n
is so small that no value is dropped (n = 2 for the median, or floor(trim * n) < 1), the element moves by the smallest
of the clients' n changes if all these changes have the same sign. If the signs differ or n = 1, the element keeps its
old value. `trim: 0` is the plain mean over the n updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.aggregation.averaging import Region, StoredUpdates, StreamingMean
from fl_engine.aggregation.geometric_median import GeometricMedian
from fl_engine.aggregation.privacy import Public
from fl_engine.core.contracts import Algorithm, ServerContext
from fl_engine.core.fields import Options, Positive
from fl_engine.core.registry import Contract
from fl_engine.core.types import Assignment, ClientUpdate, ParamLayout, Params, SubmodelSpec


class Aggregate(Protocol):
    """Accumulator for the updates of a round."""

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add an update. If the update does not match the model, raise ModelError and add nothing."""

    @property
    def empty(self) -> bool:
        """True if `result` returns the old model unchanged."""

    def trained(self) -> Params:
        """Return boolean masks of the elements that the server's step changes, in the shapes of the model."""

    def result(self) -> Params:
        """Return the new model, on the CPU."""


class AggregationRule(Protocol):
    """Frozen dataclass with the options of an aggregation."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        """Return an aggregate for a round that starts with the model `old`. `public` contains facts about the round
        that do not depend on clients' data."""


Received = Iterable[tuple[Assignment, ClientUpdate]]
"""Pairs of an assignment and the update that the server has received for it."""
Scores = Mapping[int, float]
"""Map clients to the scores of their updates."""


@runtime_checkable
class DropsUpdates(Protocol):
    """An aggregation that gives each update a score, and drops the updates with low scores before the merge."""

    def check(self, algorithm: Algorithm, server: ServerContext) -> None:
        """Raise ConfigError if the algorithm or the server's data do not allow to compute scores."""

    def scores(self, updates: Received, layout: ParamLayout, server: ServerContext, algorithm: Any) -> Scores:
        """Return the score of each update. The method must be pure."""

    def lowest(self, scores: Scores) -> float:
        """Return the lowest score of an update that is merged. `scores` contains at least one score."""


@dataclass(frozen=True)
class Mean(Options):
    """FedAvg: the weighted mean of each element over the updates that contain it (`averaging.StreamingMean`)."""

    name: Literal["mean"] = "mean"
    clip: Positive | None = None
    """Maximum L2 norm of an update's weight change over all tensors together; null: no limit. Running statistics are
    not clipped, because `rounds.norm_bound` limits them. With a coarse download codec, most of the change may be the
    codec's rounding error."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return StreamingMean(old, layout, self.clip)


@dataclass(frozen=True)
class Median(Options):
    """Median, which tolerates Byzantine clients if they are fewer than half of the clients that hold an element."""

    name: Literal["median"] = "median"
    clip: Positive | None = None

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return Middle(old, layout, 0.5, self.clip)


@dataclass(frozen=True)
class TrimmedMean(Options):
    """Trimmed mean, which tolerates Byzantine clients up to the fraction `trim` of the clients that hold an element."""

    name: Literal["trimmed_mean"] = "trimmed_mean"
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Fraction of the values that is dropped at each end."""
    clip: Positive | None = None

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return Middle(old, layout, self.trim, self.clip)


RULES: dict[str, type[AggregationRule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "geometric_median": GeometricMedian,
}
"""Aggregations that can merge the updates that another aggregation does not drop."""


@dataclass(frozen=True)
class Dropping(Options):
    """Base class of aggregations that drop updates and let another aggregation merge the others."""

    rule: Annotated[AggregationRule, Contract("aggregation", RULES, AggregationRule)] = Mean()
    """Aggregation of the updates that are not dropped."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return self.rule.start(old, layout, public)

    def check(self, algorithm: Algorithm, server: ServerContext) -> None:
        return None


class Middle(StoredUpdates):
    """Trimmed mean, which drops the fraction `trim` of an element's values at each end (0.5: median, 0: plain mean).

    `result` reads the updates in chunks of rows. Values are sorted before the sum, so results do not depend on the
    updates' order.
    """

    chunk_bytes = 32 * 2**20
    """Maximum size in bytes of all clients' values in a chunk of rows."""

    def __init__(self, old: Params, layout: ParamLayout, trim: float, clip: float | None = None) -> None:
        super().__init__(old, layout, clip)
        self._trim = trim

    def result(self) -> Params:
        return {name: self._middle(name, old) for name, old in self._old.items()}

    def _middle(self, name: str, old: Tensor) -> Tensor:
        entries = [entry for entry, (_, names) in enumerate(self._kinds) if name in names]
        if not entries:
            return old
        holders, out = self._regions.total(name, self._holders), old.clone()
        if not old.dim():
            values = torch.stack([self._spool.rows(entry, name) for entry in entries]).to(_wide(old))
            return _middle_of(values, holders, old, self._trim).to(old.dtype)
        row = len(entries) * _wide(old).itemsize * max(1, math.prod(old.shape[1:]))
        step = max(1, self.chunk_bytes // row)
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
    """Find the update's rows within the global rows from `first` to `last`. Return their start, their end, and their
    region, whose row indices are relative to `first`."""
    head, *rest = region
    if isinstance(head, slice):  # The update contains the first rows of the tensor.
        high = max(first, min(last, head.stop))
        return first, high, (slice(0, high - first), *rest)
    low, high = torch.searchsorted(head.flatten(), torch.tensor([first, last])).tolist()
    return low, high, (head[low:high] - first, *rest)


def _middle_of(values: Tensor, holders: Tensor, old: Tensor, trim: float) -> Tensor:
    """Return the trimmed mean of `values` (n, ...), float64. If no value is dropped, return `old` moved by the smallest
    change if all changes have the same sign. `values` contains NaN for clients that do not hold the element. `holders`,
    of shape (...), counts the clients that hold each element. `values` is sorted in place."""
    values.numpy().sort(axis=0)  # NumPy sorts NaN last.
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
