"""A codec with all that a codec may have: random rounding, tensors of its own, a stream whose length depends on the
numbers."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_engine.core import seeds
from fl_engine.core.errors import IntegrityError
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.types import Header, Params


@dataclass(frozen=True)
class Deflated:
    """Whole multiples of a tensor's largest number over `levels`, rounded up or down at random so that the mean is
    right, as a compressed stream."""

    __pydantic_config__ = STRICT
    levels: Positive = 100.0

    def encode(self, tensors: Params, seed: int) -> Params:
        found: Params = {}
        for name, tensor in tensors.items():
            scale = float(tensor.abs().max()) / min(self.levels, 127.0) if tensor.numel() else 0.0
            exact = tensor.double().numpy() / (scale or 1.0)
            drawn = seeds.rng(seed, name).random(exact.shape)
            values = np.clip(np.floor(exact + drawn), -127, 127).astype(np.int8)
            found[name] = torch.frombuffer(bytearray(zlib.compress(values.tobytes())), dtype=torch.uint8)
            found[f"{name}/scale"] = torch.tensor([scale], dtype=torch.float64)
        return found

    def decode(self, encoded: Params, header: Header) -> Params:
        return {name: self._tensor(encoded, name, *header[name]) for name in header}

    def _tensor(self, encoded: Params, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count, unpacking = int(np.prod(shape, dtype=int)), zlib.decompressobj()
        try:
            value = unpacking.decompress(encoded[name].numpy().tobytes(), count + 1)
        except zlib.error as error:
            raise IntegrityError(f"{name} is no stream: {error}") from error
        if len(value) != count:
            raise IntegrityError(f"{name} holds {len(value)} numbers or more, {count} are expected")
        whole: Any = np.frombuffer(value, np.int8).reshape(shape).astype(np.float64)
        return (torch.from_numpy(whole) * encoded[f"{name}/scale"][0]).to(dtype).reshape(shape)

    def header(self, header: Header) -> Header:
        found: Header = {}
        for name, (_, shape) in header.items():
            count = int(np.prod(shape, dtype=int))
            found[name] = torch.uint8, (count + 5 * (count // 16000 + 1) + 6 + 13,)
            found[f"{name}/scale"] = torch.float64, (1,)
        return found
