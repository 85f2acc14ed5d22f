"""Store tensors, for example clients' states (`KeepsClientState`), in files that a commit names:

    <folder>/<sha256>.safetensors

A file is written before the first commit that names it, and deleted when no stored commit names it anymore. Files never
change. If the coordinator holds a lock, file names begin with the lock's number, so that a replaced coordinator cannot
delete its successor's files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import Params
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.run_files import read_tensors
from fl_engine.storage.store import laid_out, sha256

FILE = re.compile(r"(?:([1-9][0-9]{0,17})-)?([0-9a-f]{64})\.safetensors")

FOLDER = "states/"
KEY = "rounds/client_states"
"""Key in a commit's JSON. The value maps each client to the name of its state's file."""


class TensorFiles:
    """The tensor files in a folder, whose name ends with a slash. The function `named` returns the file names in a
    commit's JSON, or raises IntegrityError."""

    def __init__(
        self, checkpoints: Checkpoints, folder: str, named: Callable[[Mapping[str, Any]], Iterable[str]]
    ) -> None:
        self._checkpoints, self._folder, self._names = checkpoints, folder, named
        self._named: dict[int, frozenset[str]] = {}
        """Map each committed round to the file names in its commit."""
        self.behind: TensorFiles | None = None
        """Files that are read if this folder lacks them, and never changed."""

    def put(self, tensors: Params, before: str | None = None) -> str:
        """Write the tensors and return the file's name. `before` is the name of an existing file, which is reused if it
        contains the same tensors."""
        value = laid_out(tensors)
        name = f"{sha256(value)}.safetensors"
        if before is not None and before.rpartition("-")[2] == name:
            return before
        if self._checkpoints.lock is not None:
            name = f"{self._checkpoints.lock.number}-{name}"
        self._checkpoints.store.put(self._folder + name, value)
        return name

    def get(self, name: str) -> Params:
        """Return the tensors in a file. Raises IntegrityError if the file is missing or damaged."""
        try:
            return read_tensors(self._checkpoints.store, self._folder + name)
        except IntegrityError:
            if self.behind is None:
                raise
            return self.behind.get(name)

    def prune(self) -> None:
        """Delete files that no stored commit names. If a commit cannot be read, delete no file."""
        lock, store = self._checkpoints.lock, self._checkpoints.store
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
        ours = [key for key, found in matches if found and (lock is None or int(found[1] or 0) <= lock.number)]
        store.delete(*(key for key in ours if key.removeprefix(self._folder) not in keep))


def named(rest: Mapping[str, Any]) -> dict[int, str]:
    """Return the mapping of clients to state files in a commit's JSON."""
    return {int(client): file for client, file in rest.get(KEY, {}).items()}
