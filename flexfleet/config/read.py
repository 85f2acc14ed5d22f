"""Reads a configuration from a file and overrides, and checks it.

Every unknown key is an error that names the nearest one; nothing is converted silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from fl_engine.algorithms import ALGORITHMS
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.plain import check_plain, read_yaml
from fl_engine.core.registry import resolve
from fl_engine.datasets import DATASETS
from fl_engine.fleet.devices import Tier, named
from fl_engine.models import MODELS
from fl_engine.models.build import check_options
from flexfleet.config.explain import explain, short
from flexfleet.config.resolve import algorithm, codecs
from flexfleet.config.schema import Config


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The defaults, a YAML file on top (None: no file), `a.b=value` overrides on top of that; checked.

    The order of overrides does not matter: a model's or an algorithm's name counts before its options.
    """
    return load_with_algorithm(path, overrides)[0]


def load_with_algorithm(path: str | Path | None = None, overrides: Sequence[str] = ()) -> tuple[Config, Algorithm]:
    """`load_config`, and the algorithm that was built to check it."""
    values: Any = {}
    if path is not None:
        try:
            values = read_yaml(Path(path).read_text()) or {}
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the configuration {path} is no text: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of sections is expected, got {type(values).__name__}")
    values = _merge(Config().model_dump(mode="json"), values)
    pairs = [pair_of(override) for override in overrides]
    for key, value in sorted(pairs, key=lambda pair: not names_a_kind(pair[0])):
        set_path(values, key, value)
    return parse_with_algorithm(values)


def pair_of(override: str) -> tuple[str, Any]:
    """`a.b=value`, as after --set."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set takes a.b=value, got {short(override)}")
    try:
        return key.strip(), read_yaml(text)
    except yaml.YAMLError as error:
        said = masked(f"--set {override[:200]}: the value is not valid YAML: {error}")
        raise ConfigError(said) from error


KINDS = ("model", "algorithm", "codec.down", "codec.up")
"""Sections whose options are those of what they name."""


def names_a_kind(path: str) -> bool:
    """Whether the parameter of this dotted name decides which others there are."""
    section, _, last = path.rpartition(".")
    return section in KINDS and last == "name"


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets a dotted path in nested mappings. A new `name` of one of KINDS drops the old one's options."""
    *parents, last = path.split(".")
    here = values
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{path}: {part!r} is a value, not a section")
    if names_a_kind(path) and here.get("name") != value:
        here.clear()
    here[last] = value


def parse(values: Mapping[str, Any]) -> Config:
    """The defaults with `values` on top, section by section. Raises ConfigError for what is wrong: what arrived, what
    was expected, what to do."""
    return parse_with_algorithm(values)[0]


def parse_with_algorithm(values: Mapping[str, Any]) -> tuple[Config, Algorithm]:
    """`parse`, and the algorithm that was built to check the configuration."""
    try:
        check_plain(values)
        values = _merge(Config().model_dump(mode="json"), values)
        config = Config.model_validate_json(json.dumps(_with_named_fleet(values)))
    except ValidationError as error:
        raise ConfigError("; ".join([explain(error, Config), *_unknown_names(values)])) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration holds a value that is not plain data: {error}") from error
    wrong = _unknown_names(values)
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
    """Errors for data sets, networks and algorithms with unknown names, reported beside all other errors."""
    known: dict[str, tuple[Mapping[str, Any], str]] = {
        "dataset": (DATASETS, "data set"), "model": (MODELS, "model"), "algorithm": (ALGORITHMS, "algorithm")
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


def _with_named_fleet(values: dict[str, Any]) -> dict[str, Any]:
    """Writes `fleet.tiers: 8:1:1` out in full, so that a run's record says what its fleet was."""
    section = values.get("fleet")
    if not isinstance(section, Mapping) or not isinstance(section.get("tiers"), str):
        return values
    tiers = TypeAdapter(tuple[Tier, ...]).dump_python(named(section["tiers"]), mode="json")
    return {**values, "fleet": {**section, "tiers": tiers}}


def _merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A section given in part keeps its other defaults, but not the defaults of another model or algorithm."""
    out = dict(defaults)
    for key, value in values.items():
        old = defaults.get(key)
        if not isinstance(old, dict) or not isinstance(value, Mapping):
            out[key] = value
        elif key in ("model", "algorithm") and value.get("name", old["name"]) != old["name"]:
            out[key] = dict(value)
        else:
            out[key] = _merge(old, value)
    return out
