"""Weights that a preparation returns: those of the whole network, with which the first round starts.

The preparation's artifact has a field for them. It has a default, because the weights are stored as safetensors beside
the artifact's JSON:

    weights: Weights = field(default_factory=dict, compare=False, repr=False)

If it is empty, the run starts with fresh weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, GetPydanticSchema
from pydantic_core import core_schema

from fl_engine.core.contracts import ModelFamily, Preparation
from fl_engine.core.errors import ConfigError, ModelError
from fl_engine.core.fields import is_model
from fl_engine.core.slicing import blank, largest
from fl_engine.core.types import Params, Prepared

FIELD = "weights"

Weights = Annotated[Params, GetPydanticSchema(lambda *_: core_schema.any_schema())]
"""By the network's names, float32, in the shapes of its layout, with running statistics."""


def gives_weights(kind: Preparation) -> bool:
    """Whether its artifact has a field for weights."""
    artifact = kind.artifact
    if is_model(artifact):
        return FIELD in artifact.model_fields
    return dataclasses.is_dataclass(artifact) and any(field.name == FIELD for field in dataclasses.fields(artifact))


def giver(names: Iterable[str]) -> str | None:
    """The one of these preparations that returns weights, if any. Raises ConfigError if two do."""
    from fl_engine.preparation import preparation  # whose preparations use `Weights`

    found = [name for name in names if gives_weights(preparation(name))]
    if len(found) > 1:
        raise ConfigError(
            f"the preparations {' and '.join(found)} both return weights, but a run starts from one network's"
        )
    return found[0] if found else None


def given(made: Prepared) -> Params:
    """The weights that the run starts from; empty if no preparation returns any."""
    name = giver(made)
    return {} if name is None else getattr(made[name], FIELD)


def attached(made: Any, weights: Params) -> Any:
    """The artifact with these weights."""
    if isinstance(made, BaseModel):
        return made.model_copy(update={FIELD: weights})
    return dataclasses.replace(made, **{FIELD: weights})


def fitting(family: ModelFamily, weights: Params) -> Params:
    """The weights in the network's order, which a file does not keep. Raises ModelError if they are not those of the
    whole network, or not finite."""
    if wrong := mismatch(family, weights):
        raise ModelError(wrong)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool((tensor.abs() <= largest(name)).all()):
            raise ModelError(f"{name} has numbers that are not finite, or beyond {largest(name):g}")
    return {name: weights[name] for name in names_of(family)}


SHOWN = 6
"""Names of a kind that `mismatch` lists."""


def names_of(family: ModelFamily) -> tuple[str, ...]:
    """The names of the whole network's weights and statistics, in its order."""
    return tuple(blank(family).state_dict())


def mismatch(family: ModelFamily, weights: Params) -> str:
    """All differences from the whole network by name, type and shape, in one line; empty if there are none."""
    wanted = {name: _form(tensor) for name, tensor in blank(family).state_dict().items()}
    found = {name: _form(tensor) for name, tensor in weights.items()}
    odd = [f"{n} is {found[n]} instead of {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
    kinds = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another type or shape": odd,
    }
    return "; ".join(_counted(kind, names) for kind, names in kinds.items() if names)


def _counted(kind: str, names: list[str]) -> str:
    more = len(names) - SHOWN
    return f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{f' and {more} more' if more > 0 else ''}"


def _form(tensor: torch.Tensor) -> str:
    """`float32 (8, 3)`"""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
