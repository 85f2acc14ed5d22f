"""Base classes of JSON files, and functions that read files and check their content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fl_engine.core.errors import IntegrityError, brief

R = TypeVar("R", bound=BaseModel)


class Strict(BaseModel):
    """Frozen pydantic model that rejects unknown keys and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Record(BaseModel):
    """Base class of the JSON records in a run's store."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1


def parsed(kind: type[R], value: bytes, name: str) -> R:
    """Parse the content of the file `name`. Raises IntegrityError with this name if the content is invalid."""
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a valid {kind.__name__} file: {brief(error)}") from error


def read_bytes(path: Path, expected: str | None = None) -> bytes:
    """Read a file from an earlier step. Raises IntegrityError if the file is missing or its sha256 is wrong."""
    try:
        value = path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}). Repeat the step that writes it") from error
    if expected is not None and (found := hashlib.sha256(value).hexdigest()) != expected:
        raise IntegrityError(
            f"{path} is damaged: its sha256 is {found[:12]}, expected {expected[:12]}. Restore the file, or "
            "delete it and repeat the step"
        )
    return value
