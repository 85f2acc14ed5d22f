"""Trace a module's forward in training and in evaluation mode. The graphs of both modes must be identical. This module
also creates error messages about user code, with the line, the reason and the fix."""

from __future__ import annotations

import builtins
import copy
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.seeds import drawn
from fl_engine.models.traced.layers import is_torchs

DROPOUTS = {
    "dropout": nn.Dropout, "dropout1d": nn.Dropout1d, "dropout2d": nn.Dropout2d, "dropout3d": nn.Dropout3d,
    "alpha_dropout": nn.AlphaDropout, "feature_alpha_dropout": nn.FeatureAlphaDropout,
}  # fmt: skip
"""Modules that replace dropout functions. A trace would record the functions' argument `training` as a constant."""

BRANCH_DROPS = ("StochasticDepth", "DropPath")
"""Classes in torchvision and timm that drop whole branches in training. These classes do not mix channels."""
OF_SHAPE = ("shape", "size", "dim", "ndim", "ndimension", "numel", "len", "dtype", "device", "is_cuda")
"""Operations whose result depends on the shape, type or device of a tensor, but not on the values."""
ZEROS = ("zeros", "zeros_like", "new_zeros")
SAME_VALUES = ("to", "cuda", "type_as", "float", "double", "contiguous", "clone", "detach", "requires_grad_")
BATCHES = (2, 1)
"""Additional batch sizes. A condition on a shape is traced only if its result is the same for all batch sizes."""


@dataclass(frozen=True)
class Traced:
    """Copy of the user's module, in which modules replace dropout functions, and the graph of the copy's forward.
    `meta["shape"]` of a node is the shape of the output, a tuple of shapes for several outputs, or None if the output
    is not a tensor."""

    module: nn.Module
    graph: fx.Graph


class _Tracer(fx.Tracer):
    """Tracer that computes shapes for samples x (B, ...), and can therefore trace `if x.dim() == 3`."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._batches = [x, *(x[:size] for size in BATCHES)]
        self._runs = False
        """True while `known` runs the graph. The calls of this run must not be added to the graph."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        # Do not let torch.fx record the source line, because torch.fx would import torch's compiler.
        node.meta["line"] = _innermost(reversed(list(traceback.walk_stack(None))))
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_torchs(m) or (type(m).__name__ in BRANCH_DROPS and not any(True for _ in m.parameters()))

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._runs else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._runs else super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: Any) -> bool:
        value = self.known(obj.node, bool)
        return super().to_bool(obj) if value is None else value

    def known(self, node: fx.Node, function: Callable[[Any], Any]) -> Any:
        """Return `function(value of the node)`; None if the result depends on more than the shape of one sample."""
        if not _is_of_shape(node):
            return None
        self._runs = True
        try:
            root = copy.deepcopy(self.root).eval()
            runs = [fx.Interpreter(fx.GraphModule(root, self.graph), False) for _ in self._batches]
            with torch.no_grad():
                for run, x in zip(runs, self._batches, strict=True):
                    run.run(x)
        except Exception:  # User code may raise any error.
            return None
        finally:
            self._runs = False
        found = {function(run.env[node]) for run in runs}
        return found.pop() if len(found) == 1 else None


class _Proxy(fx.Proxy):
    def __getattr__(self, k: str) -> Any:
        return _Attribute(self, k)


class _Attribute(fx.proxy.Attribute, _Proxy):
    pass


TRUE_LEN = len


def _length(value: Any) -> Any:
    """Replace `len` during a trace, because torch.fx cannot record `len(x)`."""
    if not isinstance(value, _Proxy):
        return TRUE_LEN(value)
    tracer: Any = value.tracer
    length = tracer.known(value.node, TRUE_LEN)
    return tracer.create_proxy("call_function", TRUE_LEN, (value,), {}) if length is None else length


def _is_of_shape(value: Any) -> bool:
    """Return whether a node is computed only from the shapes of tensors."""
    if name_of(value) == "getattr" or name_of(value) in OF_SHAPE:
        return (value.args[1] if name_of(value) == "getattr" else name_of(value)) in OF_SHAPE
    return bool(value.all_input_nodes) and all(map(_is_of_shape, value.all_input_nodes))


def name_of(node: fx.Node) -> str:
    """Return the name of the node's function or method, without the underscores around operator names."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.strip("_") if name.startswith("__") else name


def trace(name: str, module: nn.Module, x: Tensor) -> Traced:
    """Trace the module with samples x (B, ...). Raises ModelError if the forward cannot be traced."""
    training, evaluation = (_traced(name, module, x, mode) for mode in (True, False))
    _check_same(name, training.graph, evaluation.graph)
    _own_dropouts(name, training, evaluation)
    with torch.no_grad():
        _Shapes(fx.GraphModule(evaluation.module, evaluation.graph).eval()).run(x)
    return evaluation


def _traced(name: str, module: nn.Module, x: Tensor, training: bool) -> Traced:
    own = copy.deepcopy(module).train(training)
    own.__class__ = _of_one_input(type(own))
    before = drawn()
    try:
        builtins.len = _length
        graph = _Tracer(x).trace(own)
    except Exception as error:  # User code may raise any error if it gets a proxy instead of a tensor.
        said = " ".join(str(error).split())
        why = f"its forward{line_of_error(error)} depends on values, or calls code that torch.fx cannot trace"
        raise cannot_cut(name, f"{why} ({type(error).__name__}: {said})") from error
    finally:
        builtins.len = TRUE_LEN
    if moved := [each for each, state in drawn().items() if state != before[each]]:
        why = f"its forward draws from {moved[0]}'s generator outside the trace (use torch.rand_like(x) without `if`)"
        raise cannot_cut(name, why)
    for node in graph.nodes:
        if node.op == "get_attr" and not getattr(attribute(own, str(node.target)), "is_leaf", True):
            why = "computes with a parameter that is not read as an attribute, such as self.weight"
            raise cannot_cut(name, f"{place_of(node)} {why}")
    for node in graph.nodes:  # layer(input=x)
        if node.op == "call_module" and not node.args and "input" in node.kwargs:
            options = dict(node.kwargs)
            node.args, node.kwargs = (options.pop("input"),), options
        recurrent = node.op == "call_module" and isinstance(own.get_submodule(str(node.target)), nn.RNNBase)
        if recurrent and _is_zero((*node.args[1:], *node.kwargs.values())):
            node.args, node.kwargs = node.args[:1], {}  # The layer's initial state is zero by default.
    return Traced(own, graph)


def _is_zero(value: Any) -> bool:
    """Return whether an argument is a node that creates zeros, or a list of such nodes."""
    if not isinstance(value, fx.Node):
        return isinstance(value, tuple | list) and all(map(_is_zero, value))
    return name_of(value) in ZEROS or (name_of(value) in SAME_VALUES and _is_zero(value.args[0]))


def _of_one_input(kind: Any) -> Any:
    """Return a subclass whose forward has only one input. A trace would treat optional inputs as tensors."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        return kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward})


def _check_same(name: str, training: fx.Graph, evaluation: fx.Graph) -> None:
    def call(node: fx.Node) -> tuple[Any, ...]:
        flag = {"training"} if name_of(node) in DROPOUTS else set()
        options = {key: value for key, value in node.kwargs.items() if key not in flag}
        return node.op, str(node.target), repr(node.args), repr(options)

    for one, other in zip_longest(training.nodes, evaluation.nodes):
        if one is None or other is None or call(one) != call(other):
            why = "differs between training and evaluation (use modules such as nn.Dropout instead)"
            raise cannot_cut(name, f"{place_of(one or other)} {why}")


def _own_dropouts(name: str, training: Traced, evaluation: Traced) -> None:
    """Replace each call of a function in `DROPOUTS` by a module, which is active only in training."""
    count = 0
    for before, node in zip(training.graph.nodes, evaluation.graph.nodes, strict=True):
        kind = DROPOUTS.get(name_of(node))
        if node.op != "call_function" or kind is None or getattr(F, name_of(node), None) is not node.target:
            continue
        flags = before.kwargs.get("training"), node.kwargs.get("training")
        if flags != (True, False):
            when = "also in evaluation" if flags[1] else "never"
            raise unusable(f"{name}: {place_of(node)} drops values {when}. Pass training=self.training to F.dropout")
        count += 1
        target = unused(evaluation.module, f"dropout_{count}")
        evaluation.module.add_module(target, kind(node.kwargs.get("p", 0.5)))
        becomes(node, target)


def becomes(node: fx.Node, target: str) -> None:
    """Change the node to a call of the module `target`."""
    node.op, node.target, node.args, node.kwargs = "call_module", target, node.args[:1], {}


def unused(module: nn.Module, name: str) -> str:
    """Append underscores to the name until the module has no attribute with this name."""
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


def attribute(module: nn.Module, path: str) -> Any:
    holder, _, leaf = path.rpartition(".")
    return getattr(module.get_submodule(holder), leaf)


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

WHOLE_MODEL = "choose an algorithm that sends the whole model, such as fedavg"
UNTRACED = (
    "torch.fx does not record torch.no_grad(), torch.autocast, autograd.Function, module hooks and changes of module "
    f"attributes. Use x.detach() instead, or {WHOLE_MODEL} (docs/guides/own-networks.md)"
)
UNBOUND = (
    "Copies of the module must use their own weights: the forward must read parameters and buffers as attributes of "
    "modules, and must change buffers in place"
)


def place_of(node: Any) -> str:
    """Return the path of the module whose forward contains the node, followed by file and line."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    return f"{path or 'its forward'}{node.meta.get('line', '')}"


def line_of_error(error: BaseException) -> str:
    return _innermost(traceback.walk_tb(error.__traceback__))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return ` (net.py:12)` for the innermost frame in the user's code, or an empty string."""
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    own = [f" ({Path(file).name}:{line})" for file, line in places if not file.startswith(_OURS)]
    return own[-1] if own else ""


def cannot_cut(network: str, why: str) -> ModelError:
    text = f"{network} cannot be cut into sub-models: {why}; {WHOLE_MODEL}"
    return ModelError(text, code="model.uncut", path="model.name")


def failed(name: str, what: str, error: Exception) -> ModelError:
    """Return a ModelError for an exception that user code raised."""
    said = " ".join(str(error).split()) or type(error).__name__
    return unusable(f"{name} {what}{line_of_error(error)}: {type(error).__name__}: {said}")


def unusable(text: str) -> ModelError:
    return ModelError(text, code="model.untrainable", path="model.name")
