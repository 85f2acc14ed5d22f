"""The per-element weighted mean over heterogeneous updates (FlexFL Sec. III-E, HeteroFL Eq. 2 with weights).

For each element p of the global model, over the updates m that hold it, with weights d_m:

    p = sum_m d_m * p_m / sum_m d_m        and p keeps its old value if no update holds it.

Sums are in double precision. The engine adds updates in client order, so the result is one fixed number. Another order
moves an element by a few ulp of double, far below the stored single precision. Equal values average to themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fl_engine.aggregation.spool import Spooled
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import is_statistic, places
from fl_engine.core.types import Keep, ParamLayout, Params, SubmodelSpec

Region = tuple[slice | Tensor, ...]
"""The positions of an update's entries in the global tensor: slices, or broadcast indices like `numpy.ix_`."""

Kind = tuple[SubmodelSpec, tuple[str, ...]]
"""The sub-model of an update, and the names of its tensors."""

HELD_BACK_BYTES = 2**20
"""Bytes. Small updates of one kind are buffered up to this size and added at once."""

ROWS_BYTES = 2**19
"""Bytes in double precision: a tensor's mean is computed over as many rows at a time. Smaller than
`system.LARGE_BLOCK`, so that the same memory is used again."""


class Regions:
    """The positions and shapes of updates in the tensors of `old`, cached by kind of update."""

    def __init__(self, old: Params, layout: ParamLayout) -> None:
        self._old = old
        self._layout = layout
        self._of: dict[Kind, dict[str, Region]] = {}
        self._shapes: dict[Kind, dict[str, tuple[int, ...]]] = {}
        self._sizes: dict[Kind, int] = {}

    def fit(self, payload: Params, spec: SubmodelSpec) -> Kind:
        """Return the update's kind. Raises ModelError for a name or a shape that its sub-model does not have."""
        kind = (spec, tuple(payload))
        shapes = self._shapes.get(kind) or self.shapes(kind)
        for name, shape in shapes.items():
            found = tuple(payload.shape(name) if isinstance(payload, Spooled) else payload[name].shape)
            if found != shape:
                raise ModelError(f"{name}: the update brings shape {found}, its sub-model has {list(shape)}")
        return kind

    def of(self, kind: Kind) -> dict[str, Region]:
        """Return the positions of an update's entries by name. Raises ModelError for a name or channels that the
        network does not have."""
        if kind not in self._of:
            self._locate(kind)
        return self._of[kind]

    def shapes(self, kind: Kind) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an update's tensors by name. Raises as `of` does."""
        if kind not in self._shapes:
            self._locate(kind)
        return self._shapes[kind]

    def size(self, kind: Kind) -> int:
        """Return the bytes of an update in float32."""
        if kind not in self._sizes:
            self._sizes[kind] = 4 * sum(math.prod(shape) for shape in self.shapes(kind).values())
        return self._sizes[kind]

    def total(self, name: str, weights: Mapping[Kind, float]) -> Tensor:
        """Return for each element the sum of the weights of the kinds that hold it, float64."""
        out = torch.zeros(self._old[name].shape, dtype=torch.float64)
        for kind, weight in weights.items():
            if name in self.of(kind):
                out[self.of(kind)[name]] += weight
        return out

    def _locate(self, kind: Kind) -> None:
        spec, names = kind
        self._layout.check(spec)
        kept = self._layout.channels(spec)
        found = {name: self._region(name, spec, kept) for name in names}
        self._of[kind] = {name: region for name, (region, _) in found.items()}
        self._shapes[kind] = {name: shape for name, (_, shape) in found.items()}

    def _region(self, name: str, spec: SubmodelSpec, kept: Mapping[str, Keep]) -> tuple[Region, tuple[int, ...]]:
        """Return the region and the shape of an update's tensor."""
        slot = self._layout.slots.get(name)
        if slot is None or not self._layout.has_block(spec, slot.block):
            raise ModelError(f"the update brings {name!r}, which its sub-model does not have")
        full = self._old[name].shape
        index: list[slice | Tensor] = []
        shape: list[int] = []
        for size, axis in zip(full, slot.axes, strict=True):
            at = places(kept, axis, size, self._layout.groups)
            index.append(at)
            shape.append(at.stop if isinstance(at, slice) else len(at))
        if all(isinstance(i, slice) for i in index):
            return tuple(index), tuple(shape)
        rows = [torch.arange(i.stop) if isinstance(i, slice) else i for i in index]
        grid = [row.view([-1 if d == dim else 1 for d in range(len(rows))]) for dim, row in enumerate(rows)]
        return tuple(grid), tuple(shape)


def change_of(tensor: Tensor, before: Tensor) -> Tensor:
    """Return the change of a tensor from the server's weights, float64. The client may have received slightly other
    weights because of a codec."""
    return tensor.to(torch.float64, copy=True).sub_(before)


def norm_of(
    payload: Params, kind: Kind, old: Params, regions: Regions, counts: Callable[[str], bool] = lambda name: True
) -> float:
    """Return the L2 norm of an update's change over all tensors that count by name, computed tensor by tensor."""
    at = regions.of(kind)
    changes = (change_of(payload[name], old[name][at[name]]) for name in payload if counts(name))
    return math.hypot(*(float(torch.linalg.vector_norm(change)) for change in changes))


def limited(payload: Params, spec: SubmodelSpec, old: Params, regions: Regions, clip: float | None) -> Params:
    """Return the update with the change of its weights scaled down to an L2 norm of at most `clip`. Running statistics
    neither count nor are scaled. Raises ModelError for an update that does not fit."""
    kind = regions.fit(payload, spec)
    if clip is None or (norm := norm_of(payload, kind, old, regions, _is_weight)) <= clip:
        return payload
    at, found = regions.of(kind), {}
    for name, tensor in payload.items():
        if not _is_weight(name):
            found[name] = tensor
            continue
        before = old[name][at[name]]
        found[name] = change_of(tensor, before).mul_(clip / norm).add_(before).to(tensor)
    return found


def _is_weight(name: str) -> bool:
    return not is_statistic(name)


class StreamingMean:
    """The streaming mean: one running sum per element, plus HELD_BACK_BYTES of updates. `result` turns the sums into
    means tensor by tensor, so that the model is not in memory twice."""

    def __init__(self, old: Params, layout: ParamLayout) -> None:
        self._old = old
        self._regions = Regions(old, layout)
        self._sum: Params = {}
        self._weight: dict[Kind, float] = {}
        self._held: list[tuple[Params, float]] = []
        self._held_kind: Kind | None = None
        self._room = 0
        """The most updates of that kind to buffer."""
        self._made: Params | None = None

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add one update with `weight` > 0: CPU tensors of the shapes of `spec`, which are buffered and must not change
        afterwards. Absent names do not count. Raises ModelError for a name, a shape or a weight that does not fit,
        without adding anything."""
        assert self._made is None, "the mean was taken: what is added now would be lost"
        if not 0 < weight < math.inf:
            raise ModelError(f"an update's weight must be positive and finite, got {weight}")
        kind = self._regions.fit(payload, spec)
        if kind != self._held_kind:
            self._flush()
            self._held_kind, self._room = kind, max(1, HELD_BACK_BYTES // max(1, self._regions.size(kind)))
        self._held.append((payload, weight))
        if len(self._held) >= self._room:
            self._flush()

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        held = () if self._held_kind is None else (self._held_kind,)
        return not any(names for _, names in (*self._weight, *held))

    def trained(self) -> Params:
        """Return masks (bool, shapes of the model) of the elements that an update held."""
        self._flush()
        return {name: self._weights(name) > 0 for name in self._old}

    def result(self) -> Params:
        """Return the new model, or the tensors of `old` if nothing was added. Ends the mean."""
        if self._made is None:
            self._flush()
            self._made = dict(self._old)
            for name in list(self._sum):
                self._made[name] = self._mean(name, self._sum.pop(name))
        return self._made

    def _mean(self, name: str, total: Tensor) -> Tensor:
        before, weights = self._old[name], self._weights(name)
        out = torch.empty(before.shape, dtype=before.dtype)
        step = max(1, ROWS_BYTES // max(1, 8 * math.prod(out.shape[1:])))
        parts = (_in_rows(tensor, step) for tensor in (before, out, total, weights))
        for old, new, sums, weight in zip(*parts, strict=True):
            mean = torch.where(weight > 0, sums / weight.clamp_min(1e-300), old.double())
            new.copy_(mean.to(old.dtype))
        return out

    def _flush(self) -> None:
        """Add the buffered updates: large ones one by one, small ones in one pass."""
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
            if any(isinstance(index, Tensor) for index in region):  # a copy was added to, not a view
                self._sum[name][region] = into

    def _weights(self, name: str) -> Tensor:
        """Return the weight of each element, float64."""
        return self._regions.total(name, self._weight)


def _in_rows(tensor: Tensor, step: int) -> tuple[Tensor, ...]:
    """Split a tensor into views of `step` rows. A scalar has no rows."""
    return torch.split(tensor, step) if tensor.dim() else (tensor,)
