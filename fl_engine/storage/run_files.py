"""Read files with a known checksum from a run's store."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from fl_engine.core.errors import IntegrityError, TooLarge
from fl_engine.core.types import Params
from fl_engine.storage.store import Store, Value, decode, sha256

WAY_OUT = "To continue from the last good commit, resume with --discard-damaged. Later rounds are computed again"

Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}:[0-9]{1,15}$")]
"""Checksum of a file: its SHA-256, a colon, and its size in bytes."""


def round_folder(round: int, evaluates: bool = False) -> str:
    """Return the key prefix of a round's files. `evaluates` selects the files of the round's evaluation."""
    return f"rounds/{round:05d}/{'evaluation/' if evaluates else ''}"


def json_of(value: bytes, name: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise IntegrityError(f"{name} must be valid JSON: {error}. {WAY_OUT}") from error


def sum_of(value: Value) -> str:
    return f"{sha256(value)}:{len(value)}"


def read_tensors(store: Store, key: str, most: int | None = None) -> Params:
    """Read a file whose name ends with its SHA-256 and `.safetensors`, and read at most `most` bytes. Raises
    IntegrityError if the file is missing or damaged."""
    value, uri = store.get(key, most), store.uri(key)
    if not key.endswith(f"{sha256(value)}.safetensors"):
        raise IntegrityError(f"{uri} is damaged: its SHA-256 is wrong")
    return decode(value, uri)


def read_verified(store: Store, key: str, expected: str | None) -> bytes:
    """Read a value and verify its checksum `expected`, because other processes may write to the store. Read at most the
    expected number of bytes. Raises IntegrityError if the checksum differs."""
    if expected is None:
        raise IntegrityError(f"{store.uri(key)} is not used, because the coordinator has not sent the file's SHA-256")
    try:
        value = store.get(key, int(expected.partition(":")[2]))
        if (found := sum_of(value)) == expected:
            return value
        why = f"expected the SHA-256 and size {expected}, got {found}"
    except TooLarge as error:
        why = str(error)
    name, cure = store.uri(key), "Resume the run to get new assignments"
    raise IntegrityError(f"{name} differs from the coordinator's file: {why}. {cure}")
