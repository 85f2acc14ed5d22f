"""A user's module: made from a class, a function or a module, and tried once on made-up samples."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_engine.core.errors import FlexfleetError, ModelError
from fl_engine.models.traced.errors import failed

Build = nn.Module | Callable[..., nn.Module]

FROM_DATA = ("input_shape", "outputs", "num_classes")
"""Keywords that a class or function gets if it has them; `num_classes` is `outputs`."""
BATCH = 3
"""Samples of the made-up batch."""


def makes_module(found: object) -> bool:
    """Whether `from_module` accepts it."""
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    return isinstance(found, nn.Module) or (callable(found) and not inspect.isbuiltin(found))


def check_callable(build: Build) -> None:
    """Raise ModelError if a class or function requires parameters that it does not get."""
    if isinstance(build, nn.Module):
        return
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:  # compiled code has no signature
        return
    if needed := [name for name in _required(parameters) if name not in FROM_DATA]:
        raise ModelError(
            f"{name_of(build)[1]} requires {', '.join(needed)}, but only {', '.join(FROM_DATA)} are passed: give the "
            "others defaults"
        )


def _required(parameters: Any) -> list[str]:
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def name_of(build: Build) -> tuple[str, str]:
    """(module, qualified name) of a class or function; of a module, those of its class."""
    named: Any = build if hasattr(build, "__qualname__") else type(build)
    return named.__module__, named.__qualname__


def new(build: Build, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A new module with initial weights of its own, or a copy of the module that was given."""
    name = name_of(build)[1]
    values = dict(zip(FROM_DATA, (input_shape, outputs, outputs), strict=True))
    try:
        if isinstance(build, nn.Module):
            made: Any = copy.deepcopy(build)
        else:
            made = build(**{n: v for n, v in values.items() if n in inspect.signature(build).parameters})
    except FlexfleetError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise failed(name, "cannot be made", error) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{name} must return a torch.nn.Module, got {type(made).__name__}")
    if lazy := [type(m).__name__ for m in made.modules() if isinstance(m, nn.modules.lazy.LazyModuleMixin)]:
        raise ModelError(f"{name} has a {lazy[0]}, whose sizes are not known yet: give the layer its sizes")
    return made


@dataclass(frozen=True)
class Tried:
    """`x`: the made-up batch; `changing`: the buffers that training changes; `draws`: whether training draws from
    torch's generator other than by nn.Dropout."""

    x: Tensor
    vocabulary: int | None
    changing: frozenset[str]
    draws: bool


def tried(name: str, module: nn.Module, input_shape: tuple[int, ...], outputs: int) -> Tried:
    """Run a forward and a backward pass. Raises ModelError for a module that cannot be trained here."""
    if not all(isinstance(n, int) and n > 0 for n in input_shape) or outputs < 1:
        raise ModelError(f"{name}: samples and outputs must have positive sizes, got {input_shape} and {outputs}")
    _check_forward(name, module)
    _check_parameters(name, module)
    vocabulary = _vocabulary(module, torch.zeros(BATCH, *input_shape, dtype=torch.int64))
    x = torch.randn(BATCH, *input_shape) if vocabulary is None else torch.randint(vocabulary, (BATCH, *input_shape))
    own = without_dropout(module)
    try:
        with torch.no_grad():
            out = own.eval()(x)
        before = {path: buffer.clone() for path, buffer in own.named_buffers()}
        state = torch.get_rng_state()
        answer = own.train()(x)
        draws = not torch.equal(state, torch.get_rng_state())
        if isinstance(answer, Tensor) and answer.requires_grad:
            answer.square().sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # the user's code may raise anything
        raise failed(name, f"cannot take a batch {tuple(x.shape)} of {str(x.dtype)[6:]}", error) from error
    shape = tuple(out.shape) if isinstance(out, Tensor) and isinstance(answer, Tensor) else type(out).__name__
    if shape[:2] != (BATCH, outputs):
        raise ModelError(
            f"{name} must return a tensor ({BATCH}, {outputs}) for {BATCH} samples {input_shape}, got {shape}. The "
            "data set decides the number of outputs; a keyword `outputs` or `num_classes` gets it"
        )
    if idle := [path for path, p in own.named_parameters() if p.requires_grad and p.grad is None]:
        raise ModelError(
            f"{name}: the loss does not depend on {', '.join(idle[:4])}: leave out what is not used, or freeze it with "
            "requires_grad_(False)"
        )
    changing = {path for path, buffer in own.named_buffers() if not torch.equal(buffer, before[path])}
    return Tried(x, vocabulary, frozenset(changing), draws)


def _check_forward(name: str, module: nn.Module) -> None:
    parameters = list(inspect.signature(module.forward).parameters.values())
    needed = _required(parameters)
    if len(needed) > 1 or not parameters:
        raise ModelError(
            f"{name} takes {len(needed)} inputs ({', '.join(needed)}): a network must take one, a batch of samples"
        )


def _check_parameters(name: str, module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(f"{name} has no weights to train: it needs a parameter with requires_grad=True")
    for path, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ModelError(
                    f"{name}: {f'{path}.{attribute}'.lstrip('.')} is computed from other weights when the network is "
                    "made, so no copy of it can be trained: use torch.nn.utils.parametrizations"
                )
    paths: dict[int, str] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name}: the parameter {path} has a hook (register_hook), which copies of the network would lose. Use "
                "a torch.autograd.Function in forward, or torch.nn.utils.parametrize"
            )
        other = paths.setdefault(id(parameter), path)
        if other != path:
            raise ModelError(
                f"{name} ties the parameters {other} and {path}, but sub-models and averages need each by its own name"
            )


def without_dropout(module: nn.Module) -> nn.Module:
    """A copy whose nn.Dropout layers draw nothing. In training they have generators of their own."""
    own = copy.deepcopy(module)
    for layer in own.modules():
        if type(layer) is nn.Dropout:
            layer.p = 0.0
    return own


def _vocabulary(module: nn.Module, tokens: Tensor) -> int | None:
    """The number of tokens if the module looks its input up in an embedding; None: it takes numbers."""
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
        except Exception:  # it does not take tokens
            pass
    return min(sizes) if sizes else None
