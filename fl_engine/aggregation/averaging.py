"""The per-element weighted mean over heterogeneous updates (FlexFL Sec. III-E, HeteroFL Eq. 2 with weights).

For each element p of the global model, over the updates m that hold it, with weights d_m:

    p = sum_m d_m * p_m / sum_m d_m        and p keeps its old value where no update holds it.

Sums are kept in double precision. They are added in the order in which updates arrive; the engine feeds them in
client order, so the result is one fixed number. Any other order moves an element by at most a few ulp of double,
far below the single precision that is stored, and identical values average to themselves exactly.
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
"""Where an update's entries lie in the global tensor: slices, or broadcast indices like `numpy.ix_`."""

Kind = tuple[SubmodelSpec, tuple[str, ...]]
"""What updates hold: a sub-model, and which of its tensors, by name."""

HELD_BACK_BYTES = 2**20
"""Bytes. Small updates of one kind are held back until together they are this large, then added at once."""

ROWS_BYTES = 2**19
"""Bytes in double precision: a tensor's mean is taken of as many rows at a time, at least one. Smaller than
`heap.LARGE_BLOCK`, so that each time the same memory is used."""


class Regions:
    """Where updates lie in the tensors of `old`, and their shapes there; computed once for each kind of update."""

    def __init__(self, old: Params, layout: ParamLayout) -> None:
        self._old = old
        self._layout = layout
        self._of: dict[Kind, dict[str, Region]] = {}
        self._shapes: dict[Kind, dict[str, tuple[int, ...]]] = {}
        self._sizes: dict[Kind, int] = {}

    def fit(self, payload: Params, spec: SubmodelSpec) -> Kind:
        """The update's kind. Raises ModelError for a name or a shape that its sub-model does not have."""
        kind = (spec, tuple(payload))
        shapes = self._shapes.get(kind) or self.shapes(kind)
        for name, shape in shapes.items():
            found = tuple(payload.shape(name) if isinstance(payload, Spooled) else payload[name].shape)
            if found != shape:
                raise ModelError(f"{name}: the update brings shape {found}, its sub-model has {list(shape)}")
        return kind

    def of(self, kind: Kind) -> dict[str, Region]:
        """By name, where such an update's entries lie in the global tensor. Raises ModelError for a name or channels
        that the network does not have."""
        if kind not in self._of:
            self._locate(kind)
        return self._of[kind]

    def shapes(self, kind: Kind) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of such an update's tensors. Raises as `of` does."""
        if kind not in self._shapes:
            self._locate(kind)
        return self._shapes[kind]

    def size(self, kind: Kind) -> int:
        """Bytes of such an update's numbers in float32."""
        if kind not in self._sizes:
            self._sizes[kind] = 4 * sum(math.prod(shape) for shape in self.shapes(kind).values())
        return self._sizes[kind]

    def total(self, name: str, weights: Mapping[Kind, float]) -> Tensor:
        """float64, shaped like the tensor: the sum of the weights of those that hold an element."""
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
        """The region, and the shape of an update's tensor there."""
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
    """float64: a tensor of an update, less the server's own weights in its place. What a client was sent may differ
    from these by a codec's rounding."""
    return tensor.to(torch.float64, copy=True).sub_(before)


def norm_of(
    payload: Params, kind: Kind, old: Params, regions: Regions, counts: Callable[[str], bool] = lambda name: True
) -> float:
    """The L2 norm of an update's change from `old`, over all its tensors that count, by name, together; one is in
    memory at a time."""
    at = regions.of(kind)
    changes = (change_of(payload[name], old[name][at[name]]) for name in payload if counts(name))
    return math.hypot(*(float(torch.linalg.vector_norm(change)) for change in changes))


def limited(payload: Params, spec: SubmodelSpec, old: Params, regions: Regions, clip: float | None) -> Params:
    """The update, the change of its weights from `old` scaled down to an L2 norm of `clip` where it is larger. Batch
    norm's running statistics, which no gradient moves and which begin far from the data's, neither count nor are
    scaled.

    Raises ModelError for an update that does not fit.
    """
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


class Mean:
    """Streams: holds one running sum per element, however many updates arrive, and HELD_BACK_BYTES of updates. Of a
    large update that waits in a file (`Spooled`) one tensor is in memory at a time. `result` ends it: sums become means
    one tensor after the other, so that the whole model is never there as both."""

    def __init__(self, old: Params, layout: ParamLayout) -> None:
        self._old = old
        self._regions = Regions(old, layout)
        self._sum: Params = {}
        self._weight: dict[Kind, float] = {}
        self._held: list[tuple[Params, float]] = []
        self._held_kind: Kind | None = None
        self._room = 0
        """How many updates of that kind are held back at most."""
        self._made: Params | None = None

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Adds one update with `weight` > 0: tensors of the shapes that `spec` gives, on the CPU, which are held and so
        must not change afterwards. Names absent from `payload` were not trained and do not count.

        Raises ModelError for a name, a shape or a weight that does not fit; nothing has been added then.
        """
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
        """bool, shaped like the model: the elements that at least one update held."""
        self._flush()
        return {name: self._weights(name) > 0 for name in self._old}

    def result(self) -> Params:
        """The new model; the tensors of `old` themselves where nothing was added. Nothing can be added afterwards."""
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
        """Adds what is held back: large updates one by one, small ones all in one pass over the sum."""
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
        """float64, shaped like the tensor: the weight of each element."""
        return self._regions.total(name, self._weight)


def _in_rows(tensor: Tensor, step: int) -> tuple[Tensor, ...]:
    """Views of so many rows each; a number has none."""
    return torch.split(tensor, step) if tensor.dim() else (tensor,)
