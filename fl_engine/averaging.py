"""The per-element weighted mean over heterogeneous updates (FlexFL Sec. III-E, HeteroFL Eq. 2 with weights).

For each element p of the global model, over the updates m that hold it, with weights d_m:

    p = sum_m d_m * p_m / sum_m d_m        and p keeps its old value where no update holds it.

Sums are kept in double precision. They are added in the order in which updates arrive; the engine feeds them in
client order, so the result is one fixed number. Any other order moves an element by at most a few ulp of double,
far below the single precision that is stored, and identical values average to themselves exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_engine.errors import ModelError
from fl_engine.slicing import entries
from fl_engine.types import ParamLayout, Params, SubmodelSpec


class Mean:
    """Streams: holds one running sum and one running weight per element, however many updates arrive."""

    def __init__(self, old: Params, layout: ParamLayout) -> None:
        self._old = old
        self._layout = layout
        self._sum: Params = {}
        self._weight: Params = {}
        self._device: torch.device | None = None

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Adds one update with `weight` > 0. Names absent from `payload` were not trained and do not count.

        Raises ModelError for a name, a shape or a weight that does not fit; nothing has been added then.
        """
        if not 0 < weight < math.inf:
            raise ModelError(f"an update's weight must be positive and finite, got {weight}")
        self._layout.check(spec)
        # Where the first update lies; the others follow it there.
        self._device = self._device or next((tensor.device for tensor in payload.values()), None)
        payload = {name: tensor.to(self._device) for name, tensor in payload.items()}
        regions = {name: self._region(name, tensor, spec) for name, tensor in payload.items()}
        for name, tensor in payload.items():
            if name not in self._sum:
                self._sum[name] = torch.zeros(self._old[name].shape, dtype=torch.float64, device=tensor.device)
                self._weight[name] = torch.zeros_like(self._sum[name])
            region = regions[name]
            self._sum[name][region] += tensor.double() * weight
            self._weight[name][region] += weight

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self._sum

    def trained(self) -> Params:
        """bool, shaped like the model: which elements some update held."""
        return {
            name: self._weight[name].cpu() > 0 if name in self._weight else torch.zeros(old.shape, dtype=torch.bool)
            for name, old in self._old.items()
        }

    def result(self) -> Params:
        """The new model on the CPU; `old` itself where nothing was added."""
        out = dict(self._old)
        for name, total in self._sum.items():
            old, weight = self._old[name].to(total.device), self._weight[name]
            mean = torch.where(weight > 0, total / weight.clamp_min(1e-300), old.double())
            out[name] = mean.to(old.dtype).cpu()
        return out

    def _region(self, name: str, tensor: Tensor, spec: SubmodelSpec) -> tuple[slice | Tensor, ...]:
        """Where the update's entries lie in the global tensor: slices, or broadcast indices like `numpy.ix_`."""
        slot = self._layout.slots.get(name)
        if slot is None or not self._layout.has_block(spec, slot.block):
            raise ModelError(f"the update brings {name!r}, which its sub-model does not have")
        full = self._old[name].shape
        index: list[slice | Tensor] = []
        expected: list[int] = []
        prefixes = True
        for dim, axis in enumerate(slot.axes):
            keep = full[dim] if axis.group is None else self._layout.indices(spec, axis.group)
            repeat = 1 if axis.group is None else axis.repeat
            if isinstance(keep, int):
                index.append(slice(0, keep * repeat))
                expected.append(keep * repeat)
            else:
                prefixes = False
                index.append(entries(keep, repeat))
                expected.append(len(keep) * repeat)
        if tuple(tensor.shape) != tuple(expected):
            raise ModelError(f"{name}: the update brings shape {tuple(tensor.shape)}, its sub-model has {expected}")
        if prefixes:
            return tuple(index)
        rows = [torch.arange(i.stop) if isinstance(i, slice) else i for i in index]
        return tuple(
            row.to(tensor.device).view([-1 if d == dim else 1 for d in range(len(rows))])
            for dim, row in enumerate(rows)
        )
