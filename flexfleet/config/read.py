"""Reads a configuration from files and overrides, and checks it.

Every unknown key is an error that names the nearest one; nothing is converted silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from fl_engine.algorithms import CONTRACT as ALGORITHM
from fl_engine.core.allowed import check_wheel, trust, trusted
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, holds_password, masked
from fl_engine.core.fields import adapter
from fl_engine.core.registry import resolve
from fl_engine.core.text import check_plain, path_of, read_yaml
from fl_engine.datasets import DATASETS
from fl_engine.fleet.devices import Tier, named
from fl_engine.models import MODELS
from fl_engine.models.build import check_options
from fl_engine.storage import code
from flexfleet.config.explain import explain
from flexfleet.config.form_fields import INSTEAD
from flexfleet.config.overrides import apply, merged, parse_sets
from flexfleet.config.resolve import algorithm, codecs
from flexfleet.config.schema import Config, TrackingConfig

log = logging.getLogger("flexfleet")

Files = str | Path | Sequence[str | Path] | None
"""The files of a configuration, each on top of those before it; None: no file."""
Given = Mapping[str, Any] | Sequence[str]
"""Overrides, or the `a.b=value` texts of a command line."""
MOST_CHARS = 2**22
"""The most characters of a configuration's file; it may be a pipe, whose size nobody knows."""


def load_config(files: Files = None, overrides: Given = (), stored: bool = False) -> Config:
    """Return the checked configuration: the defaults, the files on top, `overrides` on top of those.

    The order of overrides does not matter: a model's or an algorithm's name counts before its options. `stored`: see
    `parse`. Raises ConfigError.
    """
    return parse(values_of(files, overrides), stored)


def values_of(files: Files, overrides: Given) -> dict[str, Any]:
    """Return the unchecked values of `load_config`."""
    values = Config().model_dump(mode="json")
    for path in _listed(files):
        values = merged(values, read_file(path))
    apply(values, overrides if isinstance(overrides, Mapping) else parse_sets(overrides))
    return values


def trust_given(files: Files, overrides: Mapping[str, Any]) -> None:
    """Let this process import what the user's own files and overrides name (`core.allowed`)."""
    trust([*map(read_file, _listed(files)), overrides])


def _listed(files: Files) -> Sequence[str | Path]:
    return [files] if isinstance(files, str | Path) else files or ()


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the values in a configuration's file, unchecked. Raises ConfigError if it holds no mapping."""
    try:
        with open(path_of(path), encoding="utf-8") as file:
            text = file.read(MOST_CHARS + 1)
        if len(text) > MOST_CHARS:
            raise ConfigError(f"{path} has more than {MOST_CHARS:,} characters: is it a configuration?")
        values = read_yaml(text) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is no text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(masked(f"{path} is not valid YAML: {error}")) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of sections is expected, got {type(values).__name__}")
    return values


def parse(values: Mapping[str, Any], stored: bool = False) -> Config:
    """Return the checked configuration of the defaults with `values` on top. `stored`: the values come from a file that
    the user did not give as the configuration, such as a run.json, so names in it are imported only if `core.allowed`
    permits it. Raises ConfigError."""
    return parse_with_algorithm(values, stored)[0]


def parse_schema(values: Mapping[str, Any]) -> Config:
    """Like `parse`, but import and build nothing that the configuration names, so that looking at somebody's run
    executes none of its code. Raises ConfigError."""
    try:
        check_plain(values)
        values = merged(Config().model_dump(mode="json"), values)
        return Config.model_validate_json(json.dumps(_as_here(_with_named_fleet(values))))
    except ValidationError as error:
        raise ConfigError("; ".join([explain(error, Config), *_unknown_names(values)])) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration holds a value that is not plain data: {error}") from error


def parse_with_algorithm(values: Mapping[str, Any], stored: bool = False) -> tuple[Config, Algorithm]:
    """Like `parse`; also return the algorithm."""
    config = parse_schema(values)
    if not stored:
        trust(config.model_dump(mode="json"))
    if config.run.code is not None:
        wheel = code.pack(Path(config.run.code))
        if stored:
            check_wheel(wheel.sha256, stored=True)
        else:
            trusted.add(wheel.sha256)
        code.enable(wheel.value, wheel.sha256, config.run.code)
    wrong = _unknown_names(values)
    if holds_password(config.dataset.root or ""):
        wrong.append(
            f"dataset.root holds a user or a password, and a run's files show parameters: {INSTEAD['dataset.root']}"
        )
    built: Algorithm | None = None
    try:
        built = algorithm(config)
    except ConfigError as error:
        wrong.append(str(error))
    try:
        codecs(config)
    except ConfigError as error:
        wrong.append(str(error))
    try:
        check_options(config.model)
    except ConfigError as error:
        wrong.append(str(error))
    if not config.run.devices:
        wrong.append("run.devices is empty: name at least one torch device, e.g. [cpu]")
    if wrong or built is None:
        raise ConfigError("; ".join(dict.fromkeys(wrong)))
    return config, built


def _unknown_names(values: Mapping[str, Any]) -> list[str]:
    """Return errors for unknown data sets, networks and algorithms, to be reported beside all other errors."""
    known: dict[str, tuple[Mapping[str, Any], str]] = {
        "dataset": (DATASETS, "data set"), "model": (MODELS, "model"), "algorithm": (ALGORITHM.registry, "algorithm")
    }  # fmt: skip
    wrong = []
    for section, (registry, what) in known.items():
        name = values[section].get("name") if isinstance(values.get(section), Mapping) else None
        if isinstance(name, str) and ":" not in name:
            try:
                resolve(registry, name, what)
            except ConfigError as error:
                wrong.append(str(error))
    return wrong


def _with_named_fleet(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the name of a fleet by its tiers, so that a run's record says what its fleet was."""
    section = values.get("fleet")
    if not isinstance(section, Mapping) or not isinstance(section.get("tiers"), str):
        return values
    tiers = adapter(tuple[Tier, ...]).dump_python(named(section["tiers"]), mode="json")
    return {**values, "fleet": {**section, "tiers": tiers}}


def _as_here(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace what depends on this machine, so that a run's record says what was used: `run.devices: auto`, and the
    default of tracking.mlflow if MLflow is not installed."""
    run, tracking = values.get("run"), values.get("tracking")
    if isinstance(run, Mapping) and run.get("devices") in ("auto", ["auto"]):
        values = {**values, "run": {**run, "devices": ["cuda" if torch.cuda.is_available() else "cpu"]}}
    by_default = isinstance(tracking, Mapping) and tracking.get("mlflow") == TrackingConfig().mlflow
    if by_default and find_spec("mlflow") is None:
        _tell_untracked()
        values = {**values, "tracking": {**tracking, "mlflow": None}}  # type: ignore[dict-item]
    return values


@cache
def _tell_untracked() -> None:
    log.info(
        "MLflow is not installed, so runs are in their folders alone; to track them: pip install 'flexfleet[tracking]'"
    )
