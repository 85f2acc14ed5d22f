"""The graph of a module's forward: traced in training and in evaluation, which have to agree."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.seeds import drawn
from fl_engine.models.traced.errors import cannot_cut, line_now, line_of_error, place_of
from fl_engine.models.traced.layers import is_torchs

DROPOUTS = {
    "dropout": nn.Dropout, "dropout1d": nn.Dropout1d, "dropout2d": nn.Dropout2d, "dropout3d": nn.Dropout3d,
    "alpha_dropout": nn.AlphaDropout, "feature_alpha_dropout": nn.FeatureAlphaDropout,
}  # fmt: skip
"""The modules of functions with an argument `training`, whose value a trace would freeze."""


@dataclass(frozen=True)
class Traced:
    """`module` has the weights, and a further module for each function that became one; `graph` is of its forward. Each
    node has the shape of its output in `meta["shape"]`: a tuple of shapes for several outputs, None if it is not a
    tensor."""

    module: nn.Module
    graph: fx.Graph


class _Tracer(fx.Tracer):
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_now()  # torch's own record of it would import its compiler
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_torchs(m)


def name_of(node: fx.Node) -> str:
    """The name of a function or method, without the underscores of an operator."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.strip("_") if name.startswith("__") else name


def trace(name: str, module: nn.Module, x: Tensor) -> Traced:
    """The graph for samples x (B, ...). Raises ModelError if the forward cannot be traced."""
    training, evaluation = (_traced(name, module, mode) for mode in (True, False))
    _same(name, training.graph, evaluation.graph)
    _own_dropouts(name, training, evaluation)
    _shapes(evaluation, x)
    return evaluation


def _traced(name: str, module: nn.Module, training: bool) -> Traced:
    own = copy.deepcopy(module).train(training)
    own.__class__ = _of_one_input(type(own))
    before = drawn()
    try:
        with _traced_len(own):
            graph = _Tracer().trace(own)
    except Exception as error:  # a TraceError, or an error of the user's code about a proxy
        said = " ".join(str(error).split())
        why = f"its forward{line_of_error(error)} depends on values, or calls what torch.fx cannot trace"
        raise cannot_cut(name, f"{why} ({type(error).__name__}: {said})") from error
    if moved := [each for each, state in drawn().items() if state != before[each]]:
        raise cannot_cut(
            name,
            f"its forward draws from {moved[0]}'s generator apart from what is traced, so the number would stay the "
            "same in all rounds. Let it follow from the samples, such as torch.rand_like(x), and decide by it in "
            "tensors, not by `if`",
        )
    for node in graph.nodes:  # layer(input=x)
        if node.op == "call_module" and not node.args and "input" in node.kwargs:
            options = dict(node.kwargs)
            node.args, node.kwargs = (options.pop("input"),), options
    return Traced(own, graph)


@contextmanager
def _traced_len(module: nn.Module) -> Iterator[None]:
    """Let `len(x)` in the forwards of these modules be `x.size(0)`, which can be traced."""

    def traced(x: Any) -> Any:
        return x.size(0) if isinstance(x, fx.Proxy) else len(x)

    forwards: list[Any] = [kind.__dict__.get("forward") for each in module.modules() for kind in type(each).__mro__]
    scopes = {id(f.__globals__): f.__globals__ for f in forwards if hasattr(f, "__globals__")}
    changed = [scope for scope in scopes.values() if "len" not in scope]
    for scope in changed:
        scope["len"] = traced
    try:
        yield
    finally:
        for scope in changed:
            del scope["len"]


def _of_one_input(kind: Any) -> Any:
    """The class without its optional inputs, which a trace would treat as tensors."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        return kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward})


def _said(node: fx.Node) -> tuple[Any, ...]:
    """What must be equal in training and in evaluation."""
    options = dict(node.kwargs)
    if name_of(node) in DROPOUTS:
        options.pop("training", None)
    return node.op, str(node.target), repr(node.args), repr(options)


def _same(name: str, training: fx.Graph, evaluation: fx.Graph) -> None:
    pairs = list(zip(training.nodes, evaluation.nodes, strict=False))
    odd = next((t for t, e in pairs if _said(t) != _said(e)), None)
    if odd is None and len(training.nodes) != len(evaluation.nodes):
        odd = pairs[-1][0]
    if odd is not None:
        why = "does something else in training than in evaluation (use modules, such as nn.Dropout, for that)"
        raise cannot_cut(name, f"{place_of(odd)} {why}")


def _own_dropouts(name: str, training: Traced, evaluation: Traced) -> None:
    """Replace each call of F.dropout and its like by a module, which drops in training only."""
    count = 0
    for before, node in zip(training.graph.nodes, evaluation.graph.nodes, strict=True):
        kind = DROPOUTS.get(name_of(node))
        if node.op != "call_function" or kind is None or getattr(F, name_of(node), None) is not node.target:
            continue
        flags = before.kwargs.get("training"), node.kwargs.get("training")
        if flags != (True, False):
            when = "in evaluation too" if flags[1] else "never"
            raise ModelError(f"{name}: {place_of(node)} drops {when}: give F.dropout training=self.training")
        count += 1
        target = unused(evaluation.module, f"dropout_{count}")
        evaluation.module.add_module(target, kind(node.kwargs.get("p", 0.5)))
        becomes(node, target)


def becomes(node: fx.Node, target: str) -> None:
    """Let the node call this module instead."""
    node.op, node.target, node.args, node.kwargs = "call_module", target, node.args[:1], {}


def unused(module: nn.Module, name: str) -> str:
    """This name, or a similar one that the module does not have."""
    while hasattr(module, name):
        name += "_"
    return name


class _Shapes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        n.meta["shape"] = _shape(out)
        n.meta["value"] = out if isinstance(out, int | float | bool | str | torch.dtype | torch.device) else None
        return out


def _shape(out: Any) -> Any:
    if isinstance(out, Tensor):
        return tuple(out.shape)
    if isinstance(out, tuple | list) and out and all(isinstance(each, Tensor | tuple) for each in out):
        shapes = tuple(_shape(each) for each in out)
        return shapes if all(shape is not None for shape in shapes) else None
    return None


def _shapes(traced: Traced, x: Tensor) -> None:
    module = fx.GraphModule(traced.module, traced.graph).eval()
    with torch.no_grad():
        _Shapes(module).run(x)


def attribute(module: nn.Module, path: str) -> Any:
    holder, _, leaf = path.rpartition(".")
    return getattr(module.get_submodule(holder), leaf)
