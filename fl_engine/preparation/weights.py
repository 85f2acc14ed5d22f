"""Weights that a preparation gives: those of the whole network, with which the first round starts instead of fresh
ones.

Its artifact has a field for them, with a default, since JSON does not hold them:

    weights: Weights = field(default_factory=dict, compare=False, repr=False)

They are stored beside the artifact, as safetensors. Empty: the artifact gives none, and the run starts as usual.
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
"""By the network's names, float32, shapes as in its layout; running statistics among them."""


def gives_weights(kind: Preparation) -> bool:
    """Whether its artifact has a field for them."""
    artifact = kind.artifact
    if is_model(artifact):
        return FIELD in artifact.model_fields
    return dataclasses.is_dataclass(artifact) and any(field.name == FIELD for field in dataclasses.fields(artifact))


def giver(names: Iterable[str]) -> str | None:
    """Which of these preparations gives weights, if any. Raises ConfigError where two do."""
    from fl_engine.preparation import preparation  # whose preparations use `Weights`

    found = [name for name in names if gives_weights(preparation(name))]
    if len(found) > 1:
        raise ConfigError(
            f"the preparations {' and '.join(found)} give weights, and a run starts from one network's: let "
            "one of them do without"
        )
    return found[0] if found else None


def given(made: Prepared) -> Params:
    """The weights that the run starts from; empty where no preparation gives any. Raises as `giver`."""
    name = giver(made)
    return {} if name is None else getattr(made[name], FIELD)


def attached(made: Any, weights: Params) -> Any:
    """The artifact with these weights."""
    if isinstance(made, BaseModel):
        return made.model_copy(update={FIELD: weights})
    return dataclasses.replace(made, **{FIELD: weights})


def fitting(family: ModelFamily, weights: Params) -> Params:
    """In the network's order, which a file does not keep. Raises ModelError unless they are those of the whole network,
    by names, types, shapes and finite values."""
    wanted = blank(family).state_dict()
    if odd := sorted(wanted.keys() ^ weights.keys()):
        raise ModelError(f"{'no' if odd[0] in wanted else 'unknown'} {odd[0]} ({len(odd)} names differ)")
    for name, like in wanted.items():
        found = weights[name]
        if (found.dtype, found.shape) != (like.dtype, like.shape):
            raise ModelError(f"{name} is {_form(found)}, {_form(like)} is expected")
        if found.is_floating_point() and not bool((found.abs() <= largest(name)).all()):
            raise ModelError(f"{name} has numbers that are not finite, or beyond {largest(name):g}")
    return {name: weights[name] for name in wanted}


SHOWN = 6
"""How many names of a kind `mismatch` tells."""


def names_of(family: ModelFamily) -> tuple[str, ...]:
    """The names of the whole network's weights and statistics, in its order."""
    return tuple(_forms(family))


def mismatch(family: ModelFamily, weights: Params) -> str:
    """All in which these differ from the whole network's by name, type and shape, in one line; empty where nothing
    does."""
    wanted = _forms(family)
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


def _forms(family: ModelFamily) -> dict[str, str]:
    return {name: _form(tensor) for name, tensor in blank(family).state_dict().items()}


def _form(tensor: torch.Tensor) -> str:
    """`float32 (8, 3)`"""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
