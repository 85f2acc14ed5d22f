"""The codecs: how weights are encoded for transfer, down to a client and up again. A new one is a file and a line here.

`codec.down.name` and `codec.up.name` name them, or your own as `package.module:NAME` (see `types.Codec`). `identity`
stands for no codec. `exchange.coding` uses the codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fl_engine.codecs.casts import Half, Identity
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.errors import ConfigError, brief
from fl_engine.core.fields import adapter
from fl_engine.core.registry import Contract
from fl_engine.core.types import Codec, Codecs

CODECS: dict[str, type[Codec]] = {"identity": Identity, "half": Half, "qsgd": Qsgd}

CONTRACT: Contract[Codec] = Contract("codec", CODECS, Codec)


def codec_of(section: Any) -> Codec | None:
    """Return the codec of `{name: half}`, with options beside the name; None for `identity`. Raises pydantic's
    ValidationError."""
    found = CONTRACT.parse(section)
    return None if isinstance(found, Identity) else found


def section_of(codec: Codec | None) -> dict[str, Any]:
    """Return the JSON from which `codec_of` makes this codec."""
    kind = Identity if codec is None else type(codec)
    names = [name for name, registered in CODECS.items() if registered is kind]
    name = names[0] if names else f"{kind.__module__}:{kind.__qualname__}"
    options = {} if codec is None else adapter(kind).dump_python(codec, mode="json")
    return {"name": name, **options}


def codecs_of(sections: Mapping[str, Any]) -> Codecs:
    """Return the codecs of `{down: {name: ...}, up: {name: ...}}`. Raises ConfigError."""
    if sections.keys() != {"down", "up"} or not all(isinstance(each, Mapping) for each in sections.values()):
        raise ConfigError(
            f"codecs must be {{down: {{name: ...}}, up: {{name: ...}}}}, got {repr(dict(sections))[:200]}"
        )
    try:
        return Codecs(codec_of(sections["down"]), codec_of(sections["up"]))
    except ValidationError as error:
        raise ConfigError(f"codecs: {brief(error)}") from error


def sections_of(codecs: Codecs) -> dict[str, Any]:
    """Return the JSON from which `codecs_of` makes these codecs."""
    return {"down": section_of(codecs.down), "up": section_of(codecs.up)}


__all__ = ["CODECS", "CONTRACT", "Half", "Identity", "Qsgd", "codec_of", "codecs_of", "section_of", "sections_of"]
