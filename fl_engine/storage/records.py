"""Records of a run's store: small JSON files with a schema, and where those of a round lie."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fl_engine.core.errors import IntegrityError, brief

R = TypeVar("R", bound=BaseModel)

WAY_OUT = "To go on from the last good commit, resume with --discard-damaged: the rounds after it are computed again"


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1


def round_folder(round: int, evaluates: bool = False) -> str:
    """Where the files of a round lie; those of its evaluation at the clients lie apart."""
    return f"rounds/{round:05d}/{'evaluation/' if evaluates else ''}"


def parsed(kind: type[R], value: bytes, name: str) -> R:
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a valid {kind.__name__} record: {brief(error)}") from error


def json_of(value: bytes, name: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{name} is no JSON: {error}. {WAY_OUT}") from error
