"""Codecs that keep tensors as they are, or cast them to half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT
from fl_engine.core.types import Header, Params


@dataclass(frozen=True)
class Identity:
    """Tensors as they are, bit for bit."""

    __pydantic_config__ = STRICT

    def encode(self, tensors: Params, seed: int) -> Params:
        return dict(tensors)

    def decode(self, encoded: Params, header: Header) -> Params:
        return dict(encoded)

    def header(self, header: Header) -> Header:
        return dict(header)


@dataclass(frozen=True)
class Half:
    """Half precision: every number as the nearest float16 (IEEE 754 binary16, ties to even).

    The error is at most 2^-11 of an element, or 2^-25 below 2^-14. On the way down a change of less than half a step of
    float16 (about 2^-12 of the weight) is lost in the next round. On the way up only changes below 2^-25 are lost.
    """

    __pydantic_config__ = STRICT
    bits: ClassVar[int] = 16
    """Bits of each number."""

    def encode(self, tensors: Params, seed: int) -> Params:
        """Encode. Raises ModelError for a finite number beyond float16. A number that is not finite is kept."""
        found = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if bool((found[name].isinf() & tensor.isfinite()).any()):
                largest, most = float(tensor[tensor.isfinite()].abs().max()), torch.finfo(torch.float16).max
                raise ModelError(f"{name} holds {largest:.3g}, and float16 ends at {most:g}")
        return found

    def decode(self, encoded: Params, header: Header) -> Params:
        return {name: encoded[name].to(dtype) for name, (dtype, _) in header.items()}

    def header(self, header: Header) -> Header:
        return {name: (torch.float16, shape) for name, (_, shape) in header.items()}
