"""The states of clients (`KeepsClientState`), a file each:

    states/<sha256>.safetensors

A commit names the file of each client that has one. A file is written when the client's update is accepted, and only if
the state has changed; it is deleted when no kept commit names it any more. Its content never changes, so a commit's
states stay as they were, whatever a kill leaves of later rounds.

Where the coordinator holds a lease, the file's name begins with the lease's number: a coordinator that was replaced and
does not know it yet deletes nothing that its successor has written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fl_engine.core.errors import IntegrityError, brief
from fl_engine.core.types import Params
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import decode, encode, sha256

FOLDER = "states/"
FILE = re.compile(r"(?:([1-9][0-9]{0,17})-)?([0-9a-f]{64})\.safetensors")
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


class ClientStates:
    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._named: dict[int, frozenset[str]] = {}
        """By committed round, files."""

    def put(self, state: Params, before: str | None) -> str:
        """Writes the state; gives the name of its file. `before`: the file of the client's earlier state."""
        value = encode(state)
        name = f"{sha256(value)}.safetensors"
        if before is not None and before.rpartition("-")[2] == name:
            return before
        if self._checkpoints.lease is not None:
            name = f"{self._checkpoints.lease.number}-{name}"
        self._checkpoints.store.put(FOLDER + name, value)
        return name

    def get(self, name: str) -> Params:
        """Raises IntegrityError naming a file that is missing or damaged."""
        store = self._checkpoints.store
        value, uri = store.get(FOLDER + name), store.uri(FOLDER + name)
        if name.rpartition("-")[2] != f"{sha256(value)}.safetensors":
            raise IntegrityError(f"{uri} is damaged: its name is not its sha256")
        return decode(value, uri)

    def prune(self) -> None:
        """Deletes the files that no kept commit names. If a commit cannot be read it deletes none, because the files
        that this commit names are not known."""
        lease, store = self._checkpoints.lease, self._checkpoints.store
        files = store.list(FOLDER)
        if not files:
            return
        keep: set[str] = set()
        for round in self._checkpoints.with_state():
            if round not in self._named:
                try:
                    self._named[round] = frozenset(named(self._checkpoints.rest(round)).values())
                except IntegrityError:
                    return
            keep |= self._named[round]
        matches = ((key, FILE.fullmatch(key.removeprefix(FOLDER))) for key in files)
        ours = [key for key, found in matches if found and (lease is None or int(found[1] or 0) <= lease.number)]
        store.delete(*(key for key in ours if key.removeprefix(FOLDER) not in keep))
