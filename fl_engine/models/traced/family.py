"""A user's module as a `ModelFamily`: what is found out about it once, and its sub-networks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import COUNTED
from fl_engine.core.errors import ModelError
from fl_engine.core.seeds import drawing
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Params, Prunable, Slot, SubmodelSpec
from fl_engine.models.exits import check_spec
from fl_engine.models.traced import errors, graph, skeleton, verify
from fl_engine.models.traced.flow import follow
from fl_engine.models.traced.layout import Sizes, derived
from fl_engine.models.traced.reshapes import with_any_width
from fl_engine.models.traced.user_module import (
    Build,
    Tried,
    check_callable,
    makes_module,
    name_of,
    new,
    tried,
    without_dropout,
)
from fl_engine.models.traced.wrapper import wrap


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
        if vocabulary is not None:  # makes it a `contracts.TakesTokens`
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
        """The weights of a given module, from which a run starts; empty if a class or function makes fresh ones."""
        return self._first() if isinstance(self.build[0], nn.Module) else {}

    def _first(self) -> Params:
        about, made = found(self), new(self.build[0], self.input_shape, self.outputs)
        state = made.state_dict()
        for name, tensor in about.skeleton.state_dict().items():
            if name not in state or state[name].shape != tensor.shape:
                raise ModelError(f"{type(self).__name__} makes another network each time: {name} is not as before")
        return {name: state[name].detach().clone() for name in about.layout.slots}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.build[0], self.input_shape, self.outputs, self.whole, self.pin)


_kinds: dict[tuple[Any, bool, tuple[str, ...]], type[ModelFamily]] = {}


def from_module(build: Build, *, whole: bool = False, pin: tuple[str, ...] = ()) -> type[ModelFamily]:
    """Return the family of the networks that `build` makes. The same arguments return the same class.

    The family, made with the data's shape and number of outputs, raises ModelError for a module that cannot be trained
    or cut.

    Args:
        build: A class or a function, which is called with those of the keywords `input_shape`, `outputs` and
            `num_classes` that it has; or a module, whose weights are the first ones.
        whole: The default of the family's option `whole`: train the network without sub-models.
        pin: The default of the option `pin`: modules, by path, all of whose channels every sub-model keeps.
    """
    if not makes_module(build):
        raise ModelError(f"from_module needs an nn.Module, its class or a function that makes one, got {build!r}")
    check_callable(build)
    if isinstance(pin, str) or not all(isinstance(each, str) for each in pin):
        raise ModelError(f"pin must be a tuple of module paths, such as ('encoder.norm',), got {pin!r}")
    key = (build, whole, tuple(pin))
    if key not in _kinds:
        module, qualified = name_of(build)
        options = [("whole", bool, field(default=whole)), ("pin", tuple[str, ...], field(default=tuple(pin)))]
        made: Any = make_dataclass(
            qualified.rpartition(".")[2], options, bases=(ModuleFamily,), frozen=True, namespace={"build": (build,)}
        )
        made.__module__, made.__qualname__ = module, qualified
        _kinds[key] = made
    return _kinds[key]


def _rebuilt(build: Build, input_shape: tuple[int, ...], outputs: int, whole: bool, pin: tuple[str, ...]) -> Any:
    """A family that another process has pickled."""
    kind: Any = from_module(build)
    return kind(input_shape, outputs, whole, pin)


@dataclass(frozen=True)
class Found:
    """What is known about a module for samples of one shape. `skeleton` has no storage except for `kept`, which all
    copies share. `sizes` are the attributes of its layers that follow a sub-model's widths."""

    layout: ParamLayout
    prunable: tuple[Prunable, ...]
    vocabulary: int | None
    skeleton: nn.Module
    kept: tuple[Tensor, ...]
    sizes: Mapping[str, tuple[Sizes, ...]]

    def empty(self, spec: SubmodelSpec) -> nn.Module:
        """The sub-network without storage."""
        return skeleton.narrowed(self.skeleton, self.layout, self.sizes, spec, self.kept)


@lru_cache(maxsize=32)
def found(family: ModuleFamily) -> Found:
    """Raises ModelError for a module that cannot be trained, or cannot be cut although it must be."""
    name = type(family).__name__
    elsewhere = torch.empty(0).device.type != "cpu"
    with drawing(0, torch.device("cpu")), torch.device("cpu") if elsewhere else nullcontext():
        module = new(family.build[0], family.input_shape, family.outputs)
        trial = tried(name, module, family.input_shape, family.outputs)
        return (_whole if family.whole else _cut)(name, module, trial, family)


def _cut(name: str, module: nn.Module, trial: Tried, family: ModuleFamily) -> Found:
    traced = graph.trace(name, module, trial.x)
    flow = follow(name, traced, family.outputs, family.pin)
    with_any_width(name, traced, flow)
    tree = skeleton.of_graph(traced)
    draws = _draws(traced, trial.x)
    kept = skeleton.emptied(name, tree, trial.changing)
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
    wrap(tree, draws=draws, views=False, counts=_has_uncounted(tree))
    made = Found(about.layout, about.prunable, trial.vocabulary, tree, tuple(kept), about.sizes)
    state = module.state_dict()
    weights = verify.spread({n: state[n] for n in made.layout.slots})
    verify.check_same(name, module, made.empty, trial.x, weights, errors.UNTRACED)
    verify.check_submodels(name, made.empty, about.layout, trial.x, weights)
    return made


def _draws(traced: graph.Traced, x: Tensor) -> bool:
    """Like `Tried.draws`, of a graph in which F.dropout has become a module."""
    own, state = without_dropout(fx.GraphModule(traced.module, traced.graph)).train(), torch.get_rng_state()
    with torch.no_grad():
        own(x)
    return not torch.equal(state, torch.get_rng_state())


def _relu(traced: graph.Traced, node: Any) -> tuple[type[nn.Module], bool]:
    """(the kind of ReLU that a node is, whether it overwrites its input)"""
    if node.op == "call_module":
        layer: Any = traced.module.get_submodule(str(node.target))
        return type(layer), layer.inplace
    called = graph.name_of(node)
    given = node.kwargs.get("inplace", node.args[1] if len(node.args) > 1 else False)
    return (nn.ReLU6 if called == "relu6" else nn.ReLU), bool(given) or called.endswith("_")


def _whole(name: str, module: nn.Module, trial: Tried, family: ModuleFamily) -> Found:
    if family.pin:
        raise ModelError(f"{name}: whole=true has no sub-models, so there is nothing to pin: leave out one of the two")
    original = copy.deepcopy(module)
    kept = skeleton.emptied(name, module, trial.changing)
    wrap(module, draws=trial.draws, views=True, counts=_has_uncounted(module))
    slots = {
        path: Slot(path.rpartition(".")[0] or path, (Axis(None),) * tensor.dim())
        for path, tensor in module.state_dict().items()
    }
    made = Found(ParamLayout({HEAD: family.outputs}, slots), (), trial.vocabulary, module, tuple(kept), {})
    state = original.state_dict()
    weights = {n: state[n].detach().clone() for n in slots}
    verify.check_same(name, original, made.empty, trial.x, weights, errors.UNBOUND)
    return made


def _has_uncounted(module: nn.Module) -> bool:
    """Whether a module has weights of its own and its multiply-adds are not known by its layers."""
    for layer in module.modules():
        own = any(True for _ in layer.parameters(recurse=False))
        if (own and not isinstance(layer, COUNTED)) or isinstance(layer, nn.MultiheadAttention):
            return True
    return False
