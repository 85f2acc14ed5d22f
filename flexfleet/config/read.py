"""Reads a configuration from files and overrides, and checks it.

Every unknown key is an error that names the nearest one; nothing is converted silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from fl_engine.algorithms import ALGORITHMS
from fl_engine.algorithms.training import Training
from fl_engine.core.allowed import check_wheel, trust, trusted
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, holds_password, masked
from fl_engine.core.fields import adapter, is_model
from fl_engine.core.registry import resolve
from fl_engine.core.text import check_plain, comment_of, path_of, read_yaml
from fl_engine.datasets import DATASETS
from fl_engine.fleet.devices import Tier, named
from fl_engine.models import MODELS
from fl_engine.models.build import check_options
from fl_engine.storage import code
from flexfleet.config.explain import explain, quoted
from flexfleet.config.form_fields import INSTEAD
from flexfleet.config.resolve import algorithm, codecs
from flexfleet.config.schema import Config, TrackingConfig

log = logging.getLogger("flexfleet")

Files = str | Path | Sequence[str | Path] | None
"""The files of a configuration, each on top of those before it; None: no file."""
MOST_CHARS = 2**22
"""The most characters of a configuration's file; it may be a pipe, whose size nobody knows."""


def load_config(files: Files = None, overrides: Sequence[str] = (), stored: bool = False) -> Config:
    """The defaults, YAML files on top, `a.b=value` overrides on top of those; checked.

    The order of overrides does not matter: a model's or an algorithm's name counts before its options. `stored`: see
    `parse`.
    """
    return load_with_algorithm(files, overrides, stored)[0]


def load_with_algorithm(
    files: Files = None, overrides: Sequence[str] = (), stored: bool = False
) -> tuple[Config, Algorithm]:
    """`load_config`, and the algorithm that was built to check it."""
    values = Config().model_dump(mode="json")
    for path in _listed(files):
        values = merged(values, read_file(path))
    for key, value in names_first(pair_of(override) for override in overrides):
        set_path(values, key, value)
    return parse_with_algorithm(values, stored)


def trust_given(files: Files, overrides: Sequence[str]) -> None:
    """Let this process import what the user's own files and overrides name (`core.allowed`)."""
    trust([*map(read_file, _listed(files)), *(pair_of(override)[1] for override in overrides)])


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


def pair_of(override: str) -> tuple[str, Any]:
    """`a.b=value`, as after --set."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set takes a.b=value, got {quoted(override)}")
    try:
        value, comment = read_yaml(text), comment_of(text)
    except yaml.YAMLError as error:
        said = masked(f"--set {override[:200]}: the value is not valid YAML: {error}")
        raise ConfigError(said) from error
    if comment:
        raise ConfigError(
            f"--set {quoted(key.strip())}: the value holds what is a comment for YAML, from '#' on: put all of it in "
            "quotes, or leave that out"
        )
    return key.strip(), value


POOLS, SPACE = "kubernetes.pools", "tune.space"
MAPPINGS = (POOLS, SPACE)
"""Parameters whose keys the user chooses. A later SPACE replaces an earlier one; later POOLS are merged by tier."""


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted name, the parameters that nested mappings set: of a section those in it, of MAPPINGS the whole."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        out |= leaves(value, f"{path}.") if isinstance(value, Mapping) and path not in MAPPINGS else {path: value}
    return out


def chosen_by_name(path: str) -> bool:
    """Whether the `name` of the mapping at this dotted name decides which other parameters it has: true of a model, an
    algorithm, a codec and of what they and `training` name, false of a plain section (`dataset`) and inside
    MAPPINGS, where `name` is a key of the user's."""
    if any(meet(path, each) for each in MAPPINGS):
        return False
    here: Any = Config
    for part in path.split(".") if path else ():
        if not is_model(here):
            return True
        field = here.model_fields.get(part)
        here = None if field is None else field.annotation
    return not (is_model(here) or here is Training)


def names_first(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Dotted names and values in the order in which they are set: first the names that decide which other parameters
    there are, from the outside to the inside, then all others as they were given."""

    def place(pair: tuple[str, Any]) -> tuple[bool, int]:
        path, value = pair
        section, _, last = path.rpartition(".")
        of_name = last == "name" and chosen_by_name(section)
        if of_name:
            return False, section.count(".")
        if isinstance(value, Mapping) and "name" in value and chosen_by_name(path):
            return False, path.count(".")
        return True, 0

    return sorted(pairs, key=place)


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets a dotted path in nested mappings. A mapping is merged into what stands there; a new `name` drops the options
    of the old one. Raises ConfigError where a part of the path is a value."""
    *parents, last = path.split(".")
    here = values
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{path}: {part!r} is a value, not a section")
    if last == "name" and here.get("name") != value and chosen_by_name(".".join(parents)):
        here.clear()
    here[last] = merged(here.get(last), value, path)


def merged(standing: Any, given: Any, path: str = "") -> Any:
    """What stands at a dotted name, with what is given on top of it: a mapping keeps the parameters that are not given,
    unless its `name` chooses something else, whose parameters are others. SPACE is replaced as a whole."""
    if not isinstance(standing, Mapping) or not isinstance(given, Mapping) or path == SPACE:
        return given
    if "name" in given and given["name"] != standing.get("name") and chosen_by_name(path):
        return dict(given)
    inner = {
        key: merged(standing.get(key), value, f"{path}.{key}" if path else str(key)) for key, value in given.items()
    }
    return {**standing, **inner}


def meet(one: str, other: str) -> bool:
    """Whether two dotted names are of the same setting, or one of a part of the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def giving_way(taken: Collection[str], path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is given at a dotted name, as dotted names and values that are set before the parameters `taken` and give
    way to them. A section falls into its parts, so that `names_first` sets all names of one section in order, and
    another `name` drops the options of this one; values at or above what is taken are left out. POOLS are never left
    out, because the pools that are taken are merged into them."""
    above = any(each.startswith(f"{path}.") for each in taken)
    if not isinstance(value, Mapping) or path in MAPPINGS:
        if path == POOLS or not (above or path in taken):
            yield path, value
    elif above and not ("name" in value and chosen_by_name(path)):
        for key, inner in value.items():
            yield from giving_way(taken, f"{path}.{key}", inner)
    else:
        yield path, value


def parse(values: Mapping[str, Any], stored: bool = False) -> Config:
    """The defaults with `values` on top, section by section. `stored`: the values come from a file that the user did
    not give as the configuration, such as a run.json, so what they name is imported only if `core.allowed` lets it.
    Raises ConfigError for what is wrong: what arrived, what was expected, what to do."""
    return parse_with_algorithm(values, stored)[0]


def parse_schema(values: Mapping[str, Any]) -> Config:
    """`parse` without importing or building what the configuration names: to look at somebody's run executes none of
    its code. Raises ConfigError for what the schema forbids."""
    try:
        check_plain(values)
        values = merged(Config().model_dump(mode="json"), values)
        return Config.model_validate_json(json.dumps(_as_here(_with_named_fleet(values))))
    except ValidationError as error:
        raise ConfigError("; ".join([explain(error, Config), *_unknown_names(values)])) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration holds a value that is not plain data: {error}") from error


def parse_with_algorithm(values: Mapping[str, Any], stored: bool = False) -> tuple[Config, Algorithm]:
    """`parse`, and the algorithm that was built to check the configuration."""
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


def _with_named_fleet(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Writes `fleet.tiers: 8:1:1` out in full, so that a run's record says what its fleet was."""
    section = values.get("fleet")
    if not isinstance(section, Mapping) or not isinstance(section.get("tiers"), str):
        return values
    tiers = adapter(tuple[Tier, ...]).dump_python(named(section["tiers"]), mode="json")
    return {**values, "fleet": {**section, "tiers": tiers}}


def _as_here(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Writes out what depends on this machine, so that a run's record says what was used: `run.devices: auto`, and the
    default of tracking.mlflow where MLflow is not installed, which is then off."""
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
