"""Values that are written to a store in pieces, so that a large model and its file are never both in memory.

A file of tensors is safetensors (https://github.com/huggingface/safetensors, "Format"): the header's length in 8 bytes,
little-endian; the header, JSON with the type, shape and place of each tensor; then their memory. The bytes are those
that the safetensors package writes, whose own writers need all bytes in memory or a file. That package reads files,
because their bytes may be a stranger's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fl_engine.core.errors import ClientError
from fl_engine.core.state import RANKS
from fl_engine.core.types import Params

PIECE = 2**24
"""Bytes of the largest piece of a tensor."""
MOST_HEADER = 100_000_000
"""The most bytes of a header that safetensors reads."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Bytes in parts. A part that is a tensor stands for its memory, which must not change until all is written."""

    parts: tuple[bytes | Tensor, ...]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes. A tensor is copied only if it is not contiguous in this machine's memory."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            else:
                memory = bytes_of(part.detach().cpu().contiguous())
                yield from (memory[start : start + PIECE] for start in range(0, len(memory), PIECE))

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)

    def __bytes__(self) -> bytes:
        return b"".join(self)


Value = bytes | Pieces


def pieces_of(value: Value) -> Iterator[bytes | memoryview]:
    return iter((value,)) if isinstance(value, bytes) else iter(value)


def digest(kind: str, value: Value) -> bytes:
    """Hash a value. `kind`: sha256, or md5 to find damage in transfer."""
    found = hashlib.new(kind, usedforsecurity=kind != "md5")
    for piece in pieces_of(value):
        found.update(piece)
    return found.digest()


def in_parts(value: Value, size: int) -> Iterator[bytes]:
    """Yield all bytes, `size` at a time."""
    held = bytearray()
    for piece in pieces_of(value):
        left = memoryview(piece)
        while left:
            taken = left[: size - len(held)]
            held += taken
            left = left[len(taken) :]
            if len(held) == size:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def laid_out(tensors: Params) -> Pieces:
    """Return the tensors as a file of safetensors. Equal tensors have equal bytes."""
    order = sorted(tensors, key=lambda name: (RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {}} if tensors else {}
    start = 0
    for name in order:
        tensor, end = tensors[name], start + tensors[name].nbytes
        header[name] = {"dtype": RANKS[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    told = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return Pieces((_header(told + b" " * (-len(told) % 8)), *(tensors[name] for name in order)))


def padded(value: Pieces, length: int) -> Pieces:
    """Extend a file of safetensors to `length` bytes by spaces at the end of its header. Raises ClientError if the
    format does not allow so many."""
    first, *rest = value.parts
    assert isinstance(first, bytes)
    more = length - len(value)
    if more < 0 or len(first) - 8 + more > MOST_HEADER:
        raise ClientError(
            f"an update of {len(value)} bytes cannot be uploaded as exactly {length}, as this S3 server requires. "
            "Use a server that supports POST policies"
        )
    return Pieces((_header(first[8:] + b" " * more), *rest))


def _header(told: bytes) -> bytes:
    return len(told).to_bytes(8, "little") + told


def bytes_of(whole: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, without a copy."""
    if not whole.numel():  # `view` refuses some strides of empty tensors
        return memoryview(b"")
    return whole.view(-1).view(torch.uint8).numpy().data
