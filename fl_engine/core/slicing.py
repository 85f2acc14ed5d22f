"""`take` cuts a sub-model out of a model; shapes and modules of sub-models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fl_engine.core.contracts import ModelFamily, TakesTokens
from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, Axis, Keep, ParamLayout, Params, Pool, SubmodelSpec


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def blank(family: ModelFamily, spec: SubmodelSpec = FULL) -> nn.Module:
    """Return the sub-network on torch's meta device, without drawing weights. Drawing an embedding's weights there
    would import torch's compiler, which takes two seconds."""
    with torch.device("meta"), _Undrawn():
        return family.module(spec)


def take(params: Params, layout: ParamLayout, want: SubmodelSpec, have: SubmodelSpec = FULL) -> Params:
    """Return the slice `want` of `params`, which are the sub-model `have` of the network (default: all of it).

    Prefixes are views, anything else is a copy, also a prefix of an axis with `copies`. A name of `have` that `params`
    lacks was not trained and stays absent. Raises ModelError if `want` is not within `have`, or for an unknown name.
    """
    if want is have or want == have:
        unknown = next((name for name in params if name not in layout.slots), None)
        if unknown is not None:
            raise ModelError(f"the layout knows no parameter {unknown!r}")
        return dict(params)
    layout.check(want)
    layout.check(have)
    local = {name: _local(layout, name, want, have) for name in (*layout.groups, *layout.choices)}
    held = {group: layout.width(have, group) for group in layout.groups}
    missing = [b for b in layout.blocks if layout.has_block(want, b) and not layout.has_block(have, b)]
    if missing:
        raise ModelError(f"the wanted sub-model has the blocks {missing}, the model at hand does not")
    out: Params = {}
    for name, tensor in params.items():
        slot = layout.slots.get(name)
        if slot is None:
            raise ModelError(f"the layout knows no parameter {name!r}")
        if layout.has_block(want, slot.block):
            for dim, axis in enumerate(slot.axes):
                tensor = _cut(tensor, dim, axis, local, held)
            out[name] = tensor
    return out


def _local(layout: ParamLayout, group: str, want: SubmodelSpec, have: SubmodelSpec) -> Keep:
    """Return the positions of the wanted channels among those at hand."""
    wanted, held = layout.indices(want, group), layout.indices(have, group)
    if wanted == held:
        return layout.width(have, group)
    if isinstance(held, int):
        last = wanted if isinstance(wanted, int) else wanted[-1] + 1
        if last > held:
            raise ModelError(f"group {group!r}: channel {last - 1} is wanted, the model at hand keeps the first {held}")
        return wanted
    position = {index: i for i, index in enumerate(held)}
    indices = range(wanted) if isinstance(wanted, int) else wanted
    absent = [i for i in indices if i not in position]
    if absent:
        raise ModelError(f"group {group!r}: the channels {absent[:8]} are wanted, the model at hand lacks them")
    return tuple(position[i] for i in indices)


def _cut(tensor: Tensor, dim: int, axis: Axis, local: Mapping[str, Keep], held: Mapping[str, int]) -> Tensor:
    if axis.group is None and axis.then is None:
        return tensor
    kept = places(local, axis, tensor.shape[dim], held)
    if isinstance(kept, slice):
        return tensor if tensor.shape[dim] == kept.stop else tensor.narrow(dim, 0, kept.stop)
    return tensor.index_select(dim, kept.to(tensor.device))


def places(keep: Mapping[str, Keep], axis: Axis, size: int, held: Mapping[str, int]) -> slice | Tensor:
    """Return `entries` of an axis that may be a concatenation. The tensor at hand has `held` channels of each group."""
    if axis.then is None:
        return slice(0, size) if axis.key is None else entries(keep[axis.key], axis, size)
    found, start = [], 0
    for part in axis.parts:
        long = part.each * (1 if part.group is None else held[part.group])
        at = places(keep, part, long, held)
        found.append((torch.arange(at.stop) if isinstance(at, slice) else at) + start)
        start += long
    joined = torch.cat(found)
    return slice(0, size) if len(joined) == size else joined


def entries(keep: Keep, axis: Axis, size: int) -> slice | Tensor:
    """Return the positions of kept channels on an axis of `size` entries: a slice from 0 if they are the first entries,
    else ascending int64 indices. [1, 3] with repeat 2 -> [2, 3, 6, 7]; the first 2 of 5 with 3 copies -> [0, 1, 5, 6,
    10, 11]."""
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
    """Return the index of the pool model with the sub-model's widths and blocks, or None. The outputs do not count."""
    form = layout.form(spec)
    for i, model in enumerate(pool):
        if layout.form(model.spec) == form:
            return i
    return None


def is_statistic(name: str) -> bool:
    """Return whether an entry of the state is a running statistic of batch norm, which is averaged and never
    optimized."""
    return name.endswith(("running_mean", "running_var"))


def largest(name: str) -> float:
    """Return the largest absolute value of an entry; beyond it training has diverged. float32 can hold the sum of 10^8
    squares of such statistics, and of as many weights' as a network can have."""
    return 1e15 if is_statistic(name) else 1e9


def shapes(layout: ParamLayout, spec: SubmodelSpec, full: Mapping[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the sub-model, given those of the full network or of a larger sub-model."""
    out = {}
    for name, slot in layout.slots.items():
        if layout.has_block(spec, slot.block):
            dims = zip(slot.axes, full[name], strict=True)
            out[name] = tuple(axis.length(n, lambda group: layout.width(spec, group)) for axis, n in dims)
    return out


@lru_cache(maxsize=64)
def full_shapes(family: ModelFamily) -> dict[str, torch.Size]:
    """Return the shapes of the full network's parameters in layout order, without allocating them. Raises ModelError if
    module and layout disagree."""
    state = blank(family).state_dict()
    if list(state) != list(family.layout().slots):
        odd = sorted(set(state) ^ set(family.layout().slots))
        raise ModelError(f"{type(family).__name__}: module and layout disagree on parameters or order: {odd[:6]}")
    return {name: tensor.shape for name, tensor in state.items()}


@lru_cache(maxsize=64)
def layout_of(family: ModelFamily) -> ParamLayout:
    """Return the network's layout, cached because a pool search counts hundreds of sub-models."""
    return family.layout()


def made_up(family: ModelFamily, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return samples (count, ...) as the network expects them: zeros, or random ones."""
    shape = (count, *family.input_shape)
    if isinstance(family, TakesTokens):
        if generator is None:
            return torch.zeros(shape, dtype=torch.int64)
        return torch.randint(0, family.vocabulary, shape, generator=generator)
    return torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)


def initial_params(family: ModelFamily, seed: int) -> Params:
    """Return the freshly initialised full network, equal on every machine for the same seed and torch build."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps three stack traces for devices to come
        return {name: t.detach().clone() for name, t in family.module().state_dict().items()}


def runnable(family: ModelFamily, spec: SubmodelSpec, params: Params) -> nn.Module:
    """Return the sub-network with `params` (already sliced) as its storage. Training writes into them, so clone them
    first. Raises ModelError for parameters of another sub-network."""
    module = blank(family, spec)
    try:
        module.load_state_dict(params, assign=True)
    except RuntimeError as error:
        raise ModelError(f"these parameters do not fit the sub-model: {error}") from error
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return module
