"""Tensors that a commit names instead of holding, such as the states of clients (`KeepsClientState`), a file each:

    <folder>/<sha256>.safetensors

A file is written before the commit that names it, and deleted when no stored commit names it any more. Its content
never changes. If the coordinator holds a lease, the file's name begins with the lease's number, so that a coordinator
that was replaced deletes nothing that its successor has written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fl_engine.core.errors import IntegrityError, brief
from fl_engine.core.types import Params
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.serialization import laid_out
from fl_engine.storage.store import decode, sha256

FILE = re.compile(r"(?:([1-9][0-9]{0,17})-)?([0-9a-f]{64})\.safetensors")

FOLDER = "states/"
KEY = "rounds/client_states"
"""The key in a commit's JSON that maps each client to the file of its state."""

Files = dict[int, Annotated[str, Field(pattern=f"^{FILE.pattern}$")]]
FILES = TypeAdapter(Files)


class TensorFiles:
    """`folder` ends with a slash. `named` returns the files that a commit's JSON names, or raises IntegrityError."""

    def __init__(
        self, checkpoints: Checkpoints, folder: str, named: Callable[[Mapping[str, Any]], Iterable[str]]
    ) -> None:
        self._checkpoints, self._folder, self._names = checkpoints, folder, named
        self._named: dict[int, frozenset[str]] = {}
        """Maps each committed round to the files that its commit names."""

    def put(self, tensors: Params, before: str | None = None) -> str:
        """Write the tensors and return the file's name. `before`: a file that may hold the same tensors."""
        value = laid_out(tensors)
        name = f"{sha256(value)}.safetensors"
        if before is not None and before.rpartition("-")[2] == name:
            return before
        if self._checkpoints.lease is not None:
            name = f"{self._checkpoints.lease.number}-{name}"
        self._checkpoints.store.put(self._folder + name, value)
        return name

    def get(self, name: str) -> Params:
        """Raises IntegrityError, which names the file, if it is missing or damaged."""
        store = self._checkpoints.store
        value, uri = store.get(self._folder + name), store.uri(self._folder + name)
        if name.rpartition("-")[2] != f"{sha256(value)}.safetensors":
            raise IntegrityError(f"{uri} is damaged: its name is not its sha256")
        return decode(value, uri)

    def prune(self) -> None:
        """Delete the files that no stored commit names; none if a commit cannot be read, because its files are then
        unknown."""
        lease, store = self._checkpoints.lease, self._checkpoints.store
        files = store.list(self._folder)
        if not files:
            return
        keep, rounds = set[str](), self._checkpoints.with_state()
        self._named = {round: names for round, names in self._named.items() if round in rounds}
        for round in rounds:
            if round not in self._named:
                try:
                    self._named[round] = frozenset(self._names(self._checkpoints.rest(round)))
                except IntegrityError:
                    return
            keep |= self._named[round]
        matches = ((key, FILE.fullmatch(key.removeprefix(self._folder))) for key in files)
        ours = [key for key, found in matches if found and (lease is None or int(found[1] or 0) <= lease.number)]
        store.delete(*(key for key in ours if key.removeprefix(self._folder) not in keep))


def named(rest: Mapping[str, Any]) -> dict[int, str]:
    """Map each client to the file of its state that a commit names. Raises IntegrityError for other entries."""
    try:
        return FILES.validate_python(rest.get(KEY, {}))
    except ValidationError as error:
        raise IntegrityError(f"stored state: {KEY!r} does not name files of clients: {brief(error)}") from error


class ClientStates(TensorFiles):
    """The states of clients. A file is written when an update is accepted that changes the state."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        super().__init__(checkpoints, FOLDER, lambda rest: named(rest).values())
