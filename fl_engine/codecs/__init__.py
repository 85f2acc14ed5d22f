"""Codecs encode weights for download and upload. To add a codec, write a class and extend `CODECS`.

The values of `codec.down.name` and `codec.up.name` are names of codecs, or `package.module:NAME` for a user's class
(see `types.Codec`). `identity` means that weights are not encoded. `exchange.coding` calls the codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import ValidationError

from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.errors import ConfigError, ModelError, brief
from fl_engine.core.fields import Options, adapter
from fl_engine.core.registry import Contract
from fl_engine.core.types import Codec, Codecs, Header, Params


@dataclass(frozen=True)
class Identity(Options):
    """Codec that does not change the tensors."""

    def encode(self, tensors: Params, seed: int) -> Params:
        return dict(tensors)

    def decode(self, encoded: Params, header: Header) -> Params:
        return dict(encoded)

    def header(self, header: Header) -> Header:
        return dict(header)


@dataclass(frozen=True)
class Half(Options):
    """Codec with half precision, which rounds every value to the nearest float16 (IEEE 754 binary16, ties to even).

    The relative error is at most 2^-11. For values below 2^-14, the absolute error is at most 2^-25. A download rounds
    the weights, so a change by less than half a float16 step (about 2^-12 of the weight) is lost in the next round.
    Uploads contain weight changes, so only weight changes below 2^-25 are lost.
    """

    bits: ClassVar[int] = 16

    def encode(self, tensors: Params, seed: int) -> Params:
        """Round the tensors to float16. Raises ModelError if a finite value exceeds the range of float16."""
        found = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if bool((found[name].isinf() & tensor.isfinite()).any()):
                largest, most = float(tensor[tensor.isfinite()].abs().max()), torch.finfo(torch.float16).max
                raise ModelError(f"{name}: magnitudes must be at most {most:g} (float16), got {largest:.3g}")
        return found

    def decode(self, encoded: Params, header: Header) -> Params:
        return {name: encoded[name].to(dtype) for name, (dtype, _) in header.items()}

    def header(self, header: Header) -> Header:
        return {name: (torch.float16, shape) for name, (_, shape) in header.items()}


CODECS: dict[str, type[Codec]] = {"identity": Identity, "half": Half, "qsgd": Qsgd}

CONTRACT: Contract[Codec] = Contract("codec", CODECS, Codec)


def codec_of(section: Any) -> Codec | None:
    """Return the codec for a section such as `{name: half}`, or None for `identity`. Raises pydantic's ValidationError
    if the section is not valid."""
    found = CONTRACT.parse(section)
    return None if isinstance(found, Identity) else found


def section_of(codec: Codec | None) -> dict[str, Any]:
    """Return the section from which `codec_of` creates the codec."""
    return adapter(dict[str, Any]).dump_python(CONTRACT.section(codec or Identity()), mode="json")  # type: ignore[no-any-return]


def codecs_of(sections: Mapping[str, Any]) -> Codecs:
    """Return the codecs for `{down: {name: ...}, up: {name: ...}}`. Raises ConfigError if a section is not valid."""
    if sections.keys() != {"down", "up"} or not all(isinstance(each, Mapping) for each in sections.values()):
        raise ConfigError(f"codecs must be {{down: {{name: ...}}, up: {{name: ...}}}}, got {repr(dict(sections))[:99]}")
    try:
        return Codecs(codec_of(sections["down"]), codec_of(sections["up"]))
    except ValidationError as error:
        raise ConfigError(f"codecs: {brief(error)}") from error


def sections_of(codecs: Codecs) -> dict[str, Any]:
    """Return the sections from which `codecs_of` creates the codecs."""
    return {"down": section_of(codecs.down), "up": section_of(codecs.up)}


__all__ = ["CODECS", "CONTRACT", "Half", "Identity", "Qsgd", "codec_of", "codecs_of", "section_of", "sections_of"]
