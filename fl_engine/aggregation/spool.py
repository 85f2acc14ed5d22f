"""Tensors that wait for others to arrive: in memory while they are few, beyond that in an unnamed temporary file.

Some decisions need all updates of a round: the norm bound takes a median over them, the median aggregation takes one of
every element's values. Memory must not grow with their number. The operating system removes the file when the process
ends, however it ends.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.types import Params

HELD_BYTES = 64 * 2**20
"""Bytes that stay in memory. It takes up to twice as much: the C library's heap does not put a large aligned block into
a hole of the same size."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the file."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Spool:
    """Entries are numbered from 0, in the order in which they came. Raises EnvironmentFailure where the file cannot be
    written."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self._left = held_bytes
        self._entries: list[dict[str, Tensor | _Place]] = []
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tensors: Params) -> int:
        """The number of the new entry."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._left -= size
        kept: dict[str, Tensor | _Place] = dict(tensors)
        if self._left < 0:
            kept = {name: self._write(tensor) for name, tensor in tensors.items()}
        self._entries.append(kept)
        return len(self._entries) - 1

    def get(self, entry: int) -> Params:
        return {name: self.rows(entry, name) for name in self._entries[entry]}

    def rows(self, entry: int, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (along the first axis) of one tensor of an entry; all of it by default."""
        found = self._entries[entry][name]
        if isinstance(found, Tensor):
            return found if last is None and not first else found[first:last]
        if not found.shape:
            return self._read(found.offset, found.dtype, ())
        count = (found.shape[0] if last is None else min(last, found.shape[0])) - first
        row = math.prod(found.shape[1:])
        offset = found.offset + first * row * found.dtype.itemsize
        return self._read(offset, found.dtype, (count, *found.shape[1:]))

    def _write(self, tensor: Tensor) -> _Place:
        whole = tensor.detach().cpu().contiguous()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="flexfleet-")  # noqa: SIM115 - open as long as the spool is
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(_bytes_of(whole))
            self._file.flush()
        except OSError as error:
            raise EnvironmentFailure(
                f"{tempfile.gettempdir()} does not take a round's updates: {error.strerror}; TMPDIR names another one"
            ) from error
        return _Place(offset, tensor.dtype, tuple(tensor.shape))

    def _read(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        assert self._file is not None
        found = torch.empty(shape, dtype=dtype)
        into = _bytes_of(found)
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


def _bytes_of(whole: Tensor) -> memoryview:
    """The tensor's memory, without a copy."""
    return whole.view(-1).view(torch.uint8).numpy().data
