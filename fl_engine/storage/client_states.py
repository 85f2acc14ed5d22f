"""The states of clients (`KeepsClientState`), a file each in `states/`.

A commit names the file of each client that has one. A file is written when the client's update is accepted, and only if
the state has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fl_engine.core.errors import IntegrityError, brief
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.kept_files import FILE, KeptFiles

FOLDER = "states/"
KEY = "rounds/client_states"
"""Key of a commit's JSON, beside the fields of the algorithm's state: the name of each client's file."""

Files = dict[int, Annotated[str, Field(pattern=f"^{FILE.pattern}$")]]
FILES = TypeAdapter(Files)


def named(rest: Mapping[str, Any]) -> dict[int, str]:
    """By client, the file that a commit names. Raises IntegrityError where that is none."""
    try:
        return FILES.validate_python(rest.get(KEY, {}))
    except ValidationError as error:
        raise IntegrityError(f"stored state: {KEY!r} does not name files of clients: {brief(error)}") from error


class ClientStates(KeptFiles):
    def __init__(self, checkpoints: Checkpoints) -> None:
        super().__init__(checkpoints, FOLDER, lambda rest: named(rest).values())
