"""Cut the weights of a sub-model out of a model (`take`), and create the module of a sub-model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fl_engine.core.contracts import ModelFamily, TakesTokens
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import outputs_of
from fl_engine.core.task import Task, has
from fl_engine.core.types import FULL, HEAD, Axis, Keep, ParamLayout, Params, Pool, SubmodelSpec


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


@contextmanager
def without_storage() -> Iterator[None]:
    """Create modules on torch's meta device, without drawing random weights. Without this context manager, an embedding
    would import torch's compiler to draw weights, which takes two seconds."""
    with torch.device("meta"), _Undrawn():
        yield


def blank(family: ModelFamily, spec: SubmodelSpec = FULL) -> nn.Module:
    """Return the sub-network on torch's meta device, where its weights have no storage."""
    with without_storage():
        return family.module(spec)


def take(params: Params, layout: ParamLayout, want: SubmodelSpec, have: SubmodelSpec = FULL) -> Params:
    """Cut the sub-model `want` out of `params`, which are weights of `have` (by default the whole network).

    A returned tensor is a view if the sub-model keeps the first indices of each axis, otherwise a copy. Untrained
    parameters may be missing in `params` and thus in the result. Raises ModelError if `have` does not contain `want`.
    """
    if unknown := params.keys() - layout.slots.keys():
        raise ModelError(f"the layout does not have the parameters {sorted(unknown)[:8]}")
    if want == have:
        return dict(params)
    layout.check(want)
    layout.check(have)
    local = {name: _local(layout, name, want, have) for name in (*layout.groups, *layout.choices)}
    held = {group: layout.width(have, group) for group in layout.groups}
    missing = [b for b in layout.blocks if layout.has_block(want, b) and not layout.has_block(have, b)]
    if missing:
        raise ModelError(f"the sub-model requires the blocks {missing}, which the larger model does not have")
    out: Params = {}
    for name, tensor in params.items():
        slot = layout.slots[name]
        if layout.has_block(want, slot.block):
            for dim, axis in enumerate(slot.axes):
                tensor = _cut(tensor, dim, axis, local, held)
            out[name] = tensor
    return out


def under(params: Params, prefix: str) -> Params:
    """Return the tensors whose names begin with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}


def put(part: Params, layout: ParamLayout, spec: SubmodelSpec, into: Params, have: SubmodelSpec) -> Params:
    """Return a copy of `into`, which are weights of `have`, with the weights `part` of its sub-model `spec`."""
    local = {name: _local(layout, name, spec, have) for name in (*layout.groups, *layout.choices)}
    held = {group: layout.width(have, group) for group in layout.groups}
    out = dict(into)
    for name, tensor in part.items():
        whole = into[name].clone()
        axes = [
            places(local, axis, size, held) for axis, size in zip(layout.slots[name].axes, whole.shape, strict=True)
        ]
        whole[mesh(axes)] = tensor.to(whole.dtype)
        out[name] = whole
    return out


def _local(layout: ParamLayout, group: str, want: SubmodelSpec, have: SubmodelSpec) -> Keep:
    """Return, for each channel of `want`, its index in the list of the channels of `have`."""
    wanted, held = layout.indices(want, group), layout.indices(have, group)
    if wanted == held:
        return layout.width(have, group)
    if isinstance(held, int):
        last = wanted if isinstance(wanted, int) else wanted[-1] + 1
        if last > held:
            raise ModelError(f"group {group!r}: channel {last - 1} is required, but the model has only {held} channels")
        return wanted
    position = {index: i for i, index in enumerate(held)}
    indices = range(wanted) if isinstance(wanted, int) else wanted
    absent = [i for i in indices if i not in position]
    if absent:
        raise ModelError(f"group {group!r}: the channels {absent[:8]} are required, but the model does not have them")
    return tuple(position[i] for i in indices)


def _cut(tensor: Tensor, dim: int, axis: Axis, local: Mapping[str, Keep], held: Mapping[str, int]) -> Tensor:
    if axis.group is None and axis.then is None:
        return tensor
    kept = places(local, axis, tensor.shape[dim], held)
    if isinstance(kept, slice):
        return tensor if tensor.shape[dim] == kept.stop else tensor.narrow(dim, 0, kept.stop)
    return tensor.index_select(dim, kept.to(tensor.device))


def places(keep: Mapping[str, Keep], axis: Axis, size: int, held: Mapping[str, int]) -> slice | Tensor:
    """Return the kept indices along an axis, which may concatenate several axes. `held` maps each group to the number
    of channels in the model that is sliced."""
    if axis.then is None:
        return slice(0, size) if axis.key is None else entries(keep[axis.key], axis, size)
    found, start = [], 0
    for part in axis.parts:
        long = part.each * (1 if part.group is None else held[part.group])
        kept = places(keep, part, long, held)
        found.append((torch.arange(kept.stop) if isinstance(kept, slice) else kept) + start)
        start += long
    joined = torch.cat(found)
    return slice(0, size) if len(joined) == size else joined


def common(layout: ParamLayout, one: SubmodelSpec | None, other: SubmodelSpec) -> SubmodelSpec | None:
    """Return the largest sub-model that both sub-models contain. Return None if there is none, or if `one` is None."""
    if one is None or one == other:
        return one
    keep: dict[str, list[int]] = {}
    for name in (*layout.groups, *layout.choices):
        first, second = (layout.indices(spec, name) for spec in (one, other))
        keep[name] = sorted(_positions(first) & _positions(second))
    owners = layout.choices.items()
    if not all(keep.values()) or any(owner and len(keep[choice]) != len(keep[owner]) for choice, owner in owners):
        return None
    return SubmodelSpec.of(keep, (b for b in layout.blocks if layout.has_block(one, b) and layout.has_block(other, b)))


def _positions(keep: Keep) -> set[int]:
    return set(range(keep)) if isinstance(keep, int) else set(keep)


def mesh(axes: Sequence[slice | Tensor]) -> tuple[slice | Tensor, ...]:
    """Return an index of the elements whose position along each axis is one of `axes`, like `numpy.ix_`. The index
    contains only slices if `axes` does. The slices in `axes` must start at 0."""
    if all(isinstance(axis, slice) for axis in axes):
        return tuple(axes)
    rows = [torch.arange(axis.stop) if isinstance(axis, slice) else axis for axis in axes]
    return tuple(row.view([-1 if d == dim else 1 for d in range(len(rows))]) for dim, row in enumerate(rows))


def entries(keep: Keep, axis: Axis, size: int) -> slice | Tensor:
    """Return the indices of the kept channels along an axis of length `size`. The result is a slice from 0 if the first
    indices are kept, otherwise an ascending int64 tensor. With `repeat` 2, the channels [1, 3] have the indices [2, 3,
    6, 7]. With `copies` 3, the first 2 of 5 channels have the indices [0, 1, 5, 6, 10, 11]."""
    run = size // axis.copies
    if isinstance(keep, int) and (axis.copies == 1 or keep * axis.repeat == run):
        return slice(0, keep * axis.repeat * axis.copies)
    found = torch.arange(keep) if isinstance(keep, int) else torch.tensor(keep)
    if axis.repeat > 1:
        found = (found[:, None] * axis.repeat + torch.arange(axis.repeat)).flatten()
    if axis.copies > 1:
        found = (torch.arange(axis.copies)[:, None] * run + found).flatten()
    return found


def contains(layout: ParamLayout, outer: SubmodelSpec, inner: SubmodelSpec) -> bool:
    """Return whether `inner` is a sub-model of `outer`."""
    try:
        for name in (*layout.groups, *layout.choices):
            _local(layout, name, inner, outer)
    except ModelError:
        return False
    return all(layout.has_block(outer, b) for b in layout.blocks if layout.has_block(inner, b))


def index_of(pool: Pool, layout: ParamLayout, spec: SubmodelSpec) -> int | None:
    """Return the index of the pool model with the widths and blocks of `spec`, or None. The head's width is ignored."""
    form = layout.form(spec)
    return next((i for i, model in enumerate(pool) if layout.form(model.spec) == form), None)


def all_classes(spec: SubmodelSpec) -> SubmodelSpec:
    """Return the sub-model with all outputs of the output layer."""
    return SubmodelSpec.of({group: kept for group, kept in spec.kept.items() if group != HEAD}, spec.blocks)


def is_statistic(name: str) -> bool:
    """Return whether an entry of the state dict is a running statistic of batch norm. Statistics are averaged and never
    optimized."""
    return name.endswith(("running_mean", "running_var"))


def largest(name: str) -> float:
    """Return the maximum absolute value of a valid element. A larger value means that training has diverged. Below this
    maximum, the sum of all squared weights, or of 10^8 squared running statistics, does not overflow float32."""
    return 1e15 if is_statistic(name) else 1e9


def shapes(layout: ParamLayout, spec: SubmodelSpec, full: Mapping[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the sub-model. `full` contains the shapes of a larger model."""
    out = {}
    for name, slot in layout.slots.items():
        if layout.has_block(spec, slot.block):
            dims = zip(slot.axes, full[name], strict=True)
            out[name] = tuple(axis.length(n, lambda group: layout.width(spec, group)) for axis, n in dims)
    return out


@lru_cache(maxsize=64)
def full_shapes(family: ModelFamily) -> dict[str, torch.Size]:
    """Return the shapes of the full network's parameters in layout order, without allocating tensors. Raises ModelError
    if the module and the layout have different parameters."""
    state = blank(family).state_dict()
    if list(state) != list(family.layout().slots):
        odd = sorted(set(state) ^ set(family.layout().slots))
        raise ModelError(
            f"{type(family).__name__}: the module and the layout must have the same parameters in the same order, got "
            f"differences in {odd[:6]}"
        )
    return {name: tensor.shape for name, tensor in state.items()}


@lru_cache(maxsize=64)
def layout_of(family: ModelFamily) -> ParamLayout:
    """Return the network's layout, which is cached because a pool search reads it for hundreds of sub-models."""
    return family.layout()


def made_up(family: ModelFamily, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return artificial samples (count, ...): random values if a generator is passed, otherwise zeros."""
    shape = (count, *family.input_shape)
    if isinstance(family, TakesTokens):
        if generator is None:
            return torch.zeros(shape, dtype=torch.int64)
        return torch.randint(0, family.vocabulary, shape, generator=generator)
    return torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)


def random_targets(family: ModelFamily, task: Task, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return random targets for the samples `x`. Maps have the size of the network's outputs."""
    y = task.examples(len(x), generator)
    if not has(task, "maps"):
        return y
    with torch.no_grad():
        out = outputs_of(runnable(family, FULL, initial_params(family, 0)).eval()(x[:1]))[-1]
    return y[:, :1, :1].expand(-1, *out.shape[2:]).contiguous()


def initial_params(family: ModelFamily, seed: int) -> Params:
    """Return random initial weights of the full network. The weights depend only on the seed and on the torch build."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also queue calls for uninitialised devices
        return {name: t.detach().clone() for name, t in family.module().state_dict().items()}


def runnable(family: ModelFamily, spec: SubmodelSpec, params: Params) -> nn.Module:
    """Return the sub-network, which uses the tensors in `params` without a copy. Training overwrites `params`, so pass
    clones. Raises ModelError if `params` are not the weights of this sub-network."""
    module = blank(family, spec)
    try:
        module.load_state_dict(params, assign=True)
    except RuntimeError as error:
        raise ModelError(f"the parameters do not fit the sub-model: {error}") from error
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return module
