"""Operations without weights: the channels of their outputs.

A rule gets the operation (`Call`) and returns the axes of its output, or the axes that must not be cut with the reason
(`Mixes`). An operation without a rule needs all axes of its inputs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fl_engine.models.traced.channels import Dim, fixed, free, length, merged, tie
from fl_engine.models.traced.layers import Dims

Shape = tuple[int, ...]


class Given(NamedTuple):
    dims: Dims
    shape: Shape


@dataclass(frozen=True)
class Call:
    """`name(*args, **options)`. Tensors among the arguments are `Given`, other nodes are numbers or None."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    shape: Any
    """Of the output; a tuple of shapes for several outputs."""

    @property
    def x(self) -> Given:
        return next(self.given)

    @property
    def given(self) -> Iterator[Given]:
        """All tensors, also in lists."""
        for value in (*self.args, *self.options.values()):
            if isinstance(value, Given):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, Given))

    def option(self, place: int, *names: str, default: Any = None) -> Any:
        """An argument by its place or one of its names."""
        found = next((self.options[name] for name in names if name in self.options), None)
        if found is None and len(self.args) > place:
            found = self.args[place]
        return default if found is None else found


class Mixes(NamedTuple):
    """The reason why these axes must not be cut."""

    why: str
    dims: tuple[Dim, ...]


Rule = Callable[[Call], "Dims | Mixes"]


def every(call: Call) -> tuple[Dim, ...]:
    return tuple(dim for given in call.given for dim in given.dims)


def whole(shape: Any, axis: Callable[[int, int], Dim] = lambda place, size: fixed(size)) -> Any:
    """The axes of one or several outputs: never cut, or made by `axis` from place and size."""
    if shape and isinstance(shape[0], tuple):
        return tuple(whole(each, axis) for each in shape)
    return tuple(axis(place, size) for place, size in enumerate(shape))


# ------------------------------------------------------------------------------------------------------- rules
def by_element(call: Call) -> Dims | Mixes:
    """Tensors of shapes that broadcast: axes that meet have the same channels."""
    return broadcast(list(call.given), call.shape)


def broadcast(given: Sequence[Given], shape: Shape) -> Dims:
    out: list[Dim] = []
    for back in range(len(shape), 0, -1):
        met = [g.dims[-back] for g in given if len(g.shape) >= back and g.shape[-back] == shape[-back]]
        for other in met[1:]:
            tie(met[0], other)
        out.append(met[0] if met else fixed(shape[-back]))
    return tuple(out)


def first(call: Call) -> Dims | Mixes:
    return call.x.dims


def pooled(call: Call) -> Dims | Mixes:
    """(B, C, ...): each channel alone, over pixels or steps."""
    x, spatial = call.x, next((int(c) for c in call.name if c in "123"), len(call.x.shape) - 2)
    if len(x.shape) != spatial + 2:
        return Mixes(f"calls {call.name} on {len(x.shape)} axes, (B, C, ...) is expected", x.dims)
    if free(*x.dims[2:]):
        return Mixes(f"calls {call.name} over channels", x.dims[2:])
    if call.shape and isinstance(call.shape[0], tuple):  # with indices
        return tuple((*x.dims[:2], *whole(shape[2:])) for shape in call.shape)
    return (*x.dims[:2], *whole(call.shape[2:]))


def padded(call: Call) -> Dims | Mixes:
    """F.pad: the last axes."""
    pads = call.option(1, "pad")
    changed = len(pads) // 2 if isinstance(pads, list | tuple) else len(call.x.shape)
    kept = len(call.x.shape) - changed
    if free(*call.x.dims[kept:]):
        return Mixes("pads channels", call.x.dims[kept:])
    return (*call.x.dims[:kept], *whole(call.shape[kept:]))


def axes_of(dim: Any, rank: int) -> list[int]:
    """The axes 0 .. rank - 1 of torch's argument dim; None: all."""
    listed = range(rank) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [axis % rank for axis in listed]


def reduced(call: Call) -> Dims | Mixes:
    """mean, sum, max, ... over axes."""
    x, dim = call.x, call.option(1, "dim", "axis")
    if isinstance(dim, Given) and call.name in ("max", "min"):
        return by_element(call)  # max(a, b)
    gone = axes_of(dim, len(x.shape))
    if free(*(x.dims[axis] for axis in gone)):
        return Mixes(f"takes {call.name} over channels", tuple(x.dims[axis] for axis in gone))
    shape = call.shape[0] if call.shape and isinstance(call.shape[0], tuple) else call.shape
    stays = len(shape) == len(x.shape)
    dims = [fixed(1) if axis in gone else d for axis, d in enumerate(x.dims) if stays or axis not in gone]
    return (tuple(dims),) * len(call.shape) if shape is not call.shape else tuple(dims)  # type: ignore[return-value]


def along(call: Call) -> Dims | Mixes:
    """softmax, normalize, cumsum: the same shape, but numbers along one axis mix."""
    x, dim = call.x, call.option(1, "dim", "axis")
    if call.name == "normalize":
        dim = call.option(2, "dim", default=1)
    over = [x.dims[axis] for axis in axes_of(dim, len(x.shape))]
    return Mixes(f"takes {call.name} over channels", tuple(over)) if free(*over) else x.dims


def reshaped(call: Call) -> Dims | Mixes:
    """flatten, view, reshape: neighbouring axes become one, or one becomes several."""
    x, out, source, target = call.x, list[Dim](), 0, 0
    while source < len(x.shape) or target < len(call.shape):
        old, new, left, right = list[Dim](), list[int](), 1, 1
        while not (old and new and left == right) and (source < len(x.shape) or target < len(call.shape)):
            if source < len(x.shape) and (left <= right or target == len(call.shape)):
                old.append(x.dims[source])
                left *= x.shape[source]
                source += 1
            else:
                new.append(call.shape[target])
                right *= call.shape[target]
                target += 1
        found = _regrouped([dim for dim in old if length(dim) > 1], new)
        if found is None:
            return Mixes("splits an axis of channels, or flattens two into one", tuple(old))
        out += found
    return tuple(out)


def _regrouped(old: Sequence[Dim], new: Sequence[int]) -> list[Dim] | None:
    """Axes of the sizes `new` for the entries of `old`; None if channels would be split or mixed."""
    wide = [size for size in new if size > 1]
    if len(wide) != 1:
        return None if free(*old) else [fixed(size) for size in new]
    joined: Dim | None = old[0]
    for dim in old[1:]:
        joined = merged(joined, dim) if joined is not None else None
    return None if joined is None else [joined if size > 1 else fixed(1) for size in new]


def moved(call: Call) -> Dims | Mixes:
    """permute, transpose, movedim, squeeze, unsqueeze: the same axes elsewhere."""
    x, rank = call.x, len(call.x.shape)
    match call.name:
        case "permute":
            order = call.args[1:] if len(call.args) > 2 else call.option(1, "dims")
            return tuple(x.dims[axis] for axis in axes_of(order, rank))
        case "t" | "T":
            return x.dims[::-1]
        case "mT":
            return (*x.dims[:-2], x.dims[-1], x.dims[-2])
        case "transpose" | "swapaxes" | "swapdims":
            dims = list(x.dims)
            a, b = call.option(1, "dim0", "axis0") % rank, call.option(2, "dim1", "axis1") % rank
            dims[a], dims[b] = dims[b], dims[a]
            return tuple(dims)
        case "movedim" | "moveaxis":
            gone, to = (axes_of(call.option(place, name), rank) for place, name in ((1, "source"), (2, "destination")))
            rest = iter(dim for axis, dim in enumerate(x.dims) if axis not in gone)
            return tuple(x.dims[gone[to.index(axis)]] if axis in to else next(rest) for axis in range(rank))
        case "unsqueeze":
            axis = call.option(1, "dim") % (rank + 1)
            return (*x.dims[:axis], fixed(1), *x.dims[axis:])
    squeezed = axes_of(call.option(1, "dim"), rank)
    return tuple(dim for axis, dim in enumerate(x.dims) if axis not in squeezed or x.shape[axis] != 1)


def expanded(call: Call) -> Dims | Mixes:
    return broadcast([call.x], call.shape)


def joined(call: Call) -> Dims | Mixes:
    """cat, along an axis."""
    given, axis = list(call.given), axes_of(call.option(1, "dim", "axis", default=0), len(call.shape))[0]
    dims = list(broadcast([Given((*g.dims[:axis], *g.dims[axis + 1 :]), _without(g.shape, axis)) for g in given],
                          _without(call.shape, axis)))  # fmt: skip
    return (*dims[:axis], tuple(part for g in given for part in g.dims[axis]), *dims[axis:])


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def stacked(call: Call) -> Dims | Mixes:
    axis = axes_of(call.option(1, "dim", default=0), len(call.shape))[0]
    dims = broadcast(list(call.given), _without(call.shape, axis))
    return (*dims[:axis], fixed(call.shape[axis]), *dims[axis:])


def split(call: Call) -> Dims | Mixes:
    """chunk, split, unbind: several tensors."""
    place = 1 if call.name == "unbind" else 2
    x, axis = call.x, axes_of(call.option(place, "dim", default=0), len(call.x.shape))[0]
    if free(x.dims[axis]):
        return Mixes(f"splits channels ({call.name})", (x.dims[axis],))
    parts = []
    for shape in call.shape:
        size = () if len(shape) < len(x.shape) else (fixed(shape[axis]),)
        parts.append((*x.dims[:axis], *size, *x.dims[axis + 1 :]))
    return tuple(parts)


def indexed(call: Call) -> Dims | Mixes:
    """x[...] with numbers, slices, None and an ellipsis."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    x, out, axis = call.x, list[Dim](), 0
    if not all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in index):
        return Mixes("takes channels out by an index (x[...])", every(call))
    taken = sum(i is not None and i is not Ellipsis for i in index)
    for i in (*index, *(() if Ellipsis in index else (Ellipsis,))):
        if i is None:
            out.append(fixed(1))
            continue
        over = x.dims[axis : axis + (len(x.shape) - taken if i is Ellipsis else 1)]
        axis += len(over)
        if i is Ellipsis or i == slice(None):
            out += over
            continue
        if free(*over):
            return Mixes("takes some channels out (x[...])", over)
        if isinstance(i, slice):
            out.append(fixed(call.shape[len(out)]))  # its ends may be tensors
    return tuple(out)
