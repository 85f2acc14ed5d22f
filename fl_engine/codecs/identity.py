"""Tensors as they are, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

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
