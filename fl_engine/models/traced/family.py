"""A user's module as a `ModelFamily`: what is found out about it once, and its sub-networks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fl_engine.core.costs import COUNTED
from fl_engine.core.errors import ModelError
from fl_engine.core.seeds import drawing
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Params, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import check_spec
from fl_engine.models.traced import errors, graph, skeleton, verify
from fl_engine.models.traced.flow import follow
from fl_engine.models.traced.layout import Sizes, derived
from fl_engine.models.traced.reshapes import with_any_width
from fl_engine.models.traced.user_module import Build, failed, new
from fl_engine.models.traced.wrapper import surround

BATCH = 3
"""Samples of the made-up batch with which a module is tried."""


@dataclass(frozen=True)
class ModuleFamily:
    """The network that `build` makes; `from_module` makes the class."""

    input_shape: tuple[int, ...]
    """Of one sample."""
    outputs: int
    whole: bool = False
    """Train the network as it is, so that it can be any module. It then has no sub-models. Algorithms that send the
    whole model do so without this option."""
    pin: tuple[str, ...] = ()
    """Modules, by their path, all of whose channels every sub-model keeps, with those of the modules inside."""

    build: ClassVar[tuple[Build]]

    def __post_init__(self) -> None:
        vocabulary = found(self).vocabulary
        if vocabulary is not None:  # then it is one that `TakesTokens`
            object.__setattr__(self, "vocabulary", vocabulary)

    def layout(self) -> ParamLayout:
        return found(self).layout

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, ...) -> (B, outputs)."""
        about = found(self)
        check_spec(about.layout, spec)
        module = about.empty(spec)
        if torch.empty(0).device.type != "meta":
            module.load_state_dict(take(self._first(), about.layout, spec), assign=True)
        return module

    def prunable(self) -> tuple[Prunable, ...]:
        return found(self).prunable

    def weights(self) -> Params:
        """Those of a module that was given, from which a run starts; empty where a class or function makes fresh
        ones."""
        return self._first() if isinstance(self.build[0], nn.Module) else {}

    def _first(self) -> Params:
        about, made = found(self), new(self.build[0], self.input_shape, self.outputs)
        state = made.state_dict()
        for name, shape in about.shapes.items():
            if name not in state or state[name].shape != shape:
                raise ModelError(f"{type(self).__name__} makes another network each time: {name} is not as before")
        return {name: state[name].detach().clone() for name in about.layout.slots}

    def __reduce__(self) -> tuple[Any, ...]:
        from fl_engine.models.traced import rebuilt

        return rebuilt, (self.build[0], self.input_shape, self.outputs, self.whole, self.pin)


@dataclass(frozen=True)
class Found:
    """What is known about a module for samples of one shape. `skeleton` has no storage but for `kept`, which all copies
    share; `sizes` are the attributes of its layers that follow a sub-model's widths."""

    layout: ParamLayout
    prunable: tuple[Prunable, ...]
    vocabulary: int | None
    skeleton: nn.Module
    kept: tuple[Tensor, ...]
    sizes: Mapping[str, tuple[Sizes, ...]]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.skeleton.state_dict().items()}

    def empty(self, spec: SubmodelSpec) -> nn.Module:
        """The sub-network without storage."""
        return skeleton.narrowed(self.skeleton, self.layout, self.sizes, spec, self.kept, self.layout.slots)


@lru_cache(maxsize=32)
def found(family: ModuleFamily) -> Found:
    """Raises ModelError for a module that cannot be trained, or not be cut where it is to be."""
    name = type(family).__name__
    elsewhere = torch.empty(0).device.type != "cpu"
    with drawing(0, torch.device("cpu")), torch.device("cpu") if elsewhere else nullcontext():
        module = new(family.build[0], family.input_shape, family.outputs)
        tried = _tried(name, module, family.input_shape, family.outputs)
        if family.whole:
            return _whole(name, module, tried, family)
        return _cut(name, module, tried, family)


@dataclass(frozen=True)
class _Tried:
    """`x`: a made-up batch; `changing`: the buffers that training changes; `draws`: whether training draws from torch's
    generator other than by nn.Dropout."""

    x: Tensor
    vocabulary: int | None
    changing: frozenset[str]
    draws: bool


def _tried(name: str, module: nn.Module, input_shape: tuple[int, ...], outputs: int) -> _Tried:
    if not all(isinstance(n, int) and n > 0 for n in input_shape) or outputs < 1:
        raise ModelError(f"{name}: samples and outputs have positive sizes, got {input_shape} and {outputs}")
    graph.check_inputs(name, module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(f"{name} has no weights to train: a parameter with requires_grad=True is expected")
    for path, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ModelError(
                    f"{name}: {f'{path}.{attribute}'.lstrip('.')} is computed from other weights when the network is "
                    "made, as by torch.nn.utils.weight_norm, so no copy of it can be trained: "
                    "torch.nn.utils.parametrizations has forms that compute it in each forward"
                )
    if hooked := [path for path, p in module.named_parameters() if _has_hooks(p)]:
        raise ModelError(
            f"{name}: the parameter {hooked[0]} has a hook (register_hook), which copies of the network would lose. "
            "Change the gradient in forward with a torch.autograd.Function, or mask the parameter with "
            "torch.nn.utils.parametrize"
        )
    by_identity: dict[int, str] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        other = by_identity.setdefault(id(parameter), path)
        if other != path:
            raise ModelError(
                f"{name} ties the parameters {other} and {path}: sub-models and averages take each by its own name; "
                "give each its own"
            )
    vocabulary = _vocabulary(module, torch.zeros(BATCH, *input_shape, dtype=torch.int64))
    x = torch.randn(BATCH, *input_shape) if vocabulary is None else torch.randint(vocabulary, (BATCH, *input_shape))
    own = _without_dropout(module)
    try:
        with torch.no_grad():
            out = own.eval()(x)
        before = {path: buffer.clone() for path, buffer in own.named_buffers()}
        state = torch.get_rng_state()
        answer = own.train()(x)
        draws = not torch.equal(state, torch.get_rng_state())
        if isinstance(answer, Tensor) and answer.requires_grad:
            answer.square().sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # of somebody else's code
        raise failed(name, f"cannot take a batch {tuple(x.shape)} of {str(x.dtype)[6:]}", error) from error
    if not isinstance(out, Tensor) or not isinstance(answer, Tensor):
        raise ModelError(f"{name} gives {type(out).__name__}, a tensor (B, {outputs}) is expected")
    if tuple(out.shape[:2]) != (BATCH, outputs):
        raise ModelError(
            f"{name} gives {tuple(out.shape)} for a batch of {BATCH} samples {input_shape}, ({BATCH}, {outputs}) is "
            "expected: the data have as many outputs; a keyword `outputs` or `num_classes` gets them"
        )
    idle = [path for path, p in own.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise ModelError(
            f"{name}: the loss does not depend on {', '.join(idle[:4])}: leave out what is not used, or freeze it with "
            "requires_grad_(False)"
        )
    changing = {path for path, buffer in own.named_buffers() if not torch.equal(buffer, before[path])}
    return _Tried(x, vocabulary, frozenset(changing), draws)


def _without_dropout(module: nn.Module) -> nn.Module:
    """A copy whose nn.Dropout layers, which have generators of their own in training, draw nothing."""
    own = copy.deepcopy(module)
    for layer in own.modules():
        if type(layer) is nn.Dropout:
            layer.p = 0.0
    return own


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _draws(traced: graph.Traced, x: Tensor) -> bool:
    """As `_Tried.draws`, of a graph, in which F.dropout has become a module."""
    own, state = _without_dropout(fx.GraphModule(traced.module, traced.graph)).train(), torch.get_rng_state()
    with torch.no_grad():
        own(x)
    return not torch.equal(state, torch.get_rng_state())


def _vocabulary(module: nn.Module, tokens: Tensor) -> int | None:
    """How many tokens there are, where the module looks its input up in an embedding; None: it takes numbers."""
    sizes: list[int] = []

    def look(layer: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].data_ptr() == tokens.data_ptr():
            sizes.append(int(layer.num_embeddings))  # type: ignore[arg-type]

    own = copy.deepcopy(module).eval()
    embeddings = [layer for layer in own.modules() if isinstance(layer, nn.Embedding)]
    for layer in embeddings:
        layer.register_forward_pre_hook(look)
    if embeddings:
        try:
            with torch.no_grad():
                own(tokens)
        except Exception:  # then it takes no tokens, or fails below with numbers
            pass
    return min(sizes) if sizes else None


def _cut(name: str, module: nn.Module, tried: _Tried, family: ModuleFamily) -> Found:
    traced = graph.trace(name, module, tried.x)
    flow = follow(name, traced, family.outputs, family.pin)
    with_any_width(name, traced, flow)
    tree = skeleton.of_graph(traced)
    draws = _draws(traced, tried.x)
    kept = skeleton.emptied(name, tree, tried.changing)
    about = derived(flow, list(tree.state_dict()), family.outputs)
    for node, target in about.relus.items():
        kind, inplace = _relu(traced, node)
        holder, _, leaf = target.rpartition(".")
        tree.get_submodule(holder).add_module(leaf, kind(inplace))
        graph.becomes(node, target)
    used = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    for path in [path for path, layer in tree.named_modules() if isinstance(layer, nn.ReLU | nn.ReLU6)]:
        if path not in used:
            holder, _, leaf = path.rpartition(".")
            delattr(tree.get_submodule(holder), leaf)
    tree.__class__ = type(name, (type(tree),), {"forward": skeleton.forward_of(traced.graph)})
    surround(tree, draws=draws, views=False, counts=bool(list(_uncounted(tree))))
    made = Found(about.layout, about.prunable, tried.vocabulary, tree, tuple(kept), about.sizes)
    state = module.state_dict()
    weights = verify.spread({n: state[n] for n in made.layout.slots})
    verify.check_same(name, module, made.empty, tried.x, weights, errors.UNTRACED)
    verify.check_submodels(name, made.empty, about.layout, tried.x, weights)
    return made


def _relu(traced: graph.Traced, node: Any) -> tuple[type[nn.Module], bool]:
    """(the kind of ReLU that a node is, whether it overwrites its input)"""
    if node.op == "call_module":
        layer: Any = traced.module.get_submodule(str(node.target))
        return type(layer), layer.inplace
    called = graph.name_of(node)
    given = node.kwargs.get("inplace", node.args[1] if len(node.args) > 1 else False)
    return (nn.ReLU6 if called == "relu6" else nn.ReLU), bool(given) or called.endswith("_")


def _whole(name: str, module: nn.Module, tried: _Tried, family: ModuleFamily) -> Found:
    if family.pin:
        raise ModelError(f"{name}: whole=true has no sub-models, so there is nothing to pin: leave out one of the two")
    original = copy.deepcopy(module)
    kept = skeleton.emptied(name, module, tried.changing)
    surround(module, draws=tried.draws, views=True, counts=bool(list(_uncounted(module))))
    slots = {
        path: Slot(path.rpartition(".")[0] or path, (Axis(None),) * tensor.dim())
        for path, tensor in module.state_dict().items()
    }
    made = Found(ParamLayout({HEAD: family.outputs}, slots), (), tried.vocabulary, module, tuple(kept), {})
    state = original.state_dict()
    weights = {n: state[n].detach().clone() for n in slots}
    verify.check_same(name, original, made.empty, tried.x, weights, errors.UNBOUND)
    return made


def _uncounted(module: nn.Module) -> Iterator[nn.Module]:
    """Modules with weights of their own whose multiply-adds are not known, and those that call no layer of theirs."""
    for layer in module.modules():
        own = any(True for _ in layer.parameters(recurse=False))
        if (own and not isinstance(layer, COUNTED)) or isinstance(layer, nn.MultiheadAttention):
            yield layer
