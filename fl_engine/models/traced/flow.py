"""Follows the channels through a graph: the layers that share them, and the operations that would mix them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fl_engine.core.errors import ModelError, nearest
from fl_engine.models.traced import operations as ops
from fl_engine.models.traced import rules
from fl_engine.models.traced.channels import Channels, Dim, fixed, free, length, made, pin, resolved
from fl_engine.models.traced.errors import cannot_cut, path_of, place_of
from fl_engine.models.traced.graph import Traced, attribute, name_of
from fl_engine.models.traced.layers import Dims, Layer, known, tied
from fl_engine.models.traced.operations import Call, Given, Mixes

RELUS = ("relu", "relu_", "relu6")


@dataclass
class Flow:
    layers: dict[str, Layer] = field(default_factory=dict)
    """By path, in the order of their first use."""
    params: dict[str, Dims] = field(default_factory=dict)
    """Parameters that the forward uses itself."""
    relus: list[tuple[fx.Node, tuple[str, ...]]] = field(default_factory=list)
    """The ReLUs, each with the layers used before it."""
    dims: dict[fx.Node, Any] = field(default_factory=dict)
    """Each node's axes; a tuple of these for several outputs, None if it is not a tensor."""
    head: Channels | None = None
    """The channels of the outputs."""


def follow(name: str, traced: Traced, outputs: int, pins: Sequence[str]) -> Flow:
    """Raises ModelError for the first operation that mixes channels which are not pinned."""
    walk = _Walk(name, traced, pins)
    for node in traced.graph.nodes:
        walk.flow.dims[node] = walk.visit(node)
    walk.finish(outputs)
    return walk.flow


class _Walk:
    def __init__(self, name: str, traced: Traced, pins: Sequence[str]) -> None:
        self.name, self.module, self.flow = name, traced.module, Flow()
        paths = [path for path, _ in traced.module.named_modules() if path]
        for each in pins:
            if each not in paths:
                raise ModelError(f"{name}: pin has the module {each!r}, which does not exist{nearest(each, paths)}")
        self.pins = tuple(pins)
        self.trouble: list[tuple[fx.Node, str, tuple[Dim, ...], tuple[Dim, ...]]] = []
        """Operations that mix channels, which is an error unless they are pinned in the end: the node, the reason, the
        channels, and the axes of its output (`mixed`)."""
        self.output: fx.Node | None = None

    def pinned(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}.") for each in self.pins)

    def visit(self, node: fx.Node) -> Any:
        match node.op:
            case "placeholder":
                return ops.whole(node.meta["shape"]) if node.meta["shape"] is not None else None
            case "get_attr":
                return self.parameter(node)
            case "output":
                self.output = node
                return None
            case "call_module":
                return self.call_module(node)
        return self.operation(node, name_of(node), node.args, dict(node.kwargs))

    def parameter(self, node: fx.Node) -> Any:
        path, shape = str(node.target), node.meta["shape"]
        if shape is None or not isinstance(attribute(self.module, path), nn.Parameter):
            return None if shape is None else ops.whole(shape)
        if path not in self.flow.params:
            self.flow.params[path] = tuple(made(size, path, loose=True) for size in shape)
            if self.pinned(path) or not attribute(self.module, path).requires_grad:
                pin(*self.flow.params[path])
        return self.flow.params[path]

    # ------------------------------------------------------------------------------------------------- modules
    def call_module(self, node: fx.Node) -> Any:
        path = str(node.target)
        module = self.module.get_submodule(path)
        kind = type(module).__name__
        if kind in rules.MODULES and not any(True for _ in module.parameters()):
            return self.operation(node, rules.MODULES[kind], node.args, {})
        if kind in rules.SOFTMAX:
            options = {"dim": module.dim if module.dim is not None else 1}
            return self.operation(node, rules.SOFTMAX[kind], node.args, options)
        rule, x = known(module), self.value(node.args[0]) if node.args else None
        if rule is None or not isinstance(x, Given):
            return self.unknown_layer(node, path, module)
        layer = rule(module, path, x.dims)
        if path in self.flow.layers:
            tied(self.flow.layers[path], layer)
        self.flow.layers.setdefault(path, layer)
        parts = (*x.dims, *layer.out, *(dim for dims in layer.weights.values() for dim in dims))
        frozen = [n for n, p in module._parameters.items() if p is not None and not p.requires_grad]
        pin(*(dim for n in frozen for dim in layer.weights[n]))
        if self.pinned(path):
            pin(*parts)
        if layer.trouble is not None:
            self.refuse(node, *layer.trouble)
        if layer.state is not None:
            return self.series(node, layer)
        return self.in_shape(layer.out, node)

    def series(self, node: fx.Node, layer: Layer) -> Any:
        """The axes of an LSTM's outputs and of its last states, whose last axis has the units."""
        if len(node.args) > 1:
            self.refuse(node, "gets an initial state (leave it out if it is zero)", layer.out)
        state = layer.state
        assert state is not None

        def of(shape: Any) -> Any:
            return tuple(map(of, shape)) if isinstance(shape[0], tuple) else (*ops.whole(shape[:-1]), state)

        out, last = node.meta["shape"]
        return self.in_shape(layer.out, out), of(last)

    def unknown_layer(self, node: fx.Node, path: str, module: nn.Module) -> Any:
        weights = {name: ops.whole(tuple(p.shape)) for name, p in module.state_dict(keep_vars=True).items()}
        self.flow.layers.setdefault(path, Layer(weights, {}, ()))
        kind = type(module).__name__
        why = rules.REASONS.get(rules.MODULES.get(kind, ""), f"is a {kind}, which is not supported")
        given = ops.every(self.call(node, kind, node.args, dict(node.kwargs)))
        if self.pinned(path):
            pin(*given)
        return self.mixed(node, why, given)

    # ---------------------------------------------------------------------------------------------- operations
    def operation(self, node: fx.Node, name: str, args: Any, options: dict[str, Any]) -> Any:
        shape, call = node.meta["shape"], self.call(node, name, args, options)
        if name == "getitem" and not isinstance(self.value(args[0]), Given):
            found = self.flow.dims.get(args[0])
            if found is None and shape is not None:  # one of several outputs, some of which are not tensors
                why, dims = next(((why, dims) for of, why, dims, _ in self.trouble if of is args[0]), ("", ()))
                return self.mixed(node, why, dims)
            return found[args[1]] if isinstance(found, tuple) and isinstance(args[1], int | slice) else None
        if shape is None or not any(True for _ in call.given):
            return None if shape is None else ops.whole(shape)
        if self.pinned(path_of(node)):
            pin(*ops.every(call))
        if name in RELUS:
            self.flow.relus.append((node, tuple(self.flow.layers)))
        rule = rules.RULES.get(name if node.target is not operator.getitem else "getitem", rules.unknown)
        try:
            found = rule(call)
        except TypeError:  # an axis is a tensor, whose value is not known here
            found = rules.unknown(call)
        if isinstance(found, Mixes):
            return self.mixed(node, found.why, found.dims)
        if shape and isinstance(shape[0], tuple):
            return tuple(self.in_shape(each, of) for each, of in zip(found, shape, strict=True))  # type: ignore[arg-type]
        return self.in_shape(found, shape)

    def call(self, node: fx.Node, name: str, args: Any, options: dict[str, Any]) -> Call:
        return Call(
            name, tuple(map(self.value, args)), {k: self.value(v) for k, v in options.items()}, node.meta["shape"]
        )

    def value(self, argument: Any) -> Any:
        """A tensor as `Given`, another node as its number or None, and anything else unchanged."""
        if isinstance(argument, fx.Node):
            dims: Any = self.flow.dims.get(argument)
            shape = argument.meta["shape"]
            if shape is None:
                return argument.meta["value"]
            return [Given(d, s) for d, s in zip(dims, shape, strict=True)] if _several(shape) else Given(dims, shape)
        if isinstance(argument, list | tuple):
            return type(argument)(map(self.value, argument))
        if isinstance(argument, slice):
            return slice(*map(self.value, (argument.start, argument.stop, argument.step)))
        return argument

    def in_shape(self, dims: Sequence[Dim], node: Any) -> Dims:
        """The axes, with the output's sizes for those that are not channels."""
        shape = node.meta["shape"] if isinstance(node, fx.Node) else node
        pairs = list(zip(dims, shape, strict=True))
        return tuple(dim if length(dim) == size else fixed(size) for dim, size in pairs)

    def refuse(self, node: fx.Node, why: str, dims: Sequence[Dim], out: Sequence[Dim] = ()) -> None:
        pin(*((part,) for dim in dims for part in resolved(dim) if part.of.loose))
        self.trouble.append((node, why, tuple(dims), tuple(out)))

    def mixed(self, node: fx.Node, why: str, dims: Sequence[Dim]) -> Any:
        """The axes of an output that mixes these channels. If an input has free channels at a place, the output's axis
        is free there, too: a fixed axis would pin the channels that it is added to, and nothing would be refused."""
        shape, opened, known = node.meta["shape"], list[Dim](), self.flow.dims
        # If some of several outputs are not tensors, only their inputs are known.
        given = [n for each in node.all_input_nodes for n in ([each] if known.get(each) else each.all_input_nodes)]
        inputs: Any = [known[n] for n in given if known.get(n) and not _several(n.meta["shape"])]

        def axis(place: int, size: int) -> Dim:
            alike = [of[place] for of in inputs if place < len(of) and length(of[place]) == size]
            if not free(*alike):
                return fixed(size)
            opened.append(made(size, path_of(node)))
            return opened[-1]

        out = None if shape is None else ops.whole(shape, axis)
        self.refuse(node, why, dims, opened)
        return out

    # --------------------------------------------------------------------------------------------------- end
    def finish(self, outputs: int) -> None:
        assert self.output is not None
        answer = self.output.args[0]
        assert isinstance(answer, fx.Node)
        dim = resolved(self.flow.dims[answer][1])
        if len(dim) == 1 and dim[0].repeat == 1 and dim[0].of.size == outputs and not dim[0].of.pinned:
            self.flow.head = dim[0].of
        else:
            pin(dim)
        for node, why, dims, out in self.trouble:
            cut = [channels for channels in free(*dims) if channels is not self.flow.head]
            if cut:
                raise cannot_cut(self.name, f"{place_of(node)} {why}", self.pinning(node, cut))
            pin(*out)
        loose = [c for dims in self.flow.params.values() for c in free(*dims) if c.loose]
        for channels in loose:
            channels.pinned = True

    def pinning(self, node: fx.Node, cut: Sequence[Channels]) -> list[str]:
        """The modules to pin so that these channels are not cut: the node's own, else those that make them."""
        if node.op == "call_module" and str(node.target) in dict(self.module.named_modules()):
            return [str(node.target)]
        modules = {path for path, _ in self.module.named_modules() if path}
        path = path_of(node)
        return [path] if path else list(dict.fromkeys(c.origin for c in cut if c.origin in modules))


def _several(shape: Any) -> bool:
    return bool(shape) and isinstance(shape[0], tuple)
