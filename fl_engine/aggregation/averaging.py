"""Weighted mean of each element over updates of different sub-models (FlexFL, section III-E; HeteroFL, Eq. 2).

Each element p of the global model is averaged over the updates m that contain p, with weights d_m:

    p = sum_m d_m * p_m / sum_m d_m.

If no update contains p, p keeps its old value. Sums use double precision. The engine adds updates in client order, so
the result is deterministic. A different order would change only double-precision rounding errors, which are far below
the precision of the stored float32 values. If all updates agree on an element, the mean is exactly their value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fl_engine.aggregation.spool import IN_MEMORY_BYTES, Spool, Spooled
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import is_statistic, mesh, places
from fl_engine.core.types import Keep, ParamLayout, Params, SubmodelSpec

Region = tuple[slice | Tensor, ...]
"""Indices of an update's elements in the global tensor, as slices or as index arrays like those of `numpy.ix_`."""

Kind = tuple[SubmodelSpec, tuple[str, ...]]
"""Tuple of an update's sub-model and the names of the update's tensors."""

HELD_BACK_BYTES = 2**20
"""Buffer size in bytes for small updates of the same kind, which are added in one pass."""


class Regions:
    """Indices and shapes of updates within the tensors of `old`, cached for each `Kind`."""

    def __init__(self, old: Params, layout: ParamLayout) -> None:
        self._old = old
        self._layout = layout
        self._located: dict[Kind, tuple[dict[str, Region], dict[str, tuple[int, ...]]]] = {}

    def fit(self, payload: Params, spec: SubmodelSpec) -> Kind:
        """Return an update's `Kind`. Raises ModelError if a tensor's name or shape does not match the sub-model."""
        kind = (spec, tuple(payload))
        for name, shape in self.shapes(kind).items():
            actual = tuple(payload.shape(name) if isinstance(payload, Spooled) else payload[name].shape)
            if actual != shape:
                raise ModelError(f"{name} must have the shape {list(shape)} of the sub-model, got {list(actual)}")
        return kind

    def of(self, kind: Kind) -> dict[str, Region]:
        """Map each tensor name of an update to the indices of the tensor's elements in the global tensor. Raises
        ModelError if the network does not have a tensor or channel of the update."""
        return self._locate(kind)[0]

    def shapes(self, kind: Kind) -> dict[str, tuple[int, ...]]:
        """Map each tensor name of an update to the tensor's shape. Raises ModelError in the same cases as `of`."""
        return self._locate(kind)[1]

    def size(self, kind: Kind) -> int:
        """Return the size of an update in float32, in bytes."""
        return 4 * sum(math.prod(shape) for shape in self.shapes(kind).values())

    def total(self, name: str, weights: Mapping[Kind, float]) -> Tensor:
        """Return for each element the sum of the weights (float64) of all updates that contain the element."""
        out = torch.zeros(self._old[name].shape, dtype=torch.float64)
        for kind, weight in weights.items():
            if name in self.of(kind):
                out[self.of(kind)[name]] += weight
        return out

    def _locate(self, kind: Kind) -> tuple[dict[str, Region], dict[str, tuple[int, ...]]]:
        if (cached := self._located.get(kind)) is not None:
            return cached
        spec, names = kind
        self._layout.check(spec)
        channels = self._layout.channels(spec)
        located = {name: self._region(name, spec, channels) for name in names}
        regions = {name: region for name, (region, _) in located.items()}
        self._located[kind] = regions, {name: shape for name, (_, shape) in located.items()}
        return self._located[kind]

    def _region(self, name: str, spec: SubmodelSpec, channels: Mapping[str, Keep]) -> tuple[Region, tuple[int, ...]]:
        slot = self._layout.slots.get(name)
        if slot is None or not self._layout.has_block(spec, slot.block):
            raise ModelError(f"the update contains {name!r}, which is not a tensor of the client's sub-model")
        full = self._old[name].shape
        index: list[slice | Tensor] = []
        shape: list[int] = []
        for size, axis in zip(full, slot.axes, strict=True):
            at = places(channels, axis, size, self._layout.groups)
            index.append(at)
            shape.append(at.stop if isinstance(at, slice) else len(at))
        return mesh(index), tuple(shape)


def change_of(tensor: Tensor, before: Tensor) -> Tensor:
    """Return the float64 difference between an update's weights and the server's weights `before`. If a download codec
    is used, the client started from slightly different weights."""
    return tensor.to(torch.float64, copy=True).sub_(before)


def norm_of(
    payload: Params, kind: Kind, old: Params, regions: Regions, counts: Callable[[str], bool] = lambda name: True
) -> float:
    """Return the L2 norm of an update's weight change over all tensors for which `counts(name)` is True."""
    at = regions.of(kind)
    changes = (change_of(payload[name], old[name][at[name]]) for name in payload if counts(name))
    return math.hypot(*(float(torch.linalg.vector_norm(change)) for change in changes))


def limited(payload: Params, spec: SubmodelSpec, old: Params, regions: Regions, clip: float | None) -> Params:
    """Return the update with its weight change scaled to an L2 norm of at most `clip`. Running statistics are not part
    of the norm and are not scaled. Raises ModelError if the update does not match the model."""
    kind = regions.fit(payload, spec)
    if clip is None or (norm := norm_of(payload, kind, old, regions, lambda name: not is_statistic(name))) <= clip:
        return payload
    return scaled(payload, kind, old, regions, clip / norm)


def scaled(payload: Params, kind: Kind, old: Params, regions: Regions, factor: float) -> Params:
    """Return the update with its weight change multiplied by `factor`. Running statistics are not scaled."""
    region, out = regions.of(kind), {}
    for name, tensor in payload.items():
        if is_statistic(name):
            out[name] = tensor
            continue
        before = old[name][region[name]]
        out[name] = change_of(tensor, before).mul_(factor).add_(before).to(tensor)
    return out


class StoredUpdates:
    """Base class of aggregates that read each update several times. The weight change of each update is clipped to an
    L2 norm of `clip` (`limited`). If the updates exceed `held_bytes`, some updates are stored in a file."""

    held_bytes = IN_MEMORY_BYTES

    def __init__(self, old: Params, layout: ParamLayout, clip: float | None = None) -> None:
        self._old, self._layout, self._clip = old, layout, clip
        self._regions, self._spool = Regions(old, layout), Spool(self.held_bytes)
        self._kinds: list[Kind] = []
        """Sub-model and tensor names of each entry in the spool."""
        self._holders: Counter[Kind] = Counter()

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add an update. `weight` is ignored. Raises ModelError if the update does not match the model."""
        payload = limited(payload, spec, self._old, self._regions, self._clip)
        kind = self._regions.fit(payload, spec)
        self._spool.put(payload)
        self._kinds.append(kind)
        self._holders[kind] += 1

    @property
    def empty(self) -> bool:
        return not any(names for _, names in self._holders)

    def trained(self) -> Params:
        return {name: self._regions.total(name, self._holders) > 0 for name in self._old}


class StreamingMean:
    """Streaming mean of updates. The weight change of each update is clipped to an L2 norm of `clip` (`limited`).

    The object stores one running sum per element and buffers up to HELD_BACK_BYTES of updates. `result` converts the
    sums to means tensor by tensor, because storing all sums and all means at once would need more memory.
    """

    rows_bytes = 2**19
    """Size in bytes of a chunk of rows in double precision. Means are computed chunk by chunk. A chunk must be smaller
    than `system.LARGE_BLOCK`, so that its memory is reused."""

    def __init__(self, old: Params, layout: ParamLayout, clip: float | None = None) -> None:
        self._old, self._regions, self._clip = old, Regions(old, layout), clip
        self._sum: Params = {}
        self._weight: dict[Kind, float] = {}
        self._held: list[tuple[Params, float]] = []
        self._held_kind: Kind | None = None
        self._room = 0
        """Maximum number of updates in the buffer."""
        self._made: Params | None = None

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add one update with `weight` > 0. `payload` contains all or some tensors of `spec` on the CPU. The tensors
        are buffered and must not be modified afterwards. If a name, shape or weight is invalid, nothing is added and
        ModelError is raised."""
        assert self._made is None, "an update was added after the mean was computed"
        if not (hasattr(weight, "__float__") and 0 < weight < math.inf):
            raise ModelError(f"an update's weight must be a positive and finite number, got {weight!r}")
        payload = limited(payload, spec, self._old, self._regions, self._clip)
        kind = self._regions.fit(payload, spec)
        if kind != self._held_kind:
            self._flush()
            self._held_kind, self._room = kind, max(1, HELD_BACK_BYTES // max(1, self._regions.size(kind)))
        self._held.append((payload, weight))
        if len(self._held) >= self._room:
            self._flush()

    @property
    def empty(self) -> bool:
        """True if no tensor was added."""
        held = () if self._held_kind is None else (self._held_kind,)
        return not any(names for _, names in (*self._weight, *held))

    def trained(self) -> Params:
        """Return boolean masks of the elements that at least one update contains, in the shapes of the model."""
        self._flush()
        return {name: self._regions.total(name, self._weight) > 0 for name in self._old}

    def result(self) -> Params:
        """Return the new model, or the old tensors if no update was added. Do not add updates after this call."""
        if self._made is None:
            self._flush()
            self._made = dict(self._old)
            for name in list(self._sum):
                self._made[name] = self._mean(name, self._sum.pop(name))
        return self._made

    def _mean(self, name: str, total: Tensor) -> Tensor:
        before, weights = self._old[name], self._regions.total(name, self._weight)
        out = torch.empty(before.shape, dtype=before.dtype)
        step = max(1, self.rows_bytes // max(1, 8 * math.prod(out.shape[1:])))
        parts = (torch.split(tensor, step) if tensor.dim() else (tensor,) for tensor in (before, out, total, weights))
        for old, new, sums, weight in zip(*parts, strict=True):
            mean = torch.where(weight > 0, sums / weight.clamp_min(1e-300), old.double())
            new.copy_(mean.to(old.dtype))
        return out

    def _flush(self) -> None:
        """Add the buffered updates to the sums. Several buffered updates are added in one pass."""
        if self._held_kind is None:
            return
        kind, self._held_kind = self._held_kind, None
        regions, held, self._held = self._regions.of(kind), self._held, []
        total_weight = self._weight.get(kind, 0.0)
        for _, weight in held:
            total_weight += weight
        self._weight[kind] = total_weight
        weights = torch.tensor([weight for _, weight in held], dtype=torch.float64)
        for name, region in regions.items():
            if name not in self._sum:
                self._sum[name] = torch.zeros(self._old[name].shape, dtype=torch.float64)
            into = self._sum[name][region]
            if len(held) == 1:
                into.add_(held[0][0][name], alpha=held[0][1])
            else:
                rows = torch.stack([payload[name] for payload, _ in held])
                into += torch.mv(rows.view(len(held), -1).double().T, weights).view(rows.shape[1:])
            if any(isinstance(index, Tensor) for index in region):  # tensor indexing copies, so write `into` back
                self._sum[name][region] = into
