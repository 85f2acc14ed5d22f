"""Builds a network from its section of the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError, FlexfleetError, ModelError
from fl_engine.core.fields import adapter
from fl_engine.core.registry import Contract, check_names, resolve
from fl_engine.models import MODELS
from fl_engine.models.traced import from_module, makes_module
from fl_engine.models.traced.family import ModuleFamily

CONTRACT = Contract("model", MODELS, ModelFamily)

FROM_DATA = ("input_shape", "outputs")
"""The fields of a network that are not options, because they follow from the data."""

INIT = "init"
"""The entry of a `model` section with the weights to start from, which is not an option of the network."""
WARM_START = (
    "The weights that the rounds start from: a safetensors file, the folder of a run, or models:/NAME@ALIAS in MLflow; "
    "null: fresh ones."
)


def build_model(
    model: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int, *, submodels: bool = True
) -> ModelFamily:
    """Return the network of a `model` section.

    Args:
        model: The section.
        input_shape: The shape of one sample.
        outputs: The number of outputs.
        submodels: Whether the network is to be cut into sub-models. If not, a user's module stays as it is and is not
            traced.

    Raises:
        ConfigError: The options do not fit the network, or the samples do not.
        ModelError: A user's module cannot be trained, or not be cut.
    """
    kind, values = model_kind(model), {**options_of(model), "input_shape": input_shape, "outputs": outputs}
    if not submodels and issubclass(kind, ModuleFamily):
        values |= {"whole": True, "pin": ()}
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
            raise ConfigError(f"{model['name']} does not take samples of the shape {shape}") from error
        raise ConfigError(f"model.{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from error


def model_kind(section: Mapping[str, Any]) -> type[ModelFamily]:
    """The named family. If the name is that of an `nn.Module`, its class or a function that makes one, the family of
    its networks."""
    name = section.get("name")
    if isinstance(name, str) and name not in MODELS and ":" in name:
        found = resolve(MODELS, name, CONTRACT.what)
        if makes_module(found):
            try:
                return from_module(found)  # type: ignore[arg-type]
            except ModelError as error:
                raise ConfigError(f"model {name!r}: {error}") from error
    return CONTRACT.of_section(section)


def check_options(model: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the named network does not have."""
    kind: Any = model_kind(model)
    known = [f.name for f in fields(kind) if f.name not in FROM_DATA]
    check_names("model", options_of(model), [*known, INIT])
    if not isinstance(model.get(INIT), str | None) or model.get(INIT) == "":
        raise ConfigError(
            f"model.{INIT} must be a safetensors file, the folder of a run, models:/NAME@ALIAS or null, got "
            f"{model[INIT]!r}"
        )


def options_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """The network's own options in a `model` section."""
    return {name: value for name, value in model.items() if name not in ("name", INIT)}
