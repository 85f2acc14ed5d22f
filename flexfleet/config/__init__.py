"""params.yaml: `schema` says what it may hold, `read` reads it, `resolve` makes what it names, `short` has the short
names. Names are imported when they are used, so that the command line reads `short` without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexfleet.config.read import (
        load_config,
        load_with_algorithm,
        pair_of,
        parse,
        parse_schema,
        parse_with_algorithm,
        set_path,
    )
    from flexfleet.config.resolve import algorithm, codecs, cut_seed, min_side
    from flexfleet.config.schema import (
        PRIVATE,
        Config,
        DatasetConfig,
        FleetConfig,
        PartitionConfig,
        PretrainConfig,
        PublishConfig,
        Range,
        RunConfig,
        TrackingConfig,
        TuneConfig,
        flatten,
        moves,
        public,
        shown,
    )

__all__ = [
    "PRIVATE",
    "Config",
    "DatasetConfig",
    "FleetConfig",
    "PartitionConfig",
    "PretrainConfig",
    "PublishConfig",
    "Range",
    "RunConfig",
    "TrackingConfig",
    "TuneConfig",
    "algorithm",
    "codecs",
    "cut_seed",
    "flatten",
    "load_config",
    "load_with_algorithm",
    "min_side",
    "moves",
    "pair_of",
    "parse",
    "parse_schema",
    "parse_with_algorithm",
    "public",
    "set_path",
    "shown",
]  # fmt: skip

READ = ("load_config", "load_with_algorithm", "pair_of", "parse", "parse_with_algorithm", "parse_schema", "set_path")
RESOLVE = ("algorithm", "codecs", "cut_seed", "min_side")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "read" if name in READ else "resolve" if name in RESOLVE else "schema"
    return getattr(import_module(f"{__name__}.{file}"), name)
