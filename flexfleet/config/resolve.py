"""Makes what a configuration names: its algorithm, the seed of its partition, the smallest side of its images."""

from __future__ import annotations

import json
from dataclasses import fields

from pydantic import ValidationError

from fl_engine.aggregation import privacy
from fl_engine.algorithms import ALGORITHMS, CONTRACT, options_of
from fl_engine.algorithms.training import Training
from fl_engine.codecs import codec_of
from fl_engine.core.allowed import trust
from fl_engine.core.clients import client_metrics
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import adapter
from fl_engine.core.registry import check_names
from fl_engine.core.types import Codec, Codecs
from fl_engine.models.build import model_kind
from fl_engine.rounds import buffer
from fl_engine.training import user_code
from flexfleet.config.explain import explain
from flexfleet.config.schema import Config


def algorithm(config: Config) -> Algorithm:
    """Return the configured algorithm with checked hyper-parameters. Raises ConfigError."""
    kind = CONTRACT.of_section(config.algorithm)
    options = options_of(config.algorithm)
    known = [f.name for f in fields(kind) if f.name != "training"]  # type: ignore[arg-type]
    check_names("algorithm", options, known)
    training = adapter(Training).dump_python(config.training, mode="json")
    if training["fraction"] * config.rounds.over_provision > 1:
        raise ConfigError(
            f"training.fraction = {config.training.fraction} of the clients, times rounds.over_provision = "
            f"{config.rounds.over_provision}, is more than all: lower one of them"
        )
    _check_own(config)
    try:
        built: Algorithm = adapter(kind).validate_json(json.dumps({**options, "training": training}))
    except ValidationError as error:
        raise ConfigError(explain(error, kind, "algorithm.")) from error
    if "preparations" not in known:  # the algorithm's code names them, and no file
        trust(built.preparations)
    client_metrics(built)  # raises if a declaration is wrong
    buffer.check(built, config.rounds)
    rounds, run = config.settled().rounds, config.run
    exposed = {
        "rounds.norm_bound=null": rounds.bound is not None,
        "rounds.over_provision=1": rounds.over_provision != 1,
        "rounds.quorum=0": rounds.quorum != 0,
        "rounds.stop_simulated_s=null": rounds.stop_simulated_s is not None,
        "fleet.trace=null": config.fleet.trace is not None,
        "evaluate.on=server": config.evaluate.on == "clients",
        "pretrain.reference=false": config.pretrain.reference,
        "partition.proxy_shared=false": config.partition.proxy_shared,
        "noise.labels=0": config.noise.labels > 0,
        "run.secrets to a folder that outlives this machine, or to s3://another-bucket/prefix": (
            run.remote is not None and run.backend != "kubernetes" and run.secrets is None
        ),
    }
    privacy.check_settings(built, kind in ALGORITHMS.values(), exposed)
    return built


def _check_own(config: Config) -> None:
    """Raise ConfigError if a user's objective or optimizer cannot be imported, or does not fit the configured
    numerics."""
    named = {user_code.OBJECTIVE: config.training.objective, user_code.OPTIMIZER: config.training.optimizer}
    for what, name in named.items():
        if name is not None:
            user_code.function(name, what)
            if config.run.strategy == "batched":
                raise ConfigError(f"{what} takes one client at a time: set run.strategy to single or auto")
    if config.training.optimizer is not None and config.run.precision == "fp16":
        raise ConfigError(f"run.precision=fp16 supports only SGD: leave out {user_code.OPTIMIZER}, or set amp")


def codecs(config: Config) -> Codecs:
    """Return the codecs of both directions with checked options. Raises ConfigError."""
    found: dict[str, Codec | None] = {}
    for way, section in (("down", config.codec.down), ("up", config.codec.up)):
        try:
            found[way] = codec_of(section)
        except ValidationError as error:
            raise ConfigError(explain(error, Codecs, f"codec.{way}.")) from error
    return Codecs(**found)


def cut_seed(config: Config) -> int:
    """Return the seed that decides which samples are used, and which client holds them."""
    return config.seed if config.partition.seed is None else config.partition.seed


def min_side(config: Config) -> int:
    """Return the smallest image side that the configured network takes; 0 if it declares none."""
    return getattr(model_kind(config.model), "min_hw", 0)
