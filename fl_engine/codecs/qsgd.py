"""QSGD: stochastic quantization to a norm, and a sign and a level for each number. Unbiased.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017, Section 3, as in FedX (Section II-B): with the L2 norm |v| of the bucket of x, and s levels,
s x / |v| is rounded up or down at random so that its mean is right.

- **Levels**: `bits` = q gives s = 2^q - 1, so a sign and a level take exactly q + 1 bits. A number is sent as
  s + level, from 0 to 2 s. There is only one zero, +0.
- **Buckets**: a norm for every `bucket` consecutive elements of a tensor; the last bucket may be shorter. An error is
  at most a step |v| / s and grows with the square root of the bucket: for 2.4 M normal numbers at 8 bits it is 3.6 %
  with buckets of 512, and 196 % with one norm (root mean square). FedX has one norm; QSGD has buckets too.
- **Coding**: lossless, in fixed width, or run lengths of zeros, signs and levels in Elias's omega code (FedX, Section
  II-B); `shorter` takes the shorter one for each tensor.

A tensor is sent as a stream (a byte for the coding, then the codes) and `<name>/norm`, float32. A generator of `seed`
and the tensor's name draws 24 bits for each number. Steps below 2^-126, float32's least normal number, count as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fl_engine.codecs import bits as packing
from fl_engine.codecs import elias
from fl_engine.codecs.bits import Bytes
from fl_engine.core import seeds
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.fields import STRICT, Count
from fl_engine.core.types import Header, Params

MOST_LEVELS = 2**16 - 1
"""The most levels of each sign, those of 16 bits."""
FIXED, ELIAS = 0, 1
"""The first byte of a stream."""
Levels = NDArray[np.int32]


@dataclass(frozen=True)
class Qsgd:
    __pydantic_config__ = STRICT

    bits: Annotated[int, Field(ge=1, le=16)] = 8
    """q: a level takes q bits, a sign one more. 1 to 16."""
    levels: Annotated[int, Field(ge=1, le=MOST_LEVELS)] | None = None
    """Levels of each sign, without 0; then `bits` is not used. null: 2^bits - 1."""
    bucket: Count | None = 512
    """Elements that share a norm; null: all of a tensor."""
    coding: Literal["shorter", "fixed", "elias"] = "shorter"
    """fixed: sign and level in q + 1 bits; elias: runs of zeros and Elias's omega code; shorter: of each tensor, the
    shorter."""

    def encode(self, tensors: Params, seed: int) -> Params:
        """Encode. Raises ModelError for a number that is not finite, and for a norm beyond float32."""
        found: Params = {}
        for name, tensor in tensors.items():
            x = tensor.to(torch.float32).reshape(-1).numpy()
            norm = self._norms(name, x)
            levels = self._levels(x, self._steps(norm, len(x)), seeds.rng(seed, name))
            found[name] = torch.from_numpy(self._stream(levels))
            found[f"{name}/norm"] = torch.from_numpy(norm)
        return found

    def decode(self, encoded: Params, header: Header) -> Params:
        """Decode. Raises IntegrityError for an impossible norm, and for a stream that `encode` does not make."""
        return {name: self._tensor(encoded, name, *header[name]) for name in header}

    def header(self, header: Header) -> Header:
        found: Header = {}
        for name, (_, shape) in header.items():
            count = math.prod(shape)
            found[name] = torch.uint8, (1 + self._most(count),)
            found[f"{name}/norm"] = torch.float32, (-(-count // (self.bucket or max(1, count))),)
        return found

    @property
    def s(self) -> int:
        """Levels of each sign, without 0."""
        return 2**self.bits - 1 if self.levels is None else self.levels

    @property
    def width(self) -> int:
        """Bits of a number from 0 to 2 s in fixed width."""
        return (2 * self.s).bit_length()

    # --------------------------------------------------------------------------------------------- numbers and levels
    def _norms(self, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the L2 norm of each bucket."""
        if not len(x):
            return np.zeros(0, np.float32)
        squares = np.square(x, dtype=np.float64)
        exact = np.sqrt(np.add.reduceat(squares, np.arange(0, len(x), self.bucket or len(x))))
        if not np.isfinite(exact).all():
            raise ModelError(f"{name} holds numbers that are not finite, and these have no level")
        if (largest := exact.max()) >= np.finfo(np.float32).max:
            raise ModelError(f"the norm of {name} is {largest:.3g}, and float32 ends at {np.finfo(np.float32).max:.3g}")
        found: NDArray[np.float32] = exact.astype(np.float32)
        found[found / np.float32(self.s) < np.finfo(np.float32).tiny] = 0
        return found

    def _steps(self, norm: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """Return the value of a level for each of `count` elements."""
        return np.repeat(norm / np.float32(self.s), min(self.bucket or count, max(1, count)))[:count]

    def _levels(self, x: NDArray[np.float32], step: NDArray[np.float32], rng: np.random.Generator) -> Levels:
        """Return the levels, from -s to s."""
        exact = np.divide(x, step, out=np.zeros_like(x), where=step > 0)
        np.clip(exact, -self.s, self.s, out=exact)
        below = np.floor(exact)
        exact -= below
        return below.astype(np.int32) + (rng.random(len(x), dtype=np.float32) < exact)

    def _tensor(self, encoded: Params, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        norm, count = encoded[f"{name}/norm"].numpy(), math.prod(shape)
        if not (np.isfinite(norm).all() and (norm >= 0).all()):
            raise IntegrityError(f"{name}: a norm is not finite, or less than 0")
        try:
            levels = self._read(encoded[name].numpy(), count)
        except IntegrityError as error:
            raise IntegrityError(f"{name}: {error}") from None
        return torch.from_numpy(levels * self._steps(norm, count)).reshape(shape).to(dtype)

    # --------------------------------------------------------------------------------------------- levels and streams
    def _most(self, count: int) -> int:
        """Return the bytes of the longest stream. Elias's is longest without zeros: r zeros make a run's codeword at
        most 3 r bits longer, and any other number takes at least 3 bits (an empty run, a sign, a level)."""
        if self.coding != "elias":
            return packing.packed_size(count, self.width)
        head, longest = (elias.size(np.array([each])) for each in (count + 1, self.s))
        return -(-(head + count * (1 + 1 + longest)) // 8)

    def _stream(self, levels: Levels) -> Bytes:
        if self.coding == "fixed":
            return _flagged(FIXED, packing.pack(levels + np.int32(self.s), self.width))
        at = np.flatnonzero(levels)
        runs, found = np.diff(at, prepend=-1), levels[at]  # a run's length and 1
        sizes = np.abs(found)
        head = np.array([len(at) + 1])
        taken = elias.size(head) + elias.size(sizes) + len(at) + elias.size(runs)
        if self.coding == "shorter" and -(-taken // 8) >= packing.packed_size(len(levels), self.width):
            return _flagged(FIXED, packing.pack(levels + np.int32(self.s), self.width))
        signs = (found < 0).view(np.uint8)
        parts = [*elias.encode(head), *elias.encode(sizes), signs, *elias.encode(runs)]
        return _flagged(ELIAS, packing.packed(parts))

    def _read(self, stream: Bytes, count: int) -> Levels:
        flag = int(stream[0]) if len(stream) else None
        if flag not in {"fixed": (FIXED,), "elias": (ELIAS,), "shorter": (FIXED, ELIAS)}[self.coding]:
            raise IntegrityError(f"the stream begins with {flag}, which is no coding that {self.coding!r} makes")
        if flag == ELIAS:
            return self._read_elias(packing.unpacked(stream[1:]), count)
        levels = packing.unpack(stream[1:], count, self.width)
        if count and levels.max() > 2 * self.s:
            raise IntegrityError(f"a level is {levels.max() - self.s}, there are {self.s}")
        return levels - np.int32(self.s)

    def _read_elias(self, stream: packing.Bits, count: int) -> Levels:
        (head,), at = elias.decode(stream, 0, 1, count + 1)
        sizes, at = elias.decode(stream, at, int(head) - 1, self.s)
        signs, at = packing.take(stream, at, len(sizes))
        runs, at = elias.decode(stream, at, len(sizes), count)
        packing.ended(stream, at)
        places = np.cumsum(runs) - 1
        if len(places) and places[-1] >= count:
            raise IntegrityError(f"the stream must end within {count} elements, got element {places[-1]}")
        levels = np.zeros(count, np.int32)
        levels[places] = np.where(signs, -sizes, sizes)
        return levels


def _flagged(flag: int, codes: Bytes) -> Bytes:
    return np.concatenate([np.array([flag], np.uint8), codes])
