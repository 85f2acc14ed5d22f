"""Values that a store is given in pieces, so that the file of a large model is never in memory beside the model.

A file of tensors is safetensors (https://github.com/huggingface/safetensors, "Format"): the header's length in 8 bytes,
little-endian; the header, JSON with the type, shape and place of each tensor; then their memory. It is written as the
safetensors package writes it, byte for byte, whose own writers need all bytes in memory or a file. Reading, where the
bytes may be a stranger's, is left to that package.
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
    """Bytes in parts. A part that is a tensor stands for its memory, which must stay as it is until all is written."""

    parts: tuple[bytes | Tensor, ...]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """May be repeated. A tensor is copied only if it is not in one piece in this machine's memory."""
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
    """`kind`: sha256 or md5; MD5 shows damage on the way, and vouches for nothing."""
    found = hashlib.new(kind, usedforsecurity=kind != "md5")
    for piece in pieces_of(value):
        found.update(piece)
    return found.digest()


def in_parts(value: Value, size: int) -> Iterator[bytes]:
    """All bytes, `size` at a time."""
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
    """The tensors as a file of safetensors. The same tensors give the same bytes."""
    order = sorted(tensors, key=lambda name: (RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {}} if tensors else {}  # as in every file so far: their sha256 are known
    start = 0
    for name in order:
        tensor, end = tensors[name], start + tensors[name].nbytes
        header[name] = {"dtype": RANKS[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    told = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return Pieces((_header(told + b" " * (-len(told) % 8)), *(tensors[name] for name in order)))


def padded(value: Pieces, length: int) -> Pieces:
    """A file of safetensors, made `length` long by spaces at the end of its header, which the format allows. Raises
    ClientError where that is more than it allows."""
    first, *rest = value.parts
    assert isinstance(first, bytes)
    more = length - len(value)
    if more < 0 or len(first) - 8 + more > MOST_HEADER:
        raise ClientError(
            f"an update of {len(value)} bytes cannot be uploaded as exactly {length}, which is how this S3 server is "
            "told a limit: use a server that takes POST policies"
        )
    return Pieces((_header(first[8:] + b" " * more), *rest))


def _header(told: bytes) -> bytes:
    return len(told).to_bytes(8, "little") + told


def bytes_of(whole: Tensor) -> memoryview:
    """The memory of a contiguous tensor, without a copy."""
    if not whole.numel():  # its strides may be any, which `view` refuses
        return memoryview(b"")
    return whole.view(-1).view(torch.uint8).numpy().data
