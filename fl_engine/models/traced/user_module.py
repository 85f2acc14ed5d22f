"""What `from_module` is given: a module's class, a function that makes a module, or a module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fl_engine.core.errors import FlexfleetError, ModelError
from fl_engine.models.traced.errors import line_of_error

Build = nn.Module | Callable[..., nn.Module]

FROM_DATA = ("input_shape", "outputs", "num_classes")
"""Keywords that a class or function gets where it has them; `num_classes` is `outputs`."""


def makes_module(found: object) -> bool:
    """Whether `from_module` takes it."""
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    return isinstance(found, nn.Module) or (callable(found) and not inspect.isbuiltin(found))


def check_callable(build: Build) -> None:
    """Raises ModelError where a class or function has parameters that it does not get."""
    if isinstance(build, nn.Module):
        return
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:  # of compiled code
        return
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in several and p.name not in FROM_DATA]
    if needed:
        raise ModelError(
            f"{name_of(build)[1]} cannot be called without {', '.join(needed)}: what makes a network gets "
            f"{', '.join(FROM_DATA)} where it has them, and nothing else; give the others defaults"
        )


def name_of(build: Build) -> tuple[str, str]:
    """(module, qualified name) of what makes the network; of a module, those of its class."""
    named: Any = build if hasattr(build, "__qualname__") else type(build)
    return named.__module__, named.__qualname__


def new(build: Build, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A module with first weights of its own; of a module, a copy. Raises ModelError where it cannot be made."""
    name = name_of(build)[1]
    try:
        made = copy.deepcopy(build) if isinstance(build, nn.Module) else build(**_keywords(build, input_shape, outputs))
    except FlexfleetError:
        raise
    except Exception as error:  # of somebody else's code
        raise failed(name, "cannot be made", error) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{name} gives {type(made).__name__}, a torch.nn.Module is expected")
    if unknown := [type(m).__name__ for m in made.modules() if isinstance(m, nn.modules.lazy.LazyModuleMixin)]:
        raise ModelError(f"{name} has a {unknown[0]}, whose sizes are not known yet: give the layer its sizes")
    return made


def failed(name: str, what: str, error: Exception) -> ModelError:
    """The error for an exception of the user's code."""
    said = " ".join(str(error).split()) or type(error).__name__
    return ModelError(f"{name} {what}{line_of_error(error)}: {type(error).__name__}: {said}")


def _keywords(build: Any, input_shape: tuple[int, ...], outputs: int) -> dict[str, Any]:
    values = dict(zip(FROM_DATA, (input_shape, outputs, outputs), strict=True))
    parameters = inspect.signature(build).parameters
    return {name: value for name, value in values.items() if name in parameters}
