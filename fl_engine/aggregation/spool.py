"""Tensors that wait for other updates: in memory while they are few, beyond that in an unnamed temporary file.

The norm bound and the median need all updates of a round, but memory must not grow with their number. The operating
system removes the file when the process ends.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, NamedTuple, cast

import torch
from torch import Tensor

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.types import Params
from fl_engine.storage.serialization import bytes_of

IN_MEMORY_BYTES = 64 * 2**20
"""Bytes that stay in memory. Up to twice as much is used, because the C library does not put a large aligned block into
a hole of its size."""

Head = tuple[tuple[str, torch.dtype, torch.Size], ...]
"""Names, types and shapes of an entry's tensors."""


class _Place(NamedTuple):
    """The place of a tensor in an entry's bytes."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Written:
    """An entry in the file. Entries with equal heads share `places`."""

    offset: int
    places: dict[str, _Place]


class Spooled(Mapping[str, Tensor]):
    """An entry in a spool's file, by name. Each access reads the tensor again."""

    def __init__(self, spool: Spool, entry: int, places: Mapping[str, _Place]) -> None:
        self._spool, self._entry, self._places = spool, entry, places

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._places:
            raise KeyError(name)
        return self._spool.rows(self._entry, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._places[name].shape


class Spool:
    """Stores entries, numbered from 0. Raises EnvironmentFailure if the file cannot be written."""

    def __init__(self, held_bytes: int = IN_MEMORY_BYTES) -> None:
        self._left = held_bytes
        self._entries: list[Params | _Written] = []
        self._places: dict[Head, dict[str, _Place]] = {}
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tensors: Params) -> int:
        """Store an entry and return its number."""
        self._left -= sum([tensor.nbytes for tensor in tensors.values()])
        self._entries.append(dict(tensors) if self._left >= 0 else self._write(tensors))
        return len(self._entries) - 1

    def get(self, entry: int) -> Params:
        """Return the entry's tensors by name, a `Spooled` if it is in the file."""
        found = self._entries[entry]
        return cast(Params, Spooled(self, entry, found.places)) if isinstance(found, _Written) else found

    def rows(self, entry: int, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows `first` to `last` of one tensor of an entry; all by default."""
        found = self._entries[entry]
        if not isinstance(found, _Written):
            return found[name] if last is None and not first else found[name][first:last]
        place = found.places[name]
        if not place.shape:
            return self._read(found.offset + place.offset, place.dtype, ())
        count = (place.shape[0] if last is None else min(last, place.shape[0])) - first
        row = math.prod(place.shape[1:])
        offset = found.offset + place.offset + first * row * place.dtype.itemsize
        return self._read(offset, place.dtype, (count, *place.shape[1:]))

    def _write(self, tensors: Params) -> _Written:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="flexfleet-")  # noqa: SIM115 - open as long as the spool is
            offset = self._file.seek(0, os.SEEK_END)
            for tensor in tensors.values():
                self._file.write(bytes_of(tensor.detach().contiguous()))
            self._file.flush()
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot write a round's updates to {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR elsewhere"
            ) from error
        head = tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])
        if head not in self._places:
            self._places[head] = _places(head)
        return _Written(offset, self._places[head])

    def _read(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        assert self._file is not None
        found = torch.empty(shape, dtype=dtype)
        into = bytes_of(found)
        done = 0
        while done < len(into):
            try:
                read = os.preadv(self._file.fileno(), [into[done:]], offset + done)
            except OSError as error:
                raise EnvironmentFailure(f"a round's updates cannot be read again: {error.strerror}") from error
            if not read:
                raise EnvironmentFailure("the temporary file of a round's updates was cut off")
            done += read
        return found


def _places(head: Head) -> dict[str, _Place]:
    """Return the places of consecutive tensors."""
    found, offset = {}, 0
    for name, dtype, shape in head:
        found[name] = _Place(offset, dtype, tuple(shape))
        offset += shape.numel() * dtype.itemsize
    return found
