"""params.yaml: `schema` has its parameters, `read` reads it, `resolve` builds what it names.

Names are imported when they are used, so that the command line reads `form_fields` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexfleet.config.overrides import Overrides, set_path
    from flexfleet.config.read import load_config, parse, parse_schema, parse_with_algorithm
    from flexfleet.config.resolve import algorithm, codecs, cut_seed, min_side
    from flexfleet.config.schema import PRIVATE, Config, Range, flatten, moves, public, shown

_FILES = {
    "overrides": ("Overrides", "set_path"),
    "read": ("load_config", "parse", "parse_schema", "parse_with_algorithm"),
    "resolve": ("algorithm", "codecs", "cut_seed", "min_side"),
    "schema": ("PRIVATE", "Config", "Range", "flatten", "moves", "public", "shown"),
}
_HOME = {name: file for file, names in _FILES.items() for name in names}

__all__ = [
    "PRIVATE", "Config", "Overrides", "Range", "algorithm", "codecs", "cut_seed", "flatten", "load_config", "min_side",
    "moves", "parse", "parse_schema", "parse_with_algorithm", "public", "set_path", "shown",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
