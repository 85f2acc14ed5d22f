"""`take`: cut a sub-model out of a model, or out of a sub-model; and count what a sub-model costs."""

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
    """The sub-network on torch's meta device; it allocates nothing.

    No first weights are drawn. An embedding's would import torch's compiler there: two seconds in every process, and in
    every client's pod.
    """
    with torch.device("meta"), _Undrawn():
        return family.module(spec)


def take(params: Params, layout: ParamLayout, want: SubmodelSpec, have: SubmodelSpec = FULL) -> Params:
    """The slice `want` of `params`, which are the sub-model `have` of the network (default: all of it).

    Tensors have the shapes of `have`; the result has those of `want`. Prefixes come back as views, anything else as
    copies; so does a prefix of an axis with `copies`, whose entries do not lie together. A name that `have` contains
    but `params` lacks was not trained and stays absent. Raises ModelError where `want` is not within `have` (naming
    group and indices, or blocks), and for a name that the layout does not have.
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
    """Where the wanted channels lie inside what is at hand."""
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
    """`entries` of an axis that may join several groups, of which the tensor at hand has `held` channels each."""
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
    """Where kept channels lie on an axis of `size` entries: a slice from 0 where they are its first entries, else
    ascending indices, int64. [1, 3] with repeat 2 -> [2, 3, 6, 7]; the first 2 of 5 with 3 copies -> [0, 1, 5, 6, 10,
    11]."""
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
    """Whether `inner` is a sub-model of `outer`."""
    try:
        for name in (*layout.groups, *layout.choices):
            _local(layout, name, inner, outer)
    except ModelError:
        return False
    return all(layout.has_block(outer, b) for b in layout.blocks if layout.has_block(inner, b))


def index_of(pool: Pool, layout: ParamLayout, spec: SubmodelSpec) -> int | None:
    """Which pool model a sub-model is, or has the widths and blocks of; the outputs do not count."""
    form = layout.form(spec)
    for i, model in enumerate(pool):
        if layout.form(model.spec) == form:
            return i
    return None


def is_statistic(name: str) -> bool:
    """Whether an entry of the state is one of batch norm's running statistics: averaged, never optimised."""
    return name.endswith(("running_mean", "running_var"))


def largest(name: str) -> float:
    """The largest absolute value that an entry can have, beyond which training has diverged: float32 has room for the
    sum of 10^8 squares of such statistics, and of as many weights' as there can be."""
    return 1e15 if is_statistic(name) else 1e9


def shapes(layout: ParamLayout, spec: SubmodelSpec, full: Mapping[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of the sub-model, given those of the full network, or of one that it is part of.
    Touches no tensor."""
    out = {}
    for name, slot in layout.slots.items():
        if layout.has_block(spec, slot.block):
            dims = zip(slot.axes, full[name], strict=True)
            out[name] = tuple(axis.length(n, lambda group: layout.width(spec, group)) for axis, n in dims)
    return out


@lru_cache(maxsize=64)
def full_shapes(family: ModelFamily) -> dict[str, torch.Size]:
    """Shapes of the full network's parameters, in layout order. Allocates nothing. Raises ModelError where module and
    layout disagree."""
    state = blank(family).state_dict()
    if list(state) != list(family.layout().slots):
        odd = sorted(set(state) ^ set(family.layout().slots))
        raise ModelError(f"{type(family).__name__}: module and layout disagree on parameters or order: {odd[:6]}")
    return {name: tensor.shape for name, tensor in state.items()}


@lru_cache(maxsize=64)
def layout_of(family: ModelFamily) -> ParamLayout:
    """The network's layout, made once: a pool's search counts hundreds of sub-models of one network, and a layout takes
    longer than a count."""
    return family.layout()


def made_up(family: ModelFamily, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Samples (count, ...) of the form that the network takes: zeros, or drawn from the generator."""
    shape = (count, *family.input_shape)
    if isinstance(family, TakesTokens):
        if generator is None:
            return torch.zeros(shape, dtype=torch.int64)
        return torch.randint(0, family.vocabulary, shape, generator=generator)
    return torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)


def initial_params(family: ModelFamily, seed: int) -> Params:
    """The freshly initialised full network: the same on every machine for the same seed and torch build."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps three stack traces for devices to come
        return {name: t.detach().clone() for name, t in family.module().state_dict().items()}


def runnable(family: ModelFamily, spec: SubmodelSpec, params: Params) -> nn.Module:
    """The sub-network with `params` (already sliced) as its storage: training it writes into them, so whoever trains
    clones first. Raises ModelError for parameters of another sub-network."""
    module = blank(family, spec)
    try:
        module.load_state_dict(params, assign=True)
    except RuntimeError as error:
        raise ModelError(f"these parameters do not fit the sub-model: {error}") from error
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return module
