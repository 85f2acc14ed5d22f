"""From what is asked of `flexfleet.compare` to the runs: labels, their settings, and factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_engine.core.errors import ConfigError
from flexfleet.api.arguments import algorithm_options, check_kinds, check_once, config_of, plain
from flexfleet.api.running import DATASET, MODEL
from flexfleet.config import Config, parse
from flexfleet.config.comparison_runs import FIXED, LABEL, RESERVED, Entry, check_factors, crossed, entries
from flexfleet.config.explain import quoted
from flexfleet.config.form import PARAMETERS
from flexfleet.config.form_fields import place
from flexfleet.config.read import leaves

ELSEWHERE = {
    "algorithm": "the algorithms are the first argument",
    "seed": "the seeds are a list of their own, seeds=(0, 1, 2)",
    "run_id": "a comparison's runs are named by label and seed; its own name is id",
    "callbacks": "callbacks look on at one run: give them to flexfleet.run",
}
"""Keywords of `run` that a comparison does not take, and why."""
SECTIONS = ("dataset", "model", "algorithm")
"""What may be given as a mapping, which is then its section."""


@dataclass(frozen=True)
class Label:
    """What runs under one label."""

    algorithm: Mapping[str, Any]
    """Its name and options, by dotted names."""
    own: Mapping[str, Any]
    """The label's other settings, by dotted names."""


def labels_of(algorithms: Any) -> dict[str, Label]:
    """`algorithms` of `compare` by label. Raises ConfigError."""
    if isinstance(algorithms, Mapping):
        labels = {str(label): _label(str(label), value) for label, value in algorithms.items()}
    elif isinstance(algorithms, list | tuple):
        labels = {}
        for value in algorithms:
            if isinstance(value, Mapping):
                raise ConfigError(f"algorithms: settings need a label: {{'mine': {quoted(value)}}}")
            label = _name(chosen := algorithm_options(value)["algorithm.name"])
            if label in labels:
                raise ConfigError(f"algorithms: {label} is there twice: give labels, {{'a': {chosen!r}, 'b': ...}}")
            labels[label] = _label(label, value)
    else:
        raise ConfigError(f"algorithms: a list, or a mapping by label, is expected, got {quoted(algorithms)}")
    if not labels:
        raise ConfigError("algorithms: at least one is expected, got none")
    for label in labels:
        if not LABEL.fullmatch(label) or label in RESERVED:
            raise ConfigError(
                f"algorithms: {label!r} cannot be a label, which becomes part of a folder's name (letters, digits, "
                f"'_', '-', '.'; not {', '.join(RESERVED)})"
            )
    return labels


def _name(name: str) -> str:
    """An algorithm's name as a label."""
    return name.rpartition(":")[2]


def _label(label: str, value: Any) -> Label:
    own: dict[str, Any] = {}
    if isinstance(value, Mapping):
        check_once(_pairs(value), f"by two settings of the label {label}")
        own = {PARAMETERS.get(str(key), str(key)): each for key, each in value.items()}
        if (value := own.pop("algorithm.name", None)) is None:
            raise ConfigError(f"algorithms: {label} names no algorithm: {{{label!r}: {{'algorithm': 'flexfl', ...}}}}")
        _no_fixed(own, label)
    return Label(algorithm_options(value), own)


def _no_fixed(settings: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for settings that have a place of their own."""
    for path, value in settings.items():
        if path in FIXED:
            raise ConfigError(f"{where}: {path}: {ELSEWHERE[path.partition('.')[0]]}")
        if path == "algorithm":
            raise ConfigError(f"{where}: an algorithm's options have dotted names, e.g. 'algorithm.x', got {value!r}")


def entries_of(
    algorithms: Any,
    seeds: Sequence[int],
    over: Mapping[str, Sequence[Any]],
    id: str,
    common: Mapping[str, Any],
) -> list[Entry]:
    """All runs that are asked for. Raises ConfigError."""
    if wrong := [keyword for keyword in common if keyword in ELSEWHERE]:
        raise ConfigError(f"compare: {wrong[0]}: {ELSEWHERE[wrong[0]]}")
    check_kinds(common.get("config"), common.get("options"))
    if not isinstance(over, Mapping):
        raise ConfigError(f"over: a mapping is expected, {{'training.lr': [0.01, 0.1]}}, got {quoted(over)}")
    if odd := [path for path in over if not isinstance(path, str)]:
        raise ConfigError(f"over: the dotted name of a parameter is a text, got {quoted(odd[0])}")
    labels, config, options = labels_of(algorithms), common.get("config"), dict(common.get("options") or {})
    _no_fixed(options, "options")
    keywords = {"dataset": DATASET, "model": MODEL, **common}
    keywords = {name: value for name, value in keywords.items() if name not in ("config", "options")}
    check_once(((PARAMETERS.get(path, path), None) for path in over), "by two factors")
    factors = {PARAMETERS.get(path, path): _values(path, values) for path, values in over.items()}
    given = {name: value for name, value in keywords.items() if name in common and value is not None}
    all_own = [pair for label in labels.values() for pair in _pairs(label.own)]
    check_once([*_pairs(given), *options.items()], "by a keyword and an option or by two options")
    check_factors(factors, _names([*_pairs(given), *options.items(), *all_own]))
    made = crossed(labels, factors)
    configs: dict[str, Config] = {}

    def configure(label: str, seed: int) -> Config:
        if label not in configs:
            of, at = made[label]
            own = {**labels[of].algorithm, **labels[of].own, **at}
            objects = {name: own.pop(PARAMETERS[name]) for name in ("dataset", "model") if PARAMETERS[name] in own}
            taken = _names([*own.items(), *_pairs(objects)])
            kept = {name: value for name, value in keywords.items() if PARAMETERS.get(name) not in taken}
            of_all, of_label = (  # as sections: options go with the name of their network
                each.pop("model") if isinstance(each.get("model"), Mapping) else {} for each in (kept, objects)
            )
            below = [*options.items(), ("model", of_all)]
            configs[label] = config_of(config, {**own, "model": of_label}, {**kept, **objects}, below)
        return parse({**configs[label].model_dump(mode="json"), "seed": seed})

    return entries(made, seeds, configure, id, {label: at for label, (_, at) in made.items()})


def _pairs(settings: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Settings by dotted names or keywords as dotted names and values. A network or an algorithm that is given as a
    mapping is its section."""
    pairs = []
    for key, value in settings.items():
        path = place(str(key), value) if key in PARAMETERS else str(key)
        section = path.removesuffix(".name")
        pairs.append((section if section in SECTIONS and isinstance(value, Mapping) else path, value))
    return pairs


def _names(pairs: Iterable[tuple[str, Any]]) -> set[str]:
    """The dotted names of all parameters that are set."""
    return {leaf for path, value in pairs for leaf in leaves({path: value})}


def _values(path: str, values: Any) -> Any:
    """A factor's values as JSON has them."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise ConfigError(f"over: a list of values is expected for {path}, got {quoted(values)}")
    return [plain(value, f"over[{path!r}]") for value in values]
