"""Define the parameters of params.yaml (`schema`), and read configurations (`read`).

Submodules are imported on first use, so that the command line can import `dotted` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexfleet.config.read import (
        algorithm,
        codecs,
        cut_seed,
        flatten,
        load_config,
        parse,
        parse_schema,
        parse_with_algorithm,
        public,
        shown,
    )  # fmt: skip
    from flexfleet.config.schema import PRIVATE, Config, Range, moves

__all__ = [
    "PRIVATE", "Config", "Range", "algorithm", "codecs", "cut_seed", "flatten", "load_config", "moves", "parse",
    "parse_schema", "parse_with_algorithm", "public", "shown",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    files = (import_module(f"{__name__}.{file}") for file in ("schema", "read"))
    return next(getattr(file, name) for file in files if hasattr(file, name))
