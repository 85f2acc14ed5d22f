"""Files of a run's store: JSON records with a schema, and files that are verified against a known checksum."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_engine.core.errors import IntegrityError, TooLarge, brief
from fl_engine.storage.serialization import Value
from fl_engine.storage.store import Store, sha256

R = TypeVar("R", bound=BaseModel)

WAY_OUT = "To go on from the last good commit, resume with --discard-damaged: the rounds after it are computed again"

Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}:[0-9]{1,15}$")]
"""The sha256 of a file, a colon, and the number of its bytes."""


class Record(BaseModel):
    """The base of all JSON records."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1


def round_folder(round: int, evaluates: bool = False) -> str:
    """Return the prefix of a round's files, or of the files of its evaluation at the clients."""
    return f"rounds/{round:05d}/{'evaluation/' if evaluates else ''}"


def parsed(kind: type[R], value: bytes, name: str) -> R:
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a valid {kind.__name__} record: {brief(error)}") from error


def json_of(value: bytes, name: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise IntegrityError(f"{name} is not JSON: {error}. {WAY_OUT}") from error


def sum_of(value: Value) -> str:
    return f"{sha256(value)}:{len(value)}"


def read_verified(store: Store, key: str, expected: str | None) -> bytes:
    """Return the value of a key, and read no more bytes than `expected`. Raises IntegrityError if the value has another
    sum, because other processes may be able to write to the store."""
    if expected is None:
        raise IntegrityError(f"{store.uri(key)} is not used, because the coordinator has not sent its sha256")
    try:
        value = store.get(key, int(expected.partition(":")[2]))
    except TooLarge as error:
        raise _replaced(store.uri(key), str(error)) from error
    if (found := sum_of(value)) != expected:
        raise _replaced(store.uri(key), f"its sha256 and size are {found}, expected {expected}")
    return value


def _replaced(name: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{name} is not what the coordinator wrote, and is not used: {why}. Either the run was resumed with other "
        "settings, or somebody else wrote the file. Resume the run to get new assignments"
    )
