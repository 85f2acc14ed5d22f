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


Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}:[0-9]{1,15}$")]
"""The sha256, and after a colon the bytes."""


def sum_of(value: Value) -> str:
    return f"{sha256(value)}:{len(value)}"


def read_verified(store: Store, key: str, told: str | None) -> bytes:
    """What lies at a key, of which no more bytes are read than were told. Raises IntegrityError for other bytes than
    those of this sum, and where there is none."""
    if told is None:
        raise IntegrityError(f"{store.uri(key)}: the coordinator has not told its sha256; nothing of it is used")
    try:
        value = store.get(key, int(told.partition(":")[2]))
    except TooLarge as error:
        raise _another(store.uri(key), str(error)) from error
    if (found := sum_of(value)) != told:
        raise _another(store.uri(key), f"its sha256 and its bytes are {found}, {told} were told")
    return value


def _another(name: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{name} is not what the coordinator wrote: {why}; nothing of it is used. The run was resumed with other "
        "settings since, or by another version, or somebody else has written the file: resume the run, which gives new "
        "orders"
    )
