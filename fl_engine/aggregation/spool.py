"""Store tensors in memory, and beyond a size limit in an unnamed temporary file.

The norm bound and the median need all updates of a round, but memory must not grow with the number of updates. The
operating system deletes the file when the process ends.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.types import Params
from fl_engine.storage.store import bytes_of

IN_MEMORY_BYTES = 64 * 2**20
"""Maximum number of bytes of tensors in memory. The process may need twice as much memory, because the C library cannot
reuse a freed block for a large aligned block of the same size."""


class _Place(NamedTuple):
    """Byte offset, type and shape of a tensor in an entry."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Spooled(Mapping[str, Tensor]):
    """Mapping from names to the tensors of an entry in the spool's file. Each access reads the file."""

    def __init__(self, file: io.BufferedRandom, offset: int, places: Mapping[str, _Place]) -> None:
        self._file, self._offset, self._places = file, offset, places

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading the file."""
        return self._places[name].shape

    def rows(self, name: str, first: int, last: int | None) -> Tensor:
        place = self._places[name]
        shape, offset = place.shape, self._offset + place.offset
        if shape:
            offset += first * math.prod(shape[1:]) * place.dtype.itemsize
            shape = (len(range(*slice(first, last).indices(shape[0]))), *shape[1:])
        tensor = torch.empty(shape, dtype=place.dtype)
        try:
            self._file.seek(offset)
            self._file.readinto(bytes_of(tensor))
        except OSError as error:
            raise EnvironmentFailure(f"cannot read the temporary file of updates: {error.strerror}") from error
        return tensor


class Spool:
    """Store of entries (dicts of tensors), numbered from 0. Raises EnvironmentFailure if the file cannot be written."""

    def __init__(self, held_bytes: int = IN_MEMORY_BYTES) -> None:
        self._left = held_bytes
        self._entries: list[Params | Spooled] = []
        self._file: io.BufferedRandom | None = None

    def put(self, tensors: Params) -> int:
        """Store an entry and return its number."""
        self._left -= sum([tensor.nbytes for tensor in tensors.values()])
        self._entries.append(dict(tensors) if self._left >= 0 else self._write(tensors))
        return len(self._entries) - 1

    def get(self, entry: int) -> Params:
        """Map names to the tensors of an entry. The result is a `Spooled` if the entry is stored in the file."""
        return cast(Params, self._entries[entry])

    def rows(self, entry: int, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Return the rows `first` to `last` - 1 of a tensor in an entry. The default is all rows."""
        stored = self._entries[entry]
        if isinstance(stored, Spooled):
            return stored.rows(name, first, last)
        return stored[name] if last is None and not first else stored[name][first:last]

    def _write(self, tensors: Params) -> Spooled:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="flexfleet-")  # noqa: SIM115 - open as long as the spool is
            offset = self._file.seek(0, os.SEEK_END)
            for tensor in tensors.values():
                self._file.write(bytes_of(tensor.detach().contiguous()))
            self._file.flush()
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot write updates to {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to another folder"
            ) from error
        return Spooled(self._file, offset, _places(tuple([(name, t.dtype, t.shape) for name, t in tensors.items()])))


@lru_cache(maxsize=256)
def _places(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> dict[str, _Place]:
    found, offset = {}, 0
    for name, dtype, shape in tensors:
        found[name] = _Place(offset, dtype, tuple(shape))
        offset += shape.numel() * dtype.itemsize
    return found
