"""Create the configurations of all runs of a comparison.

A comparison compares variants. A variant is an algorithm with its settings, and its label is its name in tables and
folders. All runs of a comparison are stored in one folder and have the same number of rounds. Therefore, a variant's
settings cannot change the number of rounds, or the locations of runs and tracking data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, masked, nearest
from fl_engine.core.fields import Moves
from fl_engine.core.text import read_yaml
from flexfleet.config import Config, flatten, moves
from flexfleet.config.dotted import Overrides, check_once, leaves, on_top
from flexfleet.config.explain import quoted
from flexfleet.config.run_names import check_name

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
SHARED = "shared"
"""Label that users cannot choose, because `<id>/shared-s0` contains the files that all runs with seed 0 share."""
FIXED = {
    "algorithm.name": "Pass the algorithms as a list, with a label for each variant",
    "seed": "Pass the seeds as a list",
}
SAME = (Moves.LENGTH, Moves.PLACE)
"""Kinds of parameters that must have the same value in all runs of a comparison."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    label: str
    seed: int
    config: Config
    at: Mapping[str, Any] = field(default_factory=dict)
    """Map the dotted name of each factor to its value in this run."""

    @property
    def name(self) -> str:
        """ID of the run and name of the run's folder."""
        return run_name(self.label, self.seed)

    @property
    def folder(self) -> Path:
        """Path of the run's folder inside the folder of the comparison."""
        return Path(self.config.run.store) / self.name


def run_name(label: str, seed: int) -> str:
    return f"{label}-s{seed}"


def folder_of(runs: Sequence[PlannedRun]) -> Path:
    """Return the folder that contains the runs of a comparison."""
    return Path(runs[0].config.run.store)


def labels_of(text: str) -> dict[str, str]:
    """Parse a string such as `flexfl,no_kd=flexfl` into {label: algorithm}. Raises ConfigError."""
    out: dict[str, str] = {}
    for part in text.split(","):
        label, sign, name = (word.strip() for word in part.partition("="))
        check_label(label)
        if label in out:
            raise ConfigError(f"algorithms: the label {label!r} occurs twice. Write a variant as label=name")
        out[label] = name if sign else label
    return out


def check_label(label: object) -> None:
    """Raise ConfigError if the label cannot be part of a folder name."""
    if not isinstance(label, str) or not LABEL.fullmatch(label) or label == SHARED:
        raise ConfigError.at(
            f"algorithms: a label must consist of letters, digits, '_', '-' and '.', and {SHARED!r} is reserved, got "
            f"{label!r}. Write a variant as label=name"
        )


def seeds_of(given: str | Iterable[Any]) -> tuple[int, ...]:
    """Parse seeds from a string such as `0,1,2`, or check a list of seeds. Raises ConfigError if a seed is not a whole
    number or occurs twice."""
    try:
        found = tuple(map(int, given.split(",")) if isinstance(given, str) else given)
    except ValueError:
        found = (given,)
    if not found or not all(type(seed) is int for seed in found) or len(set(found)) < len(found):
        raise ConfigError.at(f"seeds must be different whole numbers, such as 0,1,2, got {found!r}")
    return found


def accuracies_of(given: str | Iterable[Any]) -> tuple[float, ...]:
    """Parse accuracies from a string such as `0.4,0.45`, or check a list of accuracies. Return them in ascending order.
    Raises ConfigError if an accuracy is not a number above 0 and at most 1."""
    try:
        found = set(map(float, given.split(",")) if isinstance(given, str) else given)
    except ValueError:
        found = {given}
    if not all(isinstance(value, int | float) and 0 < value <= 1 for value in found):
        text = ", ".join(map(str, found))
        raise ConfigError.at(f"`to` must contain accuracies above 0 and at most 1, such as 0.4, got {text}")
    return tuple(sorted(found))


def by_label(overrides: Mapping[str, Any], labels: Iterable[str]) -> dict[str | None, Overrides]:
    """Group overrides by label (None: for all runs). The key `label:a.b` sets `a.b` for one variant.

    Raises ConfigError if a label is unknown, or if a parameter cannot be overridden.
    """
    out: dict[str | None, Overrides] = {None: {}, **{label: {} for label in labels}}
    for key, value in overrides.items():
        label, sign, path = (word.strip() for word in key.partition(":"))
        owner, path = (label, path) if sign else (None, label)
        if owner not in out:
            known = nearest(label, [each for each in out if each is not None])
            raise ConfigError(f"{key}: the label {label!r} does not exist{known}", code="config.unknown")
        for each in leaves({path: value}):
            if each in FIXED:
                raise ConfigError(f"{key} cannot be set. {FIXED[each]}", path=each)
        out[owner][path] = value
    return out


def label_overrides(labels: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, Overrides]:
    """Map each label to the variant's overrides, with the algorithm's name and the overrides for all runs.

    Args:
        labels: Map each variant's label to the name of its algorithm.
        overrides: Values by dotted name. A value for `label:a.b` applies to one variant.
    """
    given = by_label(overrides, labels)
    return {label: {**on_top(given[None], given[label]), "algorithm.name": name} for label, name in labels.items()}


def entries_from(
    labels: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int] | None,
    load: Callable[[Overrides], Config],
    id: str,
    factors: Mapping[str, Sequence[Any]] | None = None,
) -> list[PlannedRun]:
    """Return all runs of a comparison, grouped by seed. The run folders are in `<run.store>/<id>`. If `run.remote` is
    set, the ledgers are stored in `<run.remote>/<id>`.

    Args:
        labels: Map each variant's label to its overrides.
        seeds: Seeds for the runs of each variant; None for the seed in the configuration.
        load: Function that builds a configuration from overrides.
        id: The comparison's name.
        factors: Lists of values by dotted name. Each variant is run with every combination of values.

    Raises:
        ConfigError: A configuration is invalid, or variants differ in a parameter that must be the same in all runs.
    """
    check_name(id, "a comparison's id")
    combined = crossed(labels, factors or {})
    if seeds is None:
        base, at = next(iter(combined.values()))
        seeds = (load(on_top(labels[base], at)).seed,)
    out: list[PlannedRun] = []
    wrong: dict[str, dict[str, None]] = {}
    for seed, (label, (base, at)) in product(seeds, combined.items()):
        try:
            config = load(on_top(labels[base], {**at, "seed": seed}))
        except ConfigError as error:
            wrong.setdefault(str(error), {})[label] = None
            continue
        where = {"store": str(Path(config.run.store) / id)}
        if config.run.remote is not None:
            where["remote"] = f"{config.run.remote.rstrip('/')}/{id}"
        config = config.model_copy(update={"run": config.run.model_copy(update=where)})
        out.append(PlannedRun(label, seed, config, at))
    if wrong:
        raise ConfigError("; ".join(f"{', '.join(names)}: {what}" for what, names in wrong.items()))
    if apart := [key for key in varied(out) if moves(key) in SAME]:
        raise ConfigError(
            f"{', '.join(apart)} must be equal in all runs of a comparison. Set one value for all runs", path=apart[0]
        )
    return out


def varied(runs: Sequence[PlannedRun]) -> tuple[str, ...]:
    """Return the dotted names of the parameters that differ between runs with the same seed."""
    found: dict[str, None] = {}
    for seed in dict.fromkeys(entry.seed for entry in runs):
        flat = [flatten(entry.config) for entry in runs if entry.seed == seed]
        keys = dict.fromkeys(key for each in flat for key in each)
        found |= dict.fromkeys(k for k in keys if any(k not in each or each[k] != flat[0].get(k) for each in flat))
    return tuple(found)


def factors_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse factors (parameters with several values) from strings such as `training.lr=0.01,0.1`. Map the dotted name
    of each factor to a list of its values. Raises ConfigError."""
    out: dict[str, list[Any]] = {}
    for text in texts:
        path, sign, listed = (word.strip() for word in text.partition("="))
        if not sign or not path or not listed or path in out:
            raise ConfigError.at(f"--over must be a.b=value,value and name each parameter once, got {quoted(text)}")
        try:
            out[path] = read_yaml(f"[{listed}]")
        except yaml.YAMLError as error:
            message = masked(f"--over {text[:200]}: the values are not valid YAML: {error}")
            raise ConfigError(message, code="config.yaml", path="over") from error
    return out


def check_factors(factors: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a parameter cannot be a factor, or if it is also overridden in `given`."""
    for path in factors:
        if path in FIXED:
            raise ConfigError(f"over: {path} cannot be a factor. {FIXED[path]}", path=path)
    for key, value in given.items():
        check_once([("over", dict.fromkeys(factors)), (key, {key.rpartition(":")[2]: value})])


def crossed(labels: Iterable[str], factors: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Create a variant for each combination of a given variant and factor values. Map the label of each new variant to
    the label of the given variant and to the factor values by dotted name. Raises ConfigError."""
    for path, values in factors.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        if ":" in path or not is_list or any(isinstance(value, Mapping) for value in values):
            raise ConfigError(
                f"over: a factor must map a parameter's dotted name to a list of values, got {path}={quoted(values)}",
                path=path,
            )
    out: dict[str, tuple[str, dict[str, Any]]] = {}
    for label in labels:
        for values in product(*factors.values()):
            at = dict(zip(factors, values, strict=True))
            name = "-".join([label, *(f"{path.rpartition('.')[2]}{_word(value)}" for path, value in at.items())])
            if name in out:
                raise ConfigError.at(f"over: two combinations of values have the name {name}. Remove one")
            out[name] = (label, at)
    return out


def _word(value: Any) -> str:
    if isinstance(value, str):
        value = value.rpartition(":")[2]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value).replace("+", "")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", json.dumps(value)).strip("-")
