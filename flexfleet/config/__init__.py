"""params.yaml: `schema` says what it may hold, `read` reads it, `resolve` makes what it names."""

from flexfleet.config.read import load_config, load_with_algorithm, pair_of, parse, parse_with_algorithm, set_path
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
    "PRIVATE", "Config", "DatasetConfig", "FleetConfig", "PartitionConfig", "PretrainConfig", "PublishConfig", "Range",
    "RunConfig", "TrackingConfig", "TuneConfig", "algorithm", "codecs", "cut_seed", "flatten", "load_config",
    "load_with_algorithm", "min_side", "moves", "pair_of", "parse", "parse_with_algorithm", "public", "set_path",
    "shown",
]  # fmt: skip
