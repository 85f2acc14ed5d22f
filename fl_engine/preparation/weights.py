"""Support for preparations that return weights of the whole network. The first round starts from these weights.

The preparation's artifact must have a field for the weights. The field needs a default, because the weights are not
stored in the artifact's JSON, but as safetensors:

    weights: Weights = field(default_factory=dict, compare=False, repr=False)

If the field is empty, the run starts from newly initialised weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, GetPydanticSchema
from pydantic_core import core_schema

from fl_engine.core.contracts import ModelFamily, Preparation
from fl_engine.core.errors import ConfigError, ModelError
from fl_engine.core.fields import is_model
from fl_engine.core.slicing import blank, largest
from fl_engine.core.types import Params, Prepared

FIELD = "weights"

Weights = Annotated[Params, GetPydanticSchema(lambda *_: core_schema.any_schema())]
"""Map names to the network's weights and running statistics (float32), in the shapes of the network's layout."""


def gives_weights(kind: Preparation) -> bool:
    """Return True if the preparation's artifact has a field for weights."""
    artifact = kind.artifact
    if is_model(artifact):
        return FIELD in artifact.model_fields
    return dataclasses.is_dataclass(artifact) and any(field.name == FIELD for field in dataclasses.fields(artifact))


def giver(names: Iterable[str]) -> str | None:
    """Return the name of the preparation that returns weights, or None. Raises ConfigError if more than one preparation
    returns weights."""
    from fl_engine.preparation import preparation  # An import at module level would be circular.

    givers = [name for name in names if gives_weights(preparation(name))]
    if len(givers) > 1:
        raise ConfigError(f"at most one preparation of an algorithm may return weights, got {' and '.join(givers)}")
    return givers[0] if givers else None


def given(made: Prepared) -> Params:
    """Return the weights that the run starts from, or an empty mapping if no preparation returns weights."""
    name = giver(made)
    return {} if name is None else getattr(made[name], FIELD)


def attached(made: Any, weights: Params) -> Any:
    """Return a copy of the artifact with these weights."""
    if isinstance(made, BaseModel):
        return made.model_copy(update={FIELD: weights})
    return dataclasses.replace(made, **{FIELD: weights})


def fitting(family: ModelFamily, weights: Params) -> Params:
    """Return the weights in network order, because files do not preserve the order. Raises ModelError if the weights do
    not match the whole network or are not finite."""
    if wrong := mismatch(family, weights):
        raise ModelError(wrong)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool((tensor.abs() <= largest(name)).all()):
            raise ModelError(f"{name}: values must be finite, with a magnitude of at most {largest(name):g}")
    return {name: weights[name] for name in names_of(family)}


def names_of(family: ModelFamily) -> tuple[str, ...]:
    """Return the names of the network's weights and running statistics, in network order."""
    return tuple(blank(family).state_dict())


def mismatch(family: ModelFamily, weights: Params) -> str:
    """Describe up to six tensors that differ from the network in name, type or shape; empty if all tensors match."""
    wanted, found = _forms(blank(family).state_dict()), _forms(weights)
    wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    return "; ".join(
        f"{name}: expected {wanted.get(name, 'nothing')}, got {found.get(name, 'nothing')}" for name in wrong[:6]
    )


def _forms(params: Params) -> dict[str, str]:
    return {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in params.items()}
