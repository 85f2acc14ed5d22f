"""Makes one configuration for each run of a comparison, from its algorithms, seeds and settings.

A setting for one label may be any parameter, with two exceptions: the number of rounds, and where runs are stored and
tracked, are the same for all runs, since a comparison puts figures of the same rounds into one folder.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, masked, nearest
from fl_engine.core.fields import Moves
from fl_engine.core.text import need_plain, read_yaml
from flexfleet.config import Config, flatten, moves
from flexfleet.config.explain import quoted
from flexfleet.config.overrides import Overrides, leaves, meet, on_top
from flexfleet.config.run_names import plain

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
RESERVED = ("shared",)
"""`<id>/shared-s0` is the folder of what the runs of seed 0 share."""
FIXED = {
    "algorithm.name": "the algorithms are given as a list of their own (--algorithms), a variant as label=name there",
    "seed": "the seeds are given as a list of their own (--seeds)",
}
SAME = (Moves.LENGTH, Moves.PLACE)
"""What all runs of a comparison have in common, whatever parameters its labels vary."""


@dataclass(frozen=True)
class Entry:
    """One run of a comparison."""

    label: str
    seed: int
    config: Config
    at: Mapping[str, Any] = field(default_factory=dict)
    """The label's values of the factors, by dotted name."""

    @property
    def name(self) -> str:
        """Its run id, which is also its folder's name in the comparison's folder."""
        return run_name(self.label, self.seed)


def run_name(label: str, seed: int) -> str:
    return f"{label}-s{seed}"


def labels_of(text: str) -> dict[str, str]:
    """Return the algorithm of each label in `flexfl,no_kd=flexfl`. Raises ConfigError."""
    out: dict[str, str] = {}
    for part in _listed(text, "algorithms", "flexfl,all_large"):
        label, sign, name = (word.strip() for word in part.partition("="))
        name = name if sign else label
        if not name:
            raise ConfigError(f"algorithms: {part!r} names no algorithm; a variant is label=name")
        if not LABEL.fullmatch(label) or label in RESERVED:
            raise ConfigError(
                f"algorithms: {label!r} cannot be a label, which becomes part of a folder's name (letters, digits, "
                f"'_', '-', '.'; not {', '.join(RESERVED)}): give one, label={name}"
            )
        if label in out:
            raise ConfigError(f"algorithms: the label {label!r} is there twice; a variant is label=name")
        out[label] = name
    return out


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds in `0,1,2`. Raises ConfigError."""
    parts = _listed(text, "seeds", "0,1,2")
    try:
        need_plain(parts)
        return checked_seeds([int(part) for part in parts])
    except ValueError:
        raise ConfigError(f"seeds: expected whole numbers, e.g. 0,1,2, got {text!r}") from None


def checked_seeds(seeds: Iterable[Any]) -> tuple[int, ...]:
    """Return the seeds. Raises ConfigError for what is not a whole number, and for a seed that is given twice."""
    found = tuple(seeds)
    if not found or not all(type(seed) is int for seed in found):
        raise ConfigError(f"seeds: expected whole numbers, e.g. 0,1,2, got {found!r}")
    if twice := [str(seed) for seed, n in Counter(found).items() if n > 1]:
        raise ConfigError(f"seeds: given more than once: {', '.join(twice)}")
    return found


def accuracies_of(text: str) -> tuple[float, ...]:
    """Return the accuracies in `0.4,0.45`, ascending. Raises ConfigError."""
    parts = _listed(text, "accuracies to reach", "0.4,0.45")
    try:
        need_plain(parts)
        return checked_accuracies([float(part) for part in parts])
    except ValueError:
        raise ConfigError(f"accuracies to reach: expected numbers, e.g. 0.4,0.45, got {text!r}") from None


def checked_accuracies(values: Iterable[Any]) -> tuple[float, ...]:
    """Return the accuracies, ascending. Raises ConfigError for what is not a share."""
    found = set(values)
    if not all(isinstance(value, int | float) and 0 < value <= 1 for value in found):
        raise ConfigError(
            f"accuracies to reach: expected shares above 0 and at most 1, got {', '.join(map(str, found))}"
        )
    return tuple(sorted(found))


def _listed(text: str, what: str, example: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{what}: expected a list without gaps, e.g. {example}, got {text!r}")
    return parts


def by_label(overrides: Mapping[str, Any], labels: Iterable[str]) -> dict[str | None, Overrides]:
    """Return the overrides of all runs (None), and those of each label: `label:a.b` is `a.b` of that label.

    Raises ConfigError for an unknown label, and for a parameter that is not given as an override.
    """
    out: dict[str | None, Overrides] = {None: {}, **{label: {} for label in labels}}
    for key, value in overrides.items():
        label, sign, path = (word.strip() for word in key.partition(":"))
        owner, path = (label, path) if sign else (None, label)
        if owner not in out:
            known = nearest(label, [one for one in out if one is not None])
            raise ConfigError(f"{key}: no algorithm of this comparison is labelled {label!r}{known}")
        for each in _inside(path, value):
            if each in FIXED:
                raise ConfigError(f"{key}: {FIXED[each]}")
        out[owner][path] = value
    return out


def _inside(path: str, value: object) -> Iterator[str]:
    """Yield the dotted name, and those inside a mapping."""
    yield path
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _inside(f"{path}.{key}", inner)


def entries(
    labels: Iterable[str],
    seeds: Sequence[int],
    configure: Callable[[str, int], Config],
    id: str,
    at: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Entry]:
    """Return all runs, seed by seed, in the folder `<run.store>/<id>`, with ledgers under `<run.remote>/<id>` if that
    is set. `configure` returns the configuration of a label and a seed. Raises ConfigError, which names the labels."""
    plain(id, "a comparison's id")
    out: list[Entry] = []
    wrong: dict[str, dict[str, None]] = {}
    for seed in seeds:
        for label in labels:
            try:
                config = configure(label, seed)
            except ConfigError as error:
                wrong.setdefault(str(error), {})[label] = None
                continue
            where = {"store": str(Path(config.run.store) / id)}
            if config.run.remote is not None:
                where["remote"] = f"{config.run.remote.rstrip('/')}/{id}"
            config = config.model_copy(update={"run": config.run.model_copy(update=where)})
            out.append(Entry(label, seed, config, dict((at or {}).get(label, {}))))
    if wrong:
        raise ConfigError("; ".join(f"{', '.join(told)}: {what}" for what, told in wrong.items()))
    if apart := [key for key in varied(out) if moves(key) in SAME]:
        raise ConfigError(
            f"{', '.join(apart)}: all labels of a comparison have the same, as it says how far the runs go or where "
            "they are kept. Leave out the label, so that the setting is for all of them"
        )
    return out


def varied(runs: Sequence[Entry]) -> tuple[str, ...]:
    """Return the dotted names of the parameters in which runs of the same seed differ."""
    keys_apart: dict[str, None] = {}
    for seed in dict.fromkeys(entry.seed for entry in runs):
        flat = [flatten(entry.config) for entry in runs if entry.seed == seed]
        keys = dict.fromkeys(key for each in flat for key in each)
        keys_apart |= dict.fromkeys(k for k in keys if any(k not in each or each[k] != flat[0].get(k) for each in flat))
    return tuple(keys_apart)


def label_overrides(labels: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, Overrides]:
    """Return all overrides of each label: those of all runs, its own (`label:a.b`) on top, and its algorithm's name.

    Args:
        labels: Algorithm names by label.
        overrides: Values by dotted name, or by `label:a.b` for one label.
    """
    given = by_label(overrides, labels)
    return {label: {**on_top(given[None], given[label]), "algorithm.name": name} for label, name in labels.items()}


def entries_from(
    labels: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int] | None,
    load: Callable[[Overrides], Config],
    id: str,
    factors: Mapping[str, Sequence[Any]] | None = None,
) -> list[Entry]:
    """Return all runs of a comparison, seed by seed.

    Args:
        labels: All overrides of each label.
        seeds: None for one seed, the configuration's.
        load: Builds the configuration of some overrides.
        id: The comparison's name.
        factors: Values by dotted name. Each label is run with each combination of them.

    Raises:
        ConfigError: A configuration is wrong, or labels differ in what all runs must share.
    """
    made = crossed(labels, factors or {})

    def configure(label: str, seed: int | None) -> Config:
        of, at = made[label]
        return load(on_top(labels[of], at if seed is None else {**at, "seed": seed}))

    chosen = (configure(next(iter(made)), None).seed,) if seeds is None else tuple(seeds)
    return entries(made, chosen, configure, id, {label: at for label, (_, at) in made.items()})


def check_factors(factors: Iterable[str], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a factor that has a place of its own, or whose parameter is also `given` as an override
    (`a.b`, or `label:a.b`)."""
    for path in factors:
        if path in FIXED:
            raise ConfigError(f"over: {path}: {FIXED[path]}")
        for key, value in given.items():
            if any(meet(path, leaf) for leaf in leaves({key.rpartition(":")[2]: value})):
                raise ConfigError(f"over: {path} is also given as a setting: leave one of them out")


def folder_of(runs: Sequence[Entry]) -> Path:
    """Return the folder of a comparison's runs."""
    return Path(runs[0].config.run.store)


# ------------------------------------------------------------------------------------------------- factors
def factors_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values in `training.lr=0.01,0.1` texts by dotted name. Each value is YAML. Raises ConfigError."""
    out: dict[str, list[Any]] = {}
    for text in texts:
        path, sign, listed = (word.strip() for word in text.partition("="))
        if not sign or not path or not listed:
            raise ConfigError(f"--over takes a.b=value,value, e.g. training.lr=0.01,0.1, got {quoted(text)}")
        if path in out:
            raise ConfigError(f"--over {path}: given twice, give all of its values at once")
        try:
            out[path] = read_yaml(f"[{listed}]")
        except yaml.YAMLError as error:
            said = masked(f"--over {text[:200]}: the values are not valid YAML: {error}")
            raise ConfigError(said) from error
    return out


def crossed(labels: Iterable[str], factors: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Combine each label with each combination of the factors' values. Returns, by new label, the old label and the
    values by dotted name. Raises ConfigError."""
    for path, values in factors.items():
        if ":" in path:
            raise ConfigError(f"over: a factor is one of all labels, expected a dotted name, got {path!r}")
        if isinstance(values, str | Mapping) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"over: a list of values is expected for {path}, got {quoted(values)}")
        if any(isinstance(value, Mapping) for value in values):
            raise ConfigError(f"over: {path} is a section: vary its parameters, {path}.<name>")
    names = _short(factors)
    out: dict[str, tuple[str, dict[str, Any]]] = {}
    for label in labels:
        for values in product(*factors.values()):
            at = dict(zip(factors, values, strict=True))
            name = "-".join([label, *(f"{names[path]}{_word(value)}" for path, value in at.items())])
            if name in out:
                raise ConfigError(
                    f"over: two combinations of values would both be called {name}: leave one out, or give them as "
                    "labels of their own"
                )
            out[name] = (label, at)
    return out


def _short(paths: Iterable[str]) -> dict[str, str]:
    """Return the last part of each dotted name, or as many of its last parts as distinguish it from the others."""
    out: dict[str, str] = {}
    all_parts = {path: path.split(".") for path in paths}
    for path, parts in all_parts.items():
        others = [other for name, other in all_parts.items() if name != path]
        n = next((n for n in range(1, len(parts)) if all(parts[-n:] != each[-n:] for each in others)), len(parts))
        out[path] = ".".join(parts[-n:])
    return out


def _word(value: Any) -> str:
    """Return a value as a part of a label, which becomes a folder's name."""
    if isinstance(value, str):
        value = value.rpartition(":")[2]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value).replace("+", "")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", json.dumps(value)).strip("-")
