"""Half precision: every number as the nearest float16 (IEEE 754 binary16, ties to even): two bytes each.

An element is off by at most 2^-11 of itself, and by 2^-25 where it is below 2^-14. Rounding is the same in every round:
on the way down, what a round moves a weight by less than half a step of its float16 (about 2^-12 of the weight) is lost
when the weight is sent again. On the way up, where changes are coded, only those below 2^-25 are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT
from fl_engine.core.types import Header, Params


@dataclass(frozen=True)
class Identity:
    __pydantic_config__ = STRICT

    def encode(self, tensors: Params, seed: int) -> Params:
        return dict(tensors)

    def decode(self, encoded: Params, header: Header) -> Params:
        return dict(encoded)

    def header(self, header: Header) -> Header:
        return dict(header)


@dataclass(frozen=True)
class Half:
    __pydantic_config__ = STRICT
    bits: ClassVar[int] = 16
    """Of each number."""

    def encode(self, tensors: Params, seed: int) -> Params:
        """Raises ModelError for a finite number beyond float16; one that is not finite stays what it is."""
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
