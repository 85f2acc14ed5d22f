"""From followed channels to a layout: groups and their names, slots, and the layers that a pool prunes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot
from fl_engine.models.traced.channels import Channels, Dim, compact, free, length, resolved
from fl_engine.models.traced.flow import Flow


class Sizes(NamedTuple):
    """A layer's attribute with its number of channels: the axis that it counts, in units of `each`."""

    attribute: str
    axis: Axis
    full: int
    each: int


class Derived(NamedTuple):
    layout: ParamLayout
    prunable: tuple[Prunable, ...]
    sizes: Mapping[str, tuple[Sizes, ...]]
    relus: Mapping[fx.Node, str]
    """The name of the module that each ReLU becomes."""


def derived(flow: Flow, names: Sequence[str], outputs: int) -> Derived:
    """The layout of a network whose state has these `names`, in its order."""
    axes = {f"{path}.{name}": dims for path, layer in flow.layers.items() for name, dims in layer.weights.items()}
    axes |= flow.params
    called = _names((dim for name in names for dim in axes[name]), flow.head)
    slots = {}
    for name in names:
        block = name.rpartition(".")[0] or name
        slots[name] = Slot(block, tuple(_axis(dim, called) for dim in axes[name]))
    groups = {name: channels.size for channels, name in called.items() if name != HEAD} | {HEAD: outputs}
    sizes = {
        path: tuple(Sizes(name, _axis(dim, called), length(dim), each) for name, (dim, each) in layer.sizes.items())
        for path, layer in flow.layers.items()
    }
    owned = _owned(flow, called)
    relus = _relus(flow, owned)
    return Derived(ParamLayout(groups, slots), _prunable(called, owned, relus), sizes, relus)


def _names(dims: Iterable[Dim], head: Channels | None) -> dict[Channels, str]:
    """A name for all channels in use: the layer that makes them."""
    called: dict[Channels, str] = {}
    for channels in free(*dims):
        base = name = HEAD if channels is head else channels.origin
        if channels is not head:
            number = 1
            while name in called.values() or name == HEAD:
                number += 1
                name = f"{base}:{number}"
        called[channels] = name
    return called


def _axis(dim: Dim, called: Mapping[Channels, str]) -> Axis:
    parts = compact(resolved(dim))
    if len(parts) == 1 and parts[0][0].of.pinned:
        return Axis(None)
    axis: Axis | None = None
    for (channels, repeat), times in reversed(parts):
        if channels.pinned:
            axis = Axis(None, channels.size * repeat * times, then=axis)
        else:
            axis = Axis(called[channels], repeat, times, axis)
    return axis or Axis(None)


def _owned(flow: Flow, called: Mapping[Channels, str]) -> dict[str, Channels]:
    """By path, the layers whose outputs are channels of a single group."""
    owned = {}
    for path, layer in flow.layers.items():
        out = layer.out[1:] if layer.out else ()
        made = free(*(dim for dim in out)) if layer.weights else []
        if len(made) == 1 and made[0] in called and called[made[0]] != HEAD:
            governed = [dim for dims in layer.weights.values() for dim in dims]
            if made[0] in free(*governed) and HEAD not in {called.get(channels) for channels in free(*governed)}:
                owned[path] = made[0]
    return owned


def _relus(flow: Flow, owned: Mapping[str, Channels]) -> dict[fx.Node, str]:
    """Each ReLU becomes a child of the last layer before it that makes the same channels, so that it counts with them.
    A ReLU over several groups, or none, becomes a child of the network."""
    relus: dict[fx.Node, str] = {}
    for node, before in flow.relus:
        over = free(*flow.dims[node])
        makers = [path for path in before if len(over) == 1 and owned.get(path) is over[0]]
        stem = f"{makers[-1]}.relu" if makers else "relu_of_several"
        name, number = stem, 1
        while name in relus.values():
            number += 1
            name = f"{stem}{number}"
        relus[node] = name
    return relus


def _prunable(
    called: Mapping[Channels, str], owned: Mapping[str, Channels], relus: Mapping[fx.Node, str]
) -> tuple[Prunable, ...]:
    found = []
    for channels, group in called.items():
        layers = tuple(f"{path}." for path, made in owned.items() if made is channels)
        if layers:
            found.append(Prunable(group, layers, tuple(n for n in relus.values() if n.startswith(layers))))
    return tuple(found)
