"""The sha256 and the length of a file, told to whoever reads it: since others may be able to write the store, a device
or a pod accepts only what the coordinator wrote."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fl_engine.core.errors import IntegrityError, TooLarge
from fl_engine.storage.pieces import Value
from fl_engine.storage.store import Store, sha256

Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}:[0-9]{1,15}$")]
"""The sha256, and after a colon the bytes."""


def sum_of(value: Value) -> str:
    return f"{sha256(value)}:{len(value)}"


def read(store: Store, key: str, told: str | None) -> bytes:
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
