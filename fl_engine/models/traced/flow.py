"""Determine the channels of each tensor in a traced graph, derive the layout, and adapt the forward to any width."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from torch import fx, nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot
from fl_engine.models.traced import operations as ops
from fl_engine.models.traced.channels import Channels, Dim, compact, fixed, free, length, made, pin, resolved
from fl_engine.models.traced.graph import Traced, attribute, cannot_cut, name_of, place_of
from fl_engine.models.traced.layers import Dims, Layer, known, tied
from fl_engine.models.traced.operations import Call, Given, several

RELUS = ("relu", "relu_", "relu6")


class Flow:
    """Channels of every node in a graph. The module returns `outputs` values per sample."""

    def __init__(self, traced: Traced, outputs: int) -> None:
        self.module = traced.module
        self.layers: dict[str, Layer] = {}
        """Maps paths to layers, sorted by the first use in the graph."""
        self.params: dict[str, Dims] = {}
        """Maps the paths of parameters that the forward uses directly, without a layer, to axes."""
        self.relus: list[tuple[fx.Node, tuple[str, ...]]] = []
        """Each ReLU with the paths of the layers that run before it."""
        self.dims: dict[fx.Node, Any] = {}
        """Maps each node to the output's axes (a tuple for several outputs), or to None if the output is not a
        tensor."""
        self.mixing: list[str] = []
        """Operations and lines in the user's code that mix channels. Sub-models keep all of these channels."""
        self.fixed: list[str] = []
        """Names of layers, weights and buffers. Sub-models keep all channels of these tensors."""
        for node in traced.graph.nodes:
            self.dims[node] = self.visit(node)
        *_, output = traced.graph.nodes
        self.head = self.channels_of_outputs(output, outputs)
        """Variable of the network's output channels; None if the outputs cannot be cut."""
        for channels in [c for dims in self.params.values() for c in free(*dims) if c.loose]:
            channels.pinned = True

    def visit(self, node: fx.Node) -> Any:
        match node.op:
            case "placeholder":
                return ops.whole(node.meta["shape"]) if node.meta["shape"] is not None else None
            case "get_attr":
                return self.parameter(node)
            case "output":
                return None
            case "call_module":
                return self.call_module(node)
        return self.operation(node, name_of(node), node.args, dict(node.kwargs))

    def parameter(self, node: fx.Node) -> Any:
        path, shape = str(node.target), node.meta["shape"]
        if shape is None or not isinstance(attribute(self.module, path), nn.Parameter):
            return None if shape is None else ops.whole(shape)
        if path not in self.params:
            self.params[path] = tuple(made(size, path, loose=True) for size in shape)
            if not attribute(self.module, path).requires_grad:
                self.keep_fixed(self.title(path), *self.params[path])
        return self.params[path]

    def title(self, path: str) -> str:
        tensor = attribute(self.module, path)
        weight = "weight" if tensor.requires_grad else "frozen weight"
        return f"the {weight if isinstance(tensor, nn.Parameter) else 'buffer'} {path}"

    # ------------------------------------------------------------------------------------------------- modules
    def call_module(self, node: fx.Node) -> Any:
        path = str(node.target)
        module = self.module.get_submodule(path)
        kind = type(module).__name__
        if kind.lower() in ops.MODULES and not any(True for _ in module.parameters()):
            options = {"dim": getattr(module, "dim", None)}
            return self.operation(node, ops.MODULES[kind.lower()], node.args, options)
        rule, x = known(module), self.value(node.args[0]) if node.args else None
        if rule is None or not isinstance(x, Given):
            weights = {name: ops.whole(tuple(p.shape)) for name, p in module.state_dict(keep_vars=True).items()}
            self.layers.setdefault(path, Layer(weights, {}, ()))
            call = self.call(node, kind, node.args, dict(node.kwargs))
            if weights and not free(*(dim for given in call.given for dim in given.dims)):
                self.fixed.append(f"the layer {path} ({kind})")
            return self.mixed(node, call)
        layer = rule(module, path, x.dims)
        if path in self.layers:
            tied(self.layers[path], layer)
        self.layers.setdefault(path, layer)
        frozen = [n for n, p in module._parameters.items() if p is not None and not p.requires_grad]
        for n in frozen:
            self.keep_fixed(self.title(f"{path}.{n}"), *layer.weights[n])
        initial_state = layer.state is not None and len(node.args) > 1
        if layer.mixes or initial_state:
            self.keep_all(node, *x.dims, *layer.out, *(dim for dims in layer.weights.values() for dim in dims))
        if layer.state is not None:
            return self.series(node, layer.out, layer.state)
        return self.in_shape(layer.out, node.meta["shape"])

    def series(self, node: fx.Node, out: Dims, state: Dim) -> Any:
        """Return the axes of an LSTM's outputs and of its states. The last axis of a state contains the units."""

        def of(shape: Any) -> Any:
            return tuple(map(of, shape)) if several(shape) else (*ops.whole(shape[:-1]), state)

        outputs, last = node.meta["shape"]
        return self.in_shape(out, outputs), of(last)

    # ---------------------------------------------------------------------------------------------- operations
    def operation(self, node: fx.Node, name: str, args: Any, options: dict[str, Any]) -> Any:
        shape, call = node.meta["shape"], self.call(node, name, args, options)
        if name == "getitem" and not isinstance(self.value(args[0]), Given):
            parts = self.dims.get(args[0])
            if parts is None and shape is not None:  # Some outputs are not tensors.
                return ops.whole(shape)
            return parts[args[1]] if isinstance(parts, tuple) and isinstance(args[1], int | slice) else None
        if shape is None or not any(True for _ in call.given):
            return None if shape is None else ops.whole(shape)
        if name in RELUS:
            self.relus.append((node, tuple(self.layers)))
        rule = ops.RULES.get(name if node.target is not operator.getitem else "getitem")
        before = [c for c in free(*(dim for given in call.given for dim in given.dims)) if not c.loose]
        constants = [n for n in node.all_input_nodes if n.op == "get_attr" and self.dims[n] and not free(*self.dims[n])]
        try:
            found: Any = None if rule is None else rule(call)
        except (TypeError, RuntimeError):  # An axis argument may be a tensor with unknown value.
            found = None
        if found is not None and any(channels.pinned for channels in before):
            self.fixed += [self.title(str(each.target)) for each in constants] or [f"{name} in {place_of(node)}"]
        if found is None:
            return self.mixed(node, call)
        if several(shape):
            return tuple(self.in_shape(each, of) for each, of in zip(found, shape, strict=True))
        return self.in_shape(found, shape)

    def call(self, node: fx.Node, name: str, args: Any, options: dict[str, Any]) -> Call:
        values = tuple(map(self.value, args))
        named = {key: self.value(value) for key, value in options.items()}
        return Call(name, values, named, node.meta["shape"], self.function(node))

    def function(self, node: fx.Node) -> Callable[..., Any]:
        target: Any = node.target
        match node.op:
            case "call_module":
                module = self.module.get_submodule(target)
                return lambda x, **_: module(x)
            case "call_method":
                return lambda x, *args, **options: getattr(x, target)(*args, **options)
        return target  # type: ignore[no-any-return]

    def value(self, argument: Any) -> Any:
        """Convert a tensor node to `Given`, and any other node to its value (None if unknown). Keep other arguments."""
        if isinstance(argument, fx.Node):
            dims: Any = self.dims.get(argument)
            shape = argument.meta["shape"]
            if shape is None:
                return argument.meta["value"]
            return [Given(d, s) for d, s in zip(dims, shape, strict=True)] if several(shape) else Given(dims, shape)
        if isinstance(argument, list | tuple):
            return type(argument)(map(self.value, argument))
        if isinstance(argument, slice):
            return slice(*map(self.value, (argument.start, argument.stop, argument.step)))
        return argument

    def in_shape(self, dims: Sequence[Dim], shape: Sequence[int]) -> Dims:
        """Return `dims`, but replace each axis whose length differs from `shape` by an axis that is never cut."""
        return tuple(dim if length(dim) == size else fixed(size) for dim, size in zip(dims, shape, strict=True))

    def mixed(self, node: fx.Node, call: Call) -> Any:
        """Pin the input channels of an operation that mixes channels, and return the axes of the output."""
        self.keep_all(node, *(dim for given in call.given for dim in given.dims))
        return None if node.meta["shape"] is None else ops.whole(node.meta["shape"])

    def keep_fixed(self, what: str, *dims: Dim) -> None:
        self.fixed += [what] if free(*dims) else []
        pin(*dims)

    def keep_all(self, node: fx.Node, *dims: Dim) -> None:
        if free(*dims):
            self.mixing.append(f"{node.target if node.op == 'call_module' else name_of(node)} in {place_of(node)}")
        pin(*dims)

    def channels_of_outputs(self, node: fx.Node, outputs: int) -> Channels | None:
        """Return the channels of the network's output. If these channels cannot be cut, pin them and return None."""
        output: Any = node.args[0]
        dim = resolved(self.dims[output][1])
        self.fixed += [f"the output layer {part.of.origin}" for part in dim if part.of.origin]
        if len(dim) == 1 and dim[0].repeat == 1 and dim[0].of.size == outputs and not dim[0].of.pinned:
            return dim[0].of
        pin(dim)
        return None


class Sizes(NamedTuple):
    """Attribute of a layer that stores a number of channels. The number is the length of `axis` divided by `each`."""

    attribute: str
    axis: Axis
    full: int
    each: int


class Derived(NamedTuple):
    layout: ParamLayout
    prunable: tuple[Prunable, ...]
    sizes: Mapping[str, tuple[Sizes, ...]]
    relus: Mapping[fx.Node, str]
    """Maps each ReLU to the name of the module that replaces the ReLU."""


def layout_of(flow: Flow, names: Sequence[str], outputs: int) -> Derived:
    """Return the layout and further properties of a network. `names` are the keys of the state dict, in order."""
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
    """Map all channels in use to group names. A group has the name of the layer that creates the channels."""
    called: dict[Channels, str] = {}
    for channels in free(*dims):
        taken = {*called.values(), HEAD}
        called[channels] = HEAD if channels is head else _new_name(channels.origin, f"{channels.origin}:", taken)
    return called


def _new_name(first: str, stem: str, taken: Iterable[str]) -> str:
    """Return `first` if the name is free, otherwise `stem` followed by the smallest free number from 2."""
    names = set(taken)
    return next(name for name in chain([first], (f"{stem}{n}" for n in count(2))) if name not in names)


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
    """Map each layer to the channels that it creates. Omit output layers and layers that create several groups."""
    owned = {}
    for path, layer in flow.layers.items():
        made = free(*layer.out[1:]) if layer.weights else []
        governed = free(*(dim for dims in layer.weights.values() for dim in dims))
        outputs = HEAD in {called.get(channels) for channels in (*made, *governed)}
        if len(made) == 1 and made[0] in called and made[0] in governed and not outputs:
            owned[path] = made[0]
    return owned


def _relus(flow: Flow, owned: Mapping[str, Channels]) -> dict[fx.Node, str]:
    """Map each ReLU to the name of a new module in the last preceding layer that creates the ReLU's channels, so that
    the ReLU's zeros count for this layer. If the channels belong to several groups, add the module to the network."""
    relus: dict[fx.Node, str] = {}
    for node, before in flow.relus:
        over = free(*flow.dims[node])
        makers = [path for path in before if len(over) == 1 and owned.get(path) is over[0]]
        stem = f"{makers[-1]}.relu" if makers else "relu_of_several"
        relus[node] = _new_name(stem, stem, relus.values())
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


def replace_written_sizes(name: str, traced: Traced, flow: Flow) -> None:
    """Replace hard-coded sizes in a forward, such as `view(-1, 512)` or `expand(8, 64, 1, 1)`, by -1 or by sizes of the
    input, so that the forward works for any sub-model. Replace `view` by `reshape`, because maps are stored channels
    last.

    Raises ModelError if a size cannot be replaced.
    """
    for node in list(traced.graph.nodes):
        called = name_of(node) if node.op in ("call_method", "call_function") else ""
        given = node.args[0] if node.args else None
        if called not in ("view", "reshape", "expand") or not isinstance(given, fx.Node) or not node.args[1:]:
            continue
        if node.meta["shape"] is None:
            continue
        packed = isinstance(node.args[1], tuple | list)
        sizes = list(node.args[1] if packed else node.args[1:])
        out, old = flow.dims[node], flow.dims[given]
        if called == "expand":
            sizes = [-1 if free(dim) and isinstance(n, int) else n for dim, n in zip(out, sizes, strict=True)]
        else:
            _replace_sizes(name, traced, node, sizes, old, out)
            if node.target == "view":
                node.target = "reshape"
        node.args = (given, tuple(sizes)) if packed else (given, *sizes)


def _replace_sizes(name: str, traced: Traced, node: fx.Node, sizes: list[Any], old: Any, out: Any) -> None:
    """Replace the sizes of a reshape in the list `sizes`, so that the reshape works for any width."""

    def size(axis: int) -> fx.Node:
        """Return a node that computes the size of an input axis of the reshape."""
        with traced.graph.inserting_before(node):
            return traced.graph.call_method("size", (node.args[0], axis))

    for place, dim in enumerate(out):
        if not free(dim) or not isinstance(sizes[place], int) or sizes[place] == -1:
            continue
        same = next((axis for axis, given in enumerate(old) if resolved(given) == resolved(dim)), None)
        if same is not None:
            sizes[place] = size(same)
        elif -1 not in sizes:
            sizes[place] = -1
        elif sizes[0] == -1 and resolved(old[0]) == resolved(out[0]):  # the batch
            sizes[0], sizes[place] = size(0), -1
        else:
            other = sizes.index(-1)
            if free(out[other]) or other == 0:
                why = f"hard-codes the size {sizes[place]} in {name_of(node)}, which cannot be replaced by -1"
                raise cannot_cut(name, f"{place_of(node)} {why}")
            sizes[other], sizes[place] = node.meta["shape"][other], -1
