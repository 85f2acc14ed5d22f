"""Create a user's module from a class, a function or a module, and run one training pass on random samples."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_engine.core.errors import FlexfleetError
from fl_engine.models.traced.graph import failed, unusable

Build = nn.Module | Callable[..., nn.Module]

FROM_DATA = ("input_shape", "outputs", "num_classes")
"""Keywords that are passed to a class or function if the signature contains them. `num_classes` equals `outputs`."""
RESERVED = ("name", "init", "whole")
"""Keys of the `model` section that are never passed to a class or function."""
BATCH = 3
"""Number of samples in the random batch."""


def makes_module(found: object) -> bool:
    """Return whether `from_module` accepts the object."""
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    return isinstance(found, nn.Module) or (callable(found) and not inspect.isbuiltin(found))


def name_of(build: Build) -> tuple[str, str]:
    """Return the Python module and the qualified name of a class or function, or of the class of an nn.Module."""
    named: Any = build.func if isinstance(build, partial) else build
    named = named if hasattr(named, "__qualname__") else type(named)
    return named.__module__, named.__qualname__


def options_of(build: Build) -> Mapping[str, inspect.Parameter]:
    """Return the keywords of a class or function that are options of the network."""
    if isinstance(build, nn.Module):
        return {}
    other, known = (*FROM_DATA, *RESERVED), inspect.signature(build).parameters
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return {name: each for name, each in known.items() if name not in other and each.kind not in by_place}


def new_module(build: Build, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Create a module with the class or function `build`. If `build` is a module, return a copy."""
    name = name_of(build)[1]
    values = dict(zip(FROM_DATA, (input_shape, outputs, outputs), strict=True))
    try:
        if isinstance(build, nn.Module):
            made: Any = copy.deepcopy(_copyable(build))
        else:
            made = build(**{n: v for n, v in values.items() if n in inspect.signature(build).parameters})
    except FlexfleetError:
        raise
    except Exception as error:  # User code may raise any error.
        raise failed(name, "cannot be created", error) from error
    if not isinstance(made, nn.Module):
        raise unusable(f"{name} must return a torch.nn.Module, got {type(made).__name__}")
    if lazy := [type(m).__name__ for m in made.modules() if isinstance(m, nn.modules.lazy.LazyModuleMixin)]:
        raise unusable(f"{name} must not contain lazy layers, got {lazy[0]}. Use a layer with explicit sizes")
    return _copyable(made)


def _copyable(module: nn.Module) -> nn.Module:
    """Detach computed tensors that layers store, such as the weight of `torch.nn.utils.weight_norm`, because tensors
    with a gradient history cannot be copied."""
    for layer in module.modules():
        results = {key: value for key, value in vars(layer).items() if isinstance(value, Tensor) and not value.is_leaf}
        layer.__dict__.update({key: value.detach() for key, value in results.items()})
    return module


@dataclass(frozen=True)
class ModuleTrial:
    """Properties of a module, determined by a forward and a backward pass."""

    x: Tensor
    """The random batch."""
    vocabulary: int | None
    """Number of tokens; None if the inputs of the module are not tokens."""
    changing: frozenset[str]
    """Names of the buffers that training changes."""
    draws: bool
    """True if training draws random numbers from torch's generator, apart from nn.Dropout."""


def try_module(name: str, module: nn.Module, input_shape: tuple[int, ...], outputs: int) -> ModuleTrial:
    """Run a forward and a backward pass. Raises ModelError if the module cannot be trained."""
    if not all(isinstance(n, int) and n > 0 for n in input_shape) or outputs < 1:
        raise unusable(f"{name}: samples and outputs must have positive sizes, got {input_shape} and {outputs}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise unusable(f"{name} has no weights to train. Set requires_grad=True for a parameter")
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise unusable(f"{name}: the parameter {path} must not have a hook, which copies of the network lose")
    x = torch.randn(BATCH, *input_shape)
    try:
        own = without_dropout(module)
        vocabulary = _vocabulary(module, torch.zeros(BATCH, *input_shape, dtype=torch.int64))
        if vocabulary is not None:
            x = torch.randint(vocabulary, (BATCH, *input_shape))
        with torch.no_grad():
            evaluated = own.eval()(x)
        before = {path: buffer.clone() for path, buffer in own.named_buffers()}
        state = torch.get_rng_state()
        trained = own.train()(x)
        draws = not torch.equal(state, torch.get_rng_state())
        if isinstance(trained, Tensor) and trained.requires_grad:
            trained.square().sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # User code may raise any error.
        raise failed(name, f"cannot process a batch {tuple(x.shape)} of {str(x.dtype)[6:]}", error) from error
    tensors = isinstance(evaluated, Tensor) and isinstance(trained, Tensor)
    shape = tuple(evaluated.shape) if tensors else type(evaluated).__name__
    if shape[:2] != (BATCH, outputs):
        raise unusable(
            f"{name} must return a tensor ({BATCH}, {outputs}) for {BATCH} samples {input_shape}, got {shape}. The "
            "data set determines the number of outputs, which is passed as keyword `outputs` or `num_classes`"
        )
    if idle := [path for path, p in own.named_parameters() if p.requires_grad and p.grad is None]:
        raise unusable(
            f"{name}: the loss does not depend on {', '.join(idle[:4])}. Remove unused parameters, or freeze them with "
            "requires_grad_(False)"
        )
    changing = {path for path, buffer in own.named_buffers() if not torch.equal(buffer, before[path])}
    return ModuleTrial(x, vocabulary, frozenset(changing), draws)


def tied(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of two parameters, in different layers, that refer to one tensor; None if there are none."""
    paths: dict[int, str] = {}
    for prefix, layer in module.named_modules():
        for leaf, parameter in layer._parameters.items():
            path = f"{prefix}.{leaf}".lstrip(".")
            if parameter is not None and (other := paths.setdefault(id(parameter), path)) != path:
                return other, path
    return None


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy in which nn.Dropout does not use torch's generator; clients use separate generators for dropout."""
    own = copy.deepcopy(module)
    for layer in own.modules():
        if type(layer) is nn.Dropout:
            layer.p = 0.0
    return own


def draws_numbers(module: nn.Module, x: Tensor) -> bool:
    """Return whether the forward draws from torch's generator."""
    state = torch.get_rng_state()
    with torch.no_grad():
        module(x)
    return not torch.equal(state, torch.get_rng_state())


def _vocabulary(module: nn.Module, tokens: Tensor) -> int | None:
    """Return the number of tokens if the module uses `tokens` as indices or for one-hot vectors, otherwise None."""
    lookups = _Lookups(tokens)
    try:
        with torch.no_grad(), lookups:
            copy.deepcopy(module).eval()(tokens)
    except Exception:  # The module does not accept tokens.
        pass
    return min(lookups.sizes, default=None)


class _Lookups(TorchFunctionMode):
    """Mode that records the number of rows of each table that is indexed with `tokens`."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.sizes, self._place = list[int](), tokens.data_ptr()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch._C._nn.one_hot and self._is_tokens(args[0]):
            self.sizes += [size for size in (*args[1:], *options.values()) if size > 0]
        elif func in (F.embedding, F.embedding_bag) and self._is_tokens(args[0]):
            self.sizes.append(len(args[1]))
        elif func is Tensor.__getitem__ and self._is_tokens(args[1]):
            self.sizes.append(len(args[0]))
        return func(*args, **options)

    def _is_tokens(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.data_ptr() == self._place
