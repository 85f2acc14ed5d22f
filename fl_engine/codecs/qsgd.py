"""QSGD: unbiased stochastic quantization. Each bucket of values has a norm, and each value has a sign and a level.

The code follows section 3 of QSGD (Alistarh et al., Communication-Efficient SGD via Gradient Quantization and Encoding,
NeurIPS 2017) and section II-B of FedX. With s levels and the L2 norm |v| of the bucket that contains x, s x / |v| is
rounded up or down at random so that the expected result is s x / |v|.

- **Levels**: `bits` = q gives s = 2^q - 1, so a sign and a level take exactly q + 1 bits. A value is sent as the
  integer s + signed level, from 0 to 2 s. Negative zero is sent as +0.
- **Buckets**: each group of `bucket` consecutive elements of a tensor has a separate norm. The last bucket may be
  shorter. An error is at most one step |v| / s, and grows with the square root of the bucket size. For 2.4 M normally
  distributed values at 8 bits, the relative root mean square error is 3.6 % with buckets of 512, and 196 % with one
  norm. FedX uses one norm per tensor, and the QSGD paper also describes buckets.
- **Coding**: Levels are stored with a fixed width. Alternatively, the run lengths of zeros and the levels of other
  values are stored in Elias's omega code, and signs as single bits (FedX, section II-B). Both codings are lossless.
  The option `shorter` uses the shorter coding for each tensor.

Each tensor is sent as two tensors: a stream (one byte for the coding, then the codes), and `<name>/norm` (float32). A
generator seeded with `seed` and the tensor's name draws 24 bits per value. Steps below 2^-126, the smallest normal
float32, are set to 0.
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
from fl_engine.codecs.bits import Bytes
from fl_engine.core import seeds
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.fields import Count, Options
from fl_engine.core.types import Header, Params

MOST_LEVELS = 2**16 - 1
"""Maximum number of levels per sign, for 16 bits."""
FIXED, ELIAS = 0, 1
"""Values of the first byte of a stream, which identifies the coding."""
Levels = NDArray[np.int32]


@dataclass(frozen=True)
class Qsgd(Options):
    bits: Annotated[int, Field(ge=1, le=16)] = 8
    """Number of bits per level, from 1 to 16; the sign adds one bit."""
    levels: Annotated[int, Field(ge=1, le=MOST_LEVELS)] | None = None
    """Number of levels per sign, not counting 0; overrides `bits`. null: 2^bits - 1 levels."""
    bucket: Count | None = 512
    """Number of elements that share a norm; null: all elements of a tensor share a norm."""
    coding: Literal["shorter", "fixed", "elias"] = "shorter"
    """fixed: the same number of bits for each value; elias: run lengths of zeros, in Elias's omega code; shorter: the
    shorter of both codings for each tensor."""

    def encode(self, tensors: Params, seed: int) -> Params:
        """Quantize the tensors. Raises ModelError if a value is not finite or a norm exceeds the range of float32."""
        found: Params = {}
        for name, tensor in tensors.items():
            x = tensor.to(torch.float32).reshape(-1).numpy()
            norm = self._norms(name, x)
            levels = self._levels(x, self._steps(norm, len(x)), seeds.rng(seed, name))
            found[name] = torch.from_numpy(self._stream(levels))
            found[f"{name}/norm"] = torch.from_numpy(norm)
        return found

    def decode(self, encoded: Params, header: Header) -> Params:
        """Restore the tensors. Raises IntegrityError if a norm or a stream is malformed."""
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
        """Number of levels per sign, not counting 0."""
        return 2**self.bits - 1 if self.levels is None else self.levels

    @property
    def width(self) -> int:
        """Number of bits per value in the coding `fixed`, which stores integers from 0 to 2 s."""
        return (2 * self.s).bit_length()

    def _norms(self, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        if not len(x):
            return np.zeros(0, np.float32)
        squares = np.square(x, dtype=np.float64)
        exact = np.sqrt(np.add.reduceat(squares, np.arange(0, len(x), self.bucket or len(x))))
        if not np.isfinite(exact).all():
            raise ModelError(f"{name} must have finite values for QSGD, but contains infinite values or NaN")
        if (largest := exact.max()) >= np.finfo(np.float32).max:
            raise ModelError(
                f"the norm of {name} must be less than {np.finfo(np.float32).max:.3g} (float32), got {largest:.3g}"
            )
        found: NDArray[np.float32] = exact.astype(np.float32)
        found[found / np.float32(self.s) < np.finfo(np.float32).tiny] = 0
        return found

    def _steps(self, norm: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """Return the step size (the value of level 1) of each element. `count` is the number of elements."""
        return np.repeat(norm / np.float32(self.s), min(self.bucket or count, max(1, count)))[:count]

    def _levels(self, x: NDArray[np.float32], step: NDArray[np.float32], rng: np.random.Generator) -> Levels:
        """Return the signed levels, from -s to s."""
        exact = np.divide(x, step, out=np.zeros_like(x), where=step > 0)
        np.clip(exact, -self.s, self.s, out=exact)
        below = np.floor(exact)
        exact -= below
        return below.astype(np.int32) + (rng.random(len(x), dtype=np.float32) < exact)

    def _tensor(self, encoded: Params, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        norm, count = encoded[f"{name}/norm"].numpy(), math.prod(shape)
        if not (np.isfinite(norm).all() and (norm >= 0).all()):
            raise IntegrityError(f"{name}: norms must be finite and at least 0")
        try:
            levels = self._read(encoded[name].numpy(), count)
        except IntegrityError as error:
            raise IntegrityError(f"{name}: {error}") from None
        return torch.from_numpy(levels * self._steps(norm, count)).reshape(shape).to(dtype)

    def _most(self, count: int) -> int:
        """Return the maximum number of bytes of a stream for `count` values. An Elias-coded stream is longest if no
        value is 0. An additional zero lengthens the codeword of a run of zeros by at most 3 bits, whereas any other
        value requires at least 3 bits."""
        if self.coding != "elias":
            return packing.packed_size(count, self.width)
        head, longest = (packing.omega_size(np.array([each])) for each in (count + 1, self.s))
        return -(-(head + count * (1 + 1 + longest)) // 8)

    def _stream(self, levels: Levels) -> Bytes:
        if self.coding == "fixed":
            return _flagged(FIXED, packing.pack(levels + np.int32(self.s), self.width))
        at = np.flatnonzero(levels)
        runs, found = np.diff(at, prepend=-1), levels[at]  # `runs` is 1 plus the number of zeros before each value.
        sizes = np.abs(found)
        head = np.array([len(at) + 1])
        taken = packing.omega_size(head) + packing.omega_size(sizes) + len(at) + packing.omega_size(runs)
        if self.coding == "shorter" and -(-taken // 8) >= packing.packed_size(len(levels), self.width):
            return _flagged(FIXED, packing.pack(levels + np.int32(self.s), self.width))
        signs = (found < 0).view(np.uint8)
        parts = [*packing.omega_encode(head), *packing.omega_encode(sizes), signs, *packing.omega_encode(runs)]
        return _flagged(ELIAS, np.packbits(np.concatenate(parts)))

    def _read(self, stream: Bytes, count: int) -> Levels:
        flag = int(stream[0]) if len(stream) else None
        if flag not in {"fixed": (FIXED,), "elias": (ELIAS,), "shorter": (FIXED, ELIAS)}[self.coding]:
            raise IntegrityError(f"the first byte must be a valid flag for the coding {self.coding!r}, got {flag}")
        if flag == ELIAS:
            return self._read_elias(np.unpackbits(stream[1:]), count)
        levels = packing.unpack(stream[1:], count, self.width)
        if count and levels.max() > 2 * self.s:
            raise IntegrityError(f"levels must be at most {self.s}, got {levels.max() - self.s}")
        return levels - np.int32(self.s)

    def _read_elias(self, stream: packing.Bits, count: int) -> Levels:
        (head,), at = packing.omega_decode(stream, 0, 1, count + 1)
        sizes, at = packing.omega_decode(stream, at, int(head) - 1, self.s)
        signs, at = packing.take(stream, at, len(sizes))
        runs, at = packing.omega_decode(stream, at, len(sizes), count)
        packing.ended(stream, at)
        positions = np.cumsum(runs) - 1
        if len(positions) and positions[-1] >= count:
            raise IntegrityError(f"the stream must have {count} elements, got an element with index {positions[-1]}")
        levels = np.zeros(count, np.int32)
        levels[positions] = np.where(signs, -sizes, sizes)
        return levels


def _flagged(flag: int, codes: Bytes) -> Bytes:
    return np.concatenate([np.array([flag], np.uint8), codes])
