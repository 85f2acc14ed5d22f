"""Wrap a user's module as a `ModelFamily`. The module is analysed once for all sub-networks."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache, partial
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
from fl_engine.models.traced import graph, subnetwork, user_module, verify
from fl_engine.models.traced.flow import Flow, Sizes, layout_of, replace_written_sizes
from fl_engine.models.traced.graph import cannot_cut, unusable
from fl_engine.models.traced.user_module import Build, ModuleTrial, makes_module, name_of, new_module

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleFamily:
    """Network that `build` creates. `from_module` creates a subclass for each `build`."""

    input_shape: tuple[int, ...]
    outputs: int
    whole: bool = False
    """True to train any module unchanged, without sub-models; not needed if the algorithm sends the whole model."""
    build: ClassVar[tuple[Build]]

    def __post_init__(self) -> None:
        vocabulary = analysis(self).vocabulary
        if vocabulary is not None:  # Only networks for tokens have this attribute.
            object.__setattr__(self, "vocabulary", vocabulary)

    @property
    def keywords(self) -> dict[str, Any]:
        """Options that the `model` section passes to the user's class or function."""
        return dict(json.loads(_key(self.build[0])[1]))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of layers, operations, weights and buffers whose channels are kept in all sub-models."""
        return analysis(self).kept

    def layout(self) -> ParamLayout:
        return analysis(self).layout

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """Return a sub-model that maps samples (B, ...) to outputs (B, outputs)."""
        about = analysis(self)
        check_spec(about.layout, spec)
        module = about.empty(spec)
        if torch.empty(0).device.type != "meta":
            module.load_state_dict(take(self._first(), about.layout, spec), assign=True)
        return module

    def prunable(self) -> tuple[Prunable, ...]:
        return analysis(self).prunable

    def weights(self) -> Params:
        """Return the initial weights if `build` is a module; return {} if `build` is a class or function."""
        return self._first() if isinstance(self.build[0], nn.Module) else {}

    def _first(self) -> Params:
        about, made = analysis(self), new_module(self.build[0], self.input_shape, self.outputs)
        state = made.state_dict()
        for name, tensor in about.skeleton.state_dict().items():
            if name not in state or state[name].shape != tensor.shape:
                raise unusable(f"{type(self).__name__} must create the same network each time, but {name} has changed")
        return {name: state[name].detach().clone() for name in about.layout.slots}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.build[0], self.input_shape, self.outputs, self.whole)


_kinds: dict[tuple[Any, bool], type[ModelFamily]] = {}


def from_module(build: Build, *, whole: bool = False) -> type[ModelFamily]:
    """Return the network class for the modules that `build` creates. The same arguments always yield the same class.

    Args:
        build: A module with the initial weights, or a class or function that creates a module. The keywords
            `input_shape`, `outputs` and `num_classes` are passed if the class or function accepts them.
        whole: The default of the option `model.whole`; True trains the network without sub-models.

    Returns:
        The network class, for `flexfleet.run(model=...)`.

    Raises:
        ModelError: `build` cannot create a module. The class raises ModelError if the module cannot be trained or cut.

    Examples:
        >>> flexfleet.run(model=flexfleet.from_module(MyNet, whole=True), algorithm="all_large")
    """
    if not makes_module(build):
        raise ModelError(f"from_module: build must be an nn.Module, a subclass or a function, got {build!r}")
    if (key := (_key(build), whole)) not in _kinds:
        module, qualified = name_of(build)
        options = [("whole", bool, field(default=whole))]
        made: Any = make_dataclass(
            qualified.rpartition(".")[2], options, bases=(ModuleFamily,), frozen=True, namespace={"build": (build,)}
        )
        made.__module__, made.__qualname__ = module, qualified
        _kinds[key] = made
    return _kinds[key]


def _key(build: Build) -> tuple[Any, str]:
    """Return the class or function and its options as JSON, as a cache key. `functools.partial` objects with the same
    function and keywords have the same key, unless an argument is positional or not JSON."""
    if isinstance(build, partial) and not build.args:
        try:
            return build.func, json.dumps(build.keywords, sort_keys=True)
        except TypeError:
            pass
    return build, "{}"


def _restore(build: Build, input_shape: tuple[int, ...], outputs: int, whole: bool) -> Any:
    """Restore a network that was pickled in another process."""
    kind: Any = from_module(build)
    return kind(input_shape, outputs, whole)


@dataclass(frozen=True)
class Analysis:
    """Properties of a user's module for samples of one shape."""

    layout: ParamLayout
    prunable: tuple[Prunable, ...]
    vocabulary: int | None
    skeleton: nn.Module
    """Module without storage for its tensors, except for `constants`."""
    constants: tuple[Tensor, ...]
    """Tensors that all copies of the skeleton share."""
    sizes: Mapping[str, tuple[Sizes, ...]]
    """Maps the path of each layer to the attributes that depend on a sub-model's widths."""
    kept: tuple[str, ...]
    """Names of layers, operations, weights and buffers whose channels are kept in all sub-models."""

    def empty(self, spec: SubmodelSpec) -> nn.Module:
        """Return a copy of the skeleton, without storage, that has the widths of the sub-model."""
        module = copy.deepcopy(self.skeleton, {id(tensor): tensor for tensor in self.constants})
        if not spec.keep:
            return module

        def width(group: str) -> int:
            return self.layout.width(spec, group)

        for path, attributes in self.sizes.items():
            for name, axis, full, each in attributes:
                setattr(module.get_submodule(path), name, axis.length(full, width) // each)
        for name, slot in self.layout.slots.items():
            holder, _, leaf = name.rpartition(".")
            layer = module.get_submodule(holder)
            old: Tensor = getattr(layer, leaf)
            shape = [axis.length(size, width) for axis, size in zip(slot.axes, old.shape, strict=True)]
            empty = torch.empty(shape, device="meta")
            setattr(layer, leaf, nn.Parameter(empty) if isinstance(old, nn.Parameter) else empty)
        return module


@lru_cache(maxsize=32)
def analysis(family: ModuleFamily) -> Analysis:
    """Analyse the module. Raises ModelError if the module cannot be trained, or cannot be cut into sub-models."""
    name = type(family).__name__
    elsewhere = torch.empty(0).device.type != "cpu"
    with drawing(0, torch.device("cpu")), torch.device("cpu") if elsewhere else nullcontext():
        module = new_module(family.build[0], family.input_shape, family.outputs)
        trial = user_module.try_module(name, module, family.input_shape, family.outputs)
        return (_whole if family.whole else _cut)(name, module, trial, family)


def _cut(name: str, module: nn.Module, trial: ModuleTrial, family: ModuleFamily) -> Analysis:
    if tied := user_module.tied(module):
        raise cannot_cut(name, f"its parameters {tied[0]} and {tied[1]} are tied")
    subnetwork.emptied(name, copy.deepcopy(module), trial.changing)  # Check the buffers that the graph does not use.
    traced = graph.trace(name, module, trial.x)
    flow = Flow(traced, family.outputs)
    replace_written_sizes(name, traced, flow)
    tree = subnetwork.of_graph(traced)
    # The graph contains modules instead of F.dropout, so `without_dropout` removes every dropout.
    plain = user_module.without_dropout(fx.GraphModule(traced.module, traced.graph))
    draws = user_module.draws_numbers(plain.train(), trial.x)
    constants = subnetwork.emptied(name, tree, trial.changing)
    derived = layout_of(flow, list(tree.state_dict()), family.outputs)
    kept = tuple(dict.fromkeys((*flow.mixing, *flow.fixed)))
    if flow.mixing and set(derived.layout.groups) == {HEAD}:
        raise cannot_cut(name, f"all its channels are kept by {', '.join(kept)}")
    for place in flow.mixing:
        log.info("%s: %s mixes channels, so every sub-model keeps all channels of this layer", name, place)
    _move_relus(traced, tree, derived.relus)
    tree.__class__ = type(name, (type(tree),), {"forward": subnetwork.forward_of(traced.graph)})
    subnetwork.wrap(tree, draws=draws, views=False, counts=_has_uncounted(tree))
    made = Analysis(derived.layout, derived.prunable, trial.vocabulary, tree, tuple(constants), derived.sizes, kept)
    state = module.state_dict()
    weights = verify.spread({n: state[n] for n in made.layout.slots})
    verify.check_same(name, module, made.empty, trial.x, weights, graph.UNTRACED)
    verify.check_submodels(name, made.empty, made.layout, trial.x, weights)
    return made


def _move_relus(traced: graph.Traced, tree: nn.Module, relus: Mapping[fx.Node, str]) -> None:
    """Replace each ReLU by a separate module with a name in `relus`, and remove all unused ReLU modules."""

    def child(path: str) -> tuple[nn.Module, str]:
        holder, _, leaf = path.rpartition(".")
        return tree.get_submodule(holder), leaf

    for node, target in relus.items():
        kind, inplace = _relu(traced, node)
        holder, leaf = child(target)
        holder.add_module(leaf, kind(inplace))
        graph.becomes(node, target)
    used = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    for path in [path for path, layer in tree.named_modules() if isinstance(layer, nn.ReLU | nn.ReLU6)]:
        if path not in used:
            delattr(*child(path))


def _relu(traced: graph.Traced, node: Any) -> tuple[type[nn.Module], bool]:
    """Return the module class of a ReLU node, and whether the ReLU works in place."""
    if node.op == "call_module":
        layer: Any = traced.module.get_submodule(str(node.target))
        return type(layer), layer.inplace
    called = graph.name_of(node)
    given = node.kwargs.get("inplace", node.args[1] if len(node.args) > 1 else False)
    return (nn.ReLU6 if called == "relu6" else nn.ReLU), bool(given) or called.endswith("_")


def _whole(name: str, module: nn.Module, trial: ModuleTrial, family: ModuleFamily) -> Analysis:
    original = copy.deepcopy(module)
    subnetwork.name_once(module)
    constants = subnetwork.emptied(name, module, trial.changing)
    subnetwork.wrap(module, draws=trial.draws, views=True, counts=_has_uncounted(module))
    slots = {
        path: Slot(path.rpartition(".")[0] or path, (Axis(None),) * tensor.dim())
        for path, tensor in module.state_dict().items()
    }
    layout, kept = ParamLayout({HEAD: family.outputs}, slots), ("model.whole=true",)
    made = Analysis(layout, (), trial.vocabulary, module, tuple(constants), {}, kept)
    state = original.state_dict()
    weights = {n: state[n].detach().clone() for n in slots}
    verify.check_same(name, original, made.empty, trial.x, weights, graph.UNBOUND)
    return made


def _has_uncounted(module: nn.Module) -> bool:
    """Return whether weights outside of `COUNTED` layers exist. Their multiply-adds are not counted layer by layer."""
    return any(
        isinstance(layer, nn.MultiheadAttention)
        or (any(True for _ in layer.parameters(recurse=False)) and not isinstance(layer, COUNTED))
        for layer in module.modules()
    )
