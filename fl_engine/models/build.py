"""Build a network from the `model` section of the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from pydantic import ValidationError
from torch import nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError, FlexfleetError, ModelError
from fl_engine.core.fields import adapter
from fl_engine.core.registry import Contract, check_names, resolve
from fl_engine.models import MODELS
from fl_engine.models.traced import from_module, makes_module
from fl_engine.models.traced.family import ModuleFamily
from fl_engine.models.traced.user_module import FROM_DATA as PASSED
from fl_engine.models.traced.user_module import name_of
from fl_engine.models.traced.user_module import options_of as module_options

CONTRACT = Contract("model", MODELS, ModelFamily)

FROM_DATA = ("input_shape", "outputs")
"""Fields of a network class whose values come from the data set. These fields are not options."""

OWN = tuple(field.name for field in fields(ModuleFamily))
"""Fields of the network class that `from_module` creates for a user's module."""

INIT = "init"
"""Key of the initial weights in the `model` section. Network classes do not have this option."""
WARM_START = (
    "The weights that the rounds start from: a safetensors file, the folder of a run, or models:/NAME@ALIAS in MLflow; "
    "null: newly initialised weights."
)


def build_model(
    model: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int, *, submodels: bool = True
) -> ModelFamily:
    """Build the network that a `model` section describes.

    Args:
        model: The `model` section.
        input_shape: The shape of one sample.
        outputs: The number of outputs.
        submodels: False if the algorithm does not use sub-models; a user's module is then not traced.

    Raises:
        ConfigError: The network does not support the options or the shape of the samples.
        ModelError: A user's module cannot be trained, or cannot be cut into sub-models.
    """
    kind, values = model_kind(model), {**options_of(model), "input_shape": input_shape, "outputs": outputs}
    if issubclass(kind, ModuleFamily):  # `kind` already contains the options of the user's class
        values = {name: value for name, value in values.items() if name in OWN}
        values |= {} if submodels else {"whole": True}
    try:
        family: ModelFamily = adapter(kind).validate_json(json.dumps(values), strict=True)
        return family
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, FlexfleetError):
            raise cause from error
        if first["loc"][0] == "input_shape":
            shape = "x".join(map(str, input_shape))
            raise ConfigError(f"model.name={model['name']} does not support samples of shape {shape}") from error
        raise ConfigError(f"model.{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from error


def model_kind(section: Mapping[str, Any]) -> type[ModelFamily]:
    """Return the network class for a `model` section. `model.name` may also refer to an `nn.Module`, a subclass of
    `nn.Module`, or a function that returns a module."""
    target = _own_module(section)
    if target is None:
        return CONTRACT.of_section(section)
    options = {name: value for name, value in options_of(section).items() if name not in OWN}
    try:
        return from_module(partial(target, **options) if options and not isinstance(target, nn.Module) else target)
    except ModelError as error:
        raise ConfigError(f"model {section['name']!r}: {error}") from error


def _own_module(section: Mapping[str, Any]) -> Any:
    """Return the user's module, class or function that a `model` section names; None for a built-in network."""
    name = section.get("name")
    if not isinstance(name, str) or name in MODELS or ":" not in name:
        return None
    target: Any = resolve(MODELS, name, CONTRACT.what)
    return target if makes_module(target) else None


def check_options(model: Mapping[str, Any]) -> None:
    """Raise ConfigError if the `model` section sets an unknown option, or does not set a required option."""
    target, options = _own_module(model), options_of(model)
    kind: Any = model_kind(model)
    known = [f.name for f in fields(kind) if f.name not in FROM_DATA]
    if target is not None:
        keywords = module_options(target)
        known += options if any(each.kind is each.VAR_KEYWORD for each in keywords.values()) else keywords
        _check_keywords(name_of(target)[1], target, options, keywords)
    check_names("model", options, [*known, INIT])
    if not isinstance(model.get(INIT), str | None) or model.get(INIT) == "":
        raise ConfigError(
            f"model.{INIT} must be a safetensors file, the folder of a run, models:/NAME@ALIAS or null, got "
            f"{model[INIT]!r}"
        )


def _check_keywords(name: str, target: Any, options: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError if the options cannot be passed as keywords to the user's class or function."""
    if passed := [each for each in options if each in PASSED]:
        raise ConfigError.at(f"model.{passed[0]} must not be set, because the data set determines this option")
    if isinstance(target, nn.Module) and (wrong := [each for each in options if each not in OWN]):
        path = f"model.{wrong[0]}"
        message = f"{path} cannot be set, because {name} is already created. Set model.name to its class"
        raise ConfigError(message, code="config.unknown", path=path)
    required = [n for n, each in keywords.items() if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if missing := [each for each in required if each not in options]:
        raise ConfigError.at(f"model.{missing[0]} must be set, because {name} requires it", code="config.missing")


def options_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a `model` section that are options of the network."""
    return {name: value for name, value in model.items() if name not in ("name", INIT)}


def with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the network that a `model` section describes, including the defaults of the network."""
    kind: Any = model_kind(model)
    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in fields(kind)
        if field.name not in OWN and field.init
    }
    if (target := _own_module(model)) is not None:
        defaults = {
            name: each.default for name, each in module_options(target).items() if each.default is not each.empty
        }
    return {name: value for name, value in defaults.items() if value is not MISSING} | options_of(model)
