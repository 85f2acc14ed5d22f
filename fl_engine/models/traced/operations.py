"""Rules that determine the output channels of operations without weights.

A rule takes the operation (`Call`) and returns the axes of the output, or None if the operation mixes channels. If a
rule returns None, or if an operation does not have a rule, sub-models keep all input channels of the operation. `RULES`
maps torch's names of operations to rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_engine.models.traced.channels import Dim, fixed, free, scaled, tie
from fl_engine.models.traced.layers import Dims

Shape = tuple[int, ...]


class Given(NamedTuple):
    dims: Dims
    shape: Shape


@dataclass(frozen=True)
class Call:
    """A call `name(*args, **options)` in the graph. Tensor arguments are `Given` objects. An argument from a node
    without a tensor output is the node's value, or None if it is unknown."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    shape: Any
    """Shape of the output; a tuple of shapes if the operation has several outputs."""
    function: Callable[..., Any]

    @property
    def x(self) -> Given:
        return next(self.given)

    @property
    def given(self) -> Iterator[Given]:
        """Yield all tensor arguments, including tensors in lists."""
        for value in (*self.args, *self.options.values()):
            if isinstance(value, Given):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, Given))

    def run(self, x: Tensor) -> Any:
        """Run the operation with `x` as the first tensor and uninitialised memory for all other tensors."""
        tensors = iter([x, *(torch.empty(given.shape) for given in list(self.given)[1:])])
        args = [next(tensors) if isinstance(value, Given) else value for value in self.args]
        options = {name: next(tensors) if isinstance(v, Given) else v for name, v in self.options.items()}
        return self.function(*args, **options)

    def option(self, place: int, *names: str, default: Any = None) -> Any:
        """Return the argument at the position `place` or with one of the `names`."""
        found = next((self.options[name] for name in names if name in self.options), None)
        if found is None and len(self.args) > place:
            found = self.args[place]
        return default if found is None else found


Rule = Callable[[Call], "Dims | None"]


def several(shape: Any) -> bool:
    """Return whether an operation has several outputs, in which case `shape` is a tuple of shapes."""
    return bool(shape) and isinstance(shape[0], tuple)


def whole(shape: Any) -> Any:
    """Return axes that are never cut, for one or several outputs."""
    return tuple(map(whole, shape)) if several(shape) else tuple(map(fixed, shape))


def by_element(call: Call) -> Dims | None:
    """Rule for element-wise operations with broadcasting. Axes that broadcasting aligns have the same channels."""
    return broadcast(list(call.given), call.shape)


def broadcast(given: Sequence[Given], shape: Shape) -> Dims:
    out: list[Dim] = []
    for back in range(len(shape), 0, -1):
        met = [g.dims[-back] for g in given if len(g.shape) >= back and g.shape[-back] == shape[-back]]
        for other in met[1:]:
            tie(met[0], other)
        out.append(met[0] if met else fixed(shape[-back]))
    return tuple(out)


def first(call: Call) -> Dims | None:
    return call.x.dims


def pooled(call: Call) -> Dims | None:
    """Rule for pooling (B, C, ...), which processes each channel separately."""
    x, spatial = call.x, next((int(c) for c in call.name if c in "123"), len(call.x.shape) - 2)
    if len(x.shape) != spatial + 2 or free(*x.dims[2:]):
        return None
    if several(call.shape):  # with indices
        return tuple((*x.dims[:2], *whole(shape[2:])) for shape in call.shape)
    return (*x.dims[:2], *whole(call.shape[2:]))


def padded(call: Call) -> Dims | None:
    """Rule for F.pad, which changes the last axes."""
    pads = call.option(1, "pad")
    changed = len(pads) // 2 if isinstance(pads, list | tuple) else len(call.x.shape)
    kept = len(call.x.shape) - changed
    if free(*call.x.dims[kept:]):
        return None
    return (*call.x.dims[:kept], *whole(call.shape[kept:]))


def axes_of(dim: Any, rank: int) -> list[int]:
    """Convert torch's argument `dim` to a list of axes from 0 to rank - 1. `dim=None` means all axes."""
    listed = range(rank) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [axis % rank for axis in listed]


def reduced(call: Call) -> Dims | None:
    """Rule for mean, sum, max and other reductions over axes."""
    x, dim = call.x, call.option(1, "dim", "axis")
    if isinstance(dim, Given) and call.name in ("max", "min"):
        return by_element(call)  # max(a, b)
    gone = axes_of(dim, len(x.shape))
    if free(*(x.dims[axis] for axis in gone)):
        return None
    shape = call.shape[0] if several(call.shape) else call.shape
    stays = len(shape) == len(x.shape)
    dims = [fixed(1) if axis in gone else d for axis, d in enumerate(x.dims) if stays or axis not in gone]
    return (tuple(dims),) * len(call.shape) if shape is not call.shape else tuple(dims)  # type: ignore[return-value]


def along(call: Call) -> Dims | None:
    """Rule for softmax, normalize and cumsum, which do not change the shape but mix the values along one axis."""
    x, dim = call.x, call.option(1, "dim", "axis")
    if call.name == "normalize":
        dim = call.option(2, "dim", default=1)
    over = [x.dims[axis] for axis in axes_of(dim, len(x.shape))]
    return None if free(*over) else x.dims


def rearranged(call: Call) -> Any:
    """Rule for flatten, view, permute, squeeze, expand, chunk, x[...]: every output value is a copy of one input value.

    For each input axis, the rule runs the operation on a tensor that contains the positions along this axis. If the
    output does not list all positions in order along a single axis, the operation splits or mixes channels.
    """
    x, shapes = call.x, call.shape if several(call.shape) else (call.shape,)
    if call.name == "squeeze" and call.option(1, "dim") is None:
        return None  # In sub-models with one channel, squeeze would remove the channel axis.
    if call.name == "getitem" and len(list(call.given)) > 1:
        return None  # The index is a tensor with unknown values.
    outputs: list[list[Dim]] = [list(map(fixed, shape)) for shape in shapes]
    for axis, dim in enumerate(x.dims):
        if x.shape[axis] == 1:
            continue
        positions = torch.arange(x.shape[axis]).view(-1, *[1] * (len(x.shape) - axis - 1)).expand(x.shape)
        found = call.run(positions.contiguous())
        for dims, out in zip(outputs, found if several(call.shape) else (found,), strict=True):
            place = _moved_to(out, x.shape[axis])
            if place is None or free(dims[place.axis]):
                if free(dim):
                    return None
            elif free(dim) or place.repeat == place.copies == 1:
                dims[place.axis] = scaled(dim, place.repeat) * place.copies
    return tuple(map(tuple, outputs)) if several(call.shape) else tuple(outputs[0])


class Place(NamedTuple):
    """Output axis that lists the positions of an input axis `copies` times, with each position `repeat` times in a
    row."""

    axis: int
    repeat: int
    copies: int


def _moved_to(out: Tensor, size: int) -> Place | None:
    """Return the output axis that contains the positions 0 .. size - 1 in order; None if there is no such axis."""
    varying = [axis for axis in range(out.dim()) if not torch.equal(out, out.narrow(axis, 0, 1).expand_as(out))]
    if len(varying) != 1:
        return None
    row = out.movedim(varying[0], 0).flatten(1)[:, 0]
    repeat = int((row == 0).long().cumprod(0).sum())
    copies = len(row) // max(1, size * repeat)
    whole = torch.equal(row, torch.arange(size).repeat_interleave(repeat).repeat(copies))
    return Place(varying[0], repeat, copies) if whole else None


def joined(call: Call) -> Dims | None:
    """Rule for `torch.cat` along an axis."""
    given, axis = list(call.given), axes_of(call.option(1, "dim", "axis", default=0), len(call.shape))[0]
    dims = list(broadcast([Given((*g.dims[:axis], *g.dims[axis + 1 :]), _without(g.shape, axis)) for g in given],
                          _without(call.shape, axis)))  # fmt: skip
    return (*dims[:axis], tuple(part for g in given for part in g.dims[axis]), *dims[axis:])


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def stacked(call: Call) -> Dims | None:
    axis = axes_of(call.option(1, "dim", default=0), len(call.shape))[0]
    dims = broadcast(list(call.given), _without(call.shape, axis))
    return (*dims[:axis], fixed(call.shape[axis]), *dims[axis:])


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_named(
        by_element,
        "add add_ sub sub_ rsub mul mul_ div div_ truediv pow maximum minimum where lerp iadd isub imul itruediv "
        "clamp clamp_ clamp_min clamp_max clip neg abs square sqrt rsqrt reciprocal exp expm1 log log1p erf sin cos "
        "sign floor round "
        "relu relu_ relu6 gelu silu silu_ mish hardswish hardsigmoid hardtanh sigmoid sigmoid_ tanh tanh_ elu elu_ "
        "selu celu leaky_relu leaky_relu_ softplus softsign softshrink hardshrink tanhshrink threshold logsigmoid "
        "identity dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
        "eq ne lt le gt ge masked_fill",
    ),
    **_named(
        first,
        "contiguous clone detach float double half to type type_as zeros_like ones_like new_zeros_like "
        "instance_norm requires_grad_",
    ),
    **_named(
        pooled,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d interpolate upsample spatial_pad",
    ),
    **_named(padded, "pad"),
    **_named(reduced, "mean sum amax amin max min var std norm prod logsumexp median argmax argmin any all"),
    **_named(along, "softmax log_softmax softmin normalize cumsum"),
    **_named(
        rearranged,
        "flatten view reshape unflatten view_as reshape_as permute transpose swapaxes swapdims movedim moveaxis t "
        "squeeze unsqueeze expand expand_as chunk split tensor_split unbind getitem",
    ),
    **_named(joined, "cat concat concatenate"),
    **_named(stacked, "stack"),
}

MODULES = {name.replace("_", ""): name for name in RULES} | {
    "rrelu": "leaky_relu",
    "stochasticdepth": "dropout",
    "droppath": "dropout",
    "upsamplingnearest2d": "interpolate",
    "upsamplingbilinear2d": "interpolate",
    **{f"{kind}pad{n}d": "spatial_pad" for n in (1, 2, 3)
       for kind in ("zero", "constant", "reflection", "replication", "circular")},
}  # fmt: skip
"""Maps lower-case names of torch modules without weights to names of operations."""
