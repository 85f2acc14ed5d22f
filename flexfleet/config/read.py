"""Read a configuration from files and overrides, check the configuration, and build its algorithm and codecs. List the
values that a run uses, including the defaults of its algorithm and its network."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from fl_engine.aggregation import privacy
from fl_engine.algorithms import ALGORITHMS, CONTRACT, options_of
from fl_engine.algorithms.training import Training
from fl_engine.codecs import codec_of
from fl_engine.core.allowed import OURS, check_wheel, trust, trusted
from fl_engine.core.clients import client_metrics
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, holds_password, masked, together
from fl_engine.core.fields import Moves, adapter
from fl_engine.core.registry import check_names, resolve
from fl_engine.core.system import install_command
from fl_engine.core.text import check_plain, path_of, read_yaml
from fl_engine.core.types import Codec, Codecs, Pool
from fl_engine.datasets import DATASETS
from fl_engine.fleet.devices import Tier, named
from fl_engine.models import MODELS
from fl_engine.models.build import INIT, check_options, with_defaults
from fl_engine.rounds import buffer
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from fl_engine.training import user_code
from flexfleet.config.dotted import INSTEAD, applied, leaves, mapped, merged, parse_sets, platform_uri
from flexfleet.config.explain import config_error
from flexfleet.config.schema import PRIVATE, UNSET, Config, TrackingConfig, moves

log = logging.getLogger("flexfleet")

Files = str | Path | Sequence[str | Path] | None
"""Configuration files, or None. Later files override values from earlier files."""
Given = Mapping[str, Any] | Sequence[str]
"""Overrides as a mapping by dotted name, or as strings `a.b=value` from the command line."""

BACKENDS = ("kubernetes", "agents")
"""Sections that are used only if `run.backend` has the same name."""
COMMANDS = ("central", "tune")
"""Sections that federated runs do not use."""


def load_config(files: Files = None, overrides: Given = (), stored: bool = False) -> Config:
    """Return the checked configuration. Values in the files override the defaults, and `overrides` override the files.

    The order of overrides does not matter, because the name of a model or algorithm is set before its options.
    `stored`: see `parse`. Raises ConfigError.
    """
    return parse(values_of(files, overrides), stored)


def values_of(files: Files, overrides: Given) -> dict[str, Any]:
    """Merge the defaults, the files and the overrides, and return the unchecked values."""
    values = Config().model_dump(mode="json")
    for path in [files] if isinstance(files, str | Path) else files or ():
        values = merged(values, read_file(path))
    return applied(values, overrides if isinstance(overrides, Mapping) else parse_sets(overrides))


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the unchecked values of a configuration file. Raises ConfigError if the file is not valid YAML."""
    try:
        values = read_yaml(path_of(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(masked(f"{path} is not valid YAML: {error}"), code="config.yaml") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must map sections to options, got {type(values).__name__}", code="config.wrong_type")
    return values


def parse(values: Mapping[str, Any], stored: bool = False) -> Config:
    """Return the checked configuration, in which `values` override the defaults. Raises ConfigError.

    `stored`: True if the values come from a file such as run.json, not from the user's configuration. If True, the
    user's code is only imported if `core.allowed` permits the import.
    """
    return parse_with_algorithm(values, stored)[0]


def parse_schema(values: Mapping[str, Any]) -> Config:
    """Return the checked configuration like `parse`, but do not import the user's own code, because reading a run must
    not execute this code. Raises ConfigError."""
    defaults = Config().model_dump(mode="json")
    try:
        check_plain(values)
        values = _filled_in(merged(defaults, values))
        return Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise together([config_error(error, values, defaults), *_unknown_names(values)]) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration must contain only values with a JSON type: {error}") from error


def parse_with_algorithm(values: Mapping[str, Any], stored: bool = False) -> tuple[Config, Algorithm]:
    """Check the configuration like `parse`, and return it with the algorithm that it configures."""
    config = parse_schema(values)
    if not stored:
        trust(config.model_dump(mode="json"))
    if config.run.code is not None:
        wheel = code.pack(Path(config.run.code))
        digest = sha256(wheel)
        if stored:
            check_wheel(digest)
        else:
            trusted.add(digest)
        code.enable(wheel, digest, config.run.code)
    wrong = _unknown_names(values)
    if holds_password(config.dataset.root or ""):
        message = f"dataset.root must not contain a password, because run files show it; {INSTEAD['dataset.root']}"
        wrong.append(ConfigError(message, path="dataset.root"))
    built = list[Any]()
    for build in (lambda: algorithm(config), lambda: codecs(config), lambda: check_options(config.model)):
        try:
            built.append(build())
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise together(wrong)
    return config, built[0]


def _unknown_names(values: Mapping[str, Any]) -> list[ConfigError]:
    known: dict[str, tuple[Mapping[str, Any], str]] = {
        "dataset": (DATASETS, "data set"), "model": (MODELS, "model"), "algorithm": (CONTRACT.registry, "algorithm")
    }  # fmt: skip
    wrong = []
    for section, (registry, what) in known.items():
        name = values[section].get("name") if isinstance(values.get(section), Mapping) else None
        if isinstance(name, str) and ":" not in name:
            try:
                resolve(registry, name, what)
            except ConfigError as error:
                wrong.append(error)
    return wrong


def _filled_in(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the name of a fleet by its tiers, so that run.json contains the tiers. Replace `run.devices=auto` by this
    machine's device, and `tracking.mlflow=auto` by an address (see `_tracking_uri`). Remove options of the network and
    the algorithm whose value is UNSET."""
    names = ("fleet", "run", "tracking", "model", "algorithm")
    sections = {name: dict(values[name]) for name in names if isinstance(values.get(name), Mapping)}
    fleet, run, tracking = (sections.get(name, {}) for name in names[:3])
    for name, registry in (("model", MODELS), ("algorithm", ALGORITHMS)):
        for option in _options_of(registry):
            if sections.get(name, {}).get(option) == UNSET:
                del sections[name][option]
    if isinstance(fleet.get("tiers"), str):
        fleet["tiers"] = adapter(tuple[Tier, ...]).dump_python(named(fleet["tiers"]), mode="json")
    if run.get("devices") in ("auto", ["auto"]):
        run["devices"] = ["cuda" if torch.cuda.is_available() else "cpu"]
    if tracking.get("mlflow") == TrackingConfig().mlflow:
        tracking["mlflow"] = _tracking_uri()
    return {**values, **sections}


def _tracking_uri() -> str | None:
    """Return the address of MLflow from MLFLOW_TRACKING_URI. If this variable is not set, return a local database, or
    None if MLflow is not installed."""
    if given := platform_uri():
        return given
    if find_spec("mlflow") is None:
        _log_untracked()
        return None
    return "sqlite:///mlflow.db"


def _options_of(registry: Mapping[str, Any]) -> set[str]:
    """Return the options of all registered components. A typo, or an option of the user's own class, is not in it."""
    return {INIT, *(option.name for kind in registry.values() for option in fields(kind) if option.name != "name")}


@cache
def _log_untracked() -> None:
    log.info("MLflow is not installed, so runs are not tracked. To track runs: %s", install_command("tracking"))


def algorithm(config: Config) -> Algorithm:
    """Check the hyper-parameters of the configured algorithm, and build the algorithm. Raises ConfigError."""
    kind = CONTRACT.of_section(config.algorithm)
    options = options_of(config.algorithm)
    known = [f.name for f in fields(kind) if f.name != "training"]  # type: ignore[arg-type]
    check_names("algorithm", options, known)
    training = adapter(Training).dump_python(config.training, mode="json")
    if training["fraction"] * config.rounds.over_provision > 1:
        raise ConfigError.at(
            f"training.fraction times rounds.over_provision must be at most 1, got {config.training.fraction} * "
            f"{config.rounds.over_provision}",
            code="config.conflict",
        )
    _check_own_functions(config)
    try:
        built: Algorithm = adapter(kind).validate_json(json.dumps({**options, "training": training}))
    except ValidationError as error:
        raise config_error(error, options, dict.fromkeys(known), "algorithm.") from error
    if "preparations" not in known:  # the user has already trusted the code of the algorithm
        trust(built.preparations)
    client_metrics(built)  # check that the metrics are valid
    buffer.check(built, config.rounds)
    rounds, run = config.settled().rounds, config.run
    exposed = {
        "rounds.norm_bound=null": rounds.bound is not None,
        "rounds.over_provision=1": rounds.over_provision != 1,
        "rounds.quorum=0": rounds.quorum != 0,
        "rounds.stop_simulated_s=null": rounds.simulated_limit is not None,
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


def _check_own_functions(config: Config) -> None:
    own = {user_code.OBJECTIVE: config.training.objective, user_code.OPTIMIZER: config.training.optimizer}
    for path, name in own.items():
        if name is not None:
            user_code.function(name, path)
            if config.run.strategy == "batched":
                message = f"run.strategy must be single or auto, because {path} processes one client at a time"
                raise ConfigError(message, code="config.conflict", path="run.strategy")
    if config.training.optimizer is not None and config.run.precision == "fp16":
        cure = "because fp16 supports only SGD. Set run.precision=amp"
        message = f"run.precision must not be fp16 with {user_code.OPTIMIZER}, {cure}"
        raise ConfigError(message, code="config.conflict", path="run.precision")


def codecs(config: Config) -> Codecs:
    """Check the options of the codecs for both directions, and build the codecs. Raises ConfigError."""
    found: dict[str, Codec | None] = {}
    for way, section in (("down", config.codec.down), ("up", config.codec.up)):
        try:
            found[way] = codec_of(section)
        except ValidationError as error:
            raise config_error(error, section, {}, f"codec.{way}.") from error
    return Codecs(**found)


def cut_seed(config: Config) -> int:
    """Return the seed with which samples are selected and divided among the clients."""
    return config.seed if config.partition.seed is None else config.partition.seed


def public(config: Config) -> Config:
    """Return a copy of the configuration with masked passwords in PRIVATE sections, which other users may read."""
    values = config.model_dump(mode="json")
    return Config.model_validate_json(json.dumps(values | {name: mapped(values[name], _hidden) for name in PRIVATE}))


def shown(config: Config) -> dict[str, Any]:
    """Return the values of all parameters by dotted name, with masked passwords in addresses."""
    return {key: _hidden(value) for key, value in flatten(config).items()}


def _hidden(value: Any) -> Any:
    return masked(value) if isinstance(value, str) else value


def flatten(config: Config) -> dict[str, Any]:
    """Return the values of all parameters by dotted name."""
    return leaves(config.model_dump(mode="json"))


def used_options(config: Config, method: Algorithm, pool: Pool) -> dict[str, Any]:
    """Map the dotted names of all parameters to values. The value of a strategy is its name, or a mapping with the name
    and the changed options if these differ from the defaults.

    Values of `training` are the values that the algorithm actually uses. For example, FedSGD trains one local step. If
    `algorithm.selection` is null, the algorithm's own selection strategy is listed.
    """
    own: dict[str, Any] = {"algorithm.name": config.algorithm["name"]}
    for field in fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if field.name == "training":
            own |= {f"training.{each.name}": _value(getattr(value, each.name)) for each in fields(value)}
        else:
            own[f"algorithm.{field.name}"] = _value(value)
    if "algorithm.selection" in own and own["algorithm.selection"] is None and hasattr(method, "selector"):
        own["algorithm.selection"] = _value(method.selector(pool))
    own |= network_options(config)
    rest = {
        key: value
        for key, value in flatten(config).items()
        if not key.startswith("algorithm.") and not any(key.startswith(f"{whole}.") for whole in own)
    }
    return rest | own


def network_options(config: Config) -> dict[str, Any]:
    """Map the dotted names of the network's options to values."""
    return {f"model.{name}": _value(value) for name, value in with_defaults(config.model).items()}


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the values of parameters into two mappings: values that determine the results of a run, which never change,
    and all other values that are used. Passwords in addresses are masked."""
    unused = {*COMMANDS, *(name for name in BACKENDS if values.get("run.backend") != name), "schema_version"}
    used = {key: _hidden(value) for key, value in values.items() if key.partition(".")[0] not in unused}
    results = {key: value for key, value in used.items() if moves(key) is Moves.RESULT}
    return results, {key: value for key, value in used.items() if key not in results}


def _value(value: Any) -> Any:
    """Convert the value to JSON types."""
    plain_value, kind = to_jsonable_python(value, fallback=str), type(value)
    if not is_dataclass(value):
        return plain_value
    ours = kind.__module__.partition(".")[0] in OURS
    # A user's class may inherit `name` from a flexfleet class, so identify the user's class by its import path.
    if (name := plain_value.get("name") if ours else f"{kind.__module__}:{kind.__qualname__}") is None:
        return plain_value
    given = adapter(kind).dump_python(value, mode="json", exclude_defaults=True, exclude={"name"})
    return {"name": name, **given} if given else name
