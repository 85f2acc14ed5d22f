"""From the arguments of `flexfleet.compare` to its runs: labels, their settings, and factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_engine.core.errors import ConfigError
from flexfleet.api.arguments import Arguments, algorithm_options, plain
from flexfleet.config import Overrides
from flexfleet.config.comparison_runs import FIXED, LABEL, RESERVED, Entry, check_factors, entries_from
from flexfleet.config.explain import quoted
from flexfleet.config.form_fields import SHORT
from flexfleet.config.overrides import check_once, on_top

ELSEWHERE = {
    "algorithm": "the algorithms are the first argument",
    "seed": "the seeds are a list of their own, seeds=(0, 1, 2)",
    "run_id": "a comparison's runs are named by label and seed; its own name is id",
    "callbacks": "callbacks watch a single run: give them to flexfleet.run",
}
"""Keywords of `run` that a comparison does not take, and why."""


def entries_of(
    algorithms: Any, seeds: Sequence[int], over: Mapping[str, Sequence[Any]], id: str, common: Mapping[str, Any]
) -> list[Entry]:
    """Return all runs of a comparison. Raises ConfigError."""
    for keyword in common:
        if keyword in ELSEWHERE:
            raise ConfigError(f"compare: {keyword}: {ELSEWHERE[keyword]}")
    config, options = common.get("config"), common.get("options")
    keywords = {name: value for name, value in common.items() if name not in ("config", "options")}
    arguments, factors = Arguments(config, options, keywords), _factors(over)
    _no_fixed(options or {}, "options")
    given, labels = list(arguments.overrides.items()), dict[str, Overrides]()
    for label, (algorithm, settings) in labels_of(algorithms).items():
        short = {SHORT_OF.get(name, name): value for name, value in settings.items()}
        own = arguments.overrides_of(
            {name: value for name, value in short.items() if name in SHORT},
            {path: value for path, value in short.items() if path not in SHORT},
        )
        if isinstance(algorithm, Mapping):
            check_once([("algorithm", algorithm_options(algorithm)), (f"a setting of {label}", own)])
        given += [(f"{label}:{path}", value) for path, value in own.items()]
        labels[label] = on_top(arguments.overrides, on_top(algorithm_options(algorithm), own))
    check_factors(factors, dict(given))
    return entries_from(labels, seeds, lambda overrides: arguments.load(overrides)[0], id, factors)


SHORT_OF = {SHORT[name]: name for name in ("dataset", "model")}
"""Short names of the parameters that a label may give as an object."""


def labels_of(algorithms: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the algorithm of each label, and the label's other settings. Raises ConfigError."""
    labels: dict[str, tuple[Any, dict[str, Any]]] = {}
    if isinstance(algorithms, Mapping):
        labels = {str(label): _label(str(label), value) for label, value in algorithms.items()}
    elif isinstance(algorithms, list | tuple):
        for value in algorithms:
            if isinstance(value, Mapping):
                raise ConfigError(f"algorithms: settings need a label: {{'mine': {quoted(value)}}}")
            options = algorithm_options(value)
            chosen = options.get("algorithm.name") or options["algorithm"]["name"]
            label = chosen.rpartition(":")[2]
            if label in labels:
                raise ConfigError(f"algorithms: {label} is given twice: give labels, {{'a': {chosen!r}, 'b': ...}}")
            labels[label] = value, {}
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


def _label(label: str, value: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(value, Mapping):
        return value, {}
    settings = {str(key): each for key, each in value.items()}
    given = [settings.pop(key) for key in ("algorithm", "algorithm.name") if key in settings]
    if len(given) != 1 or given[0] is None:
        raise ConfigError(f"algorithms: {label} must name one algorithm: {{{label!r}: {{'algorithm': 'flexfl', ...}}}}")
    _no_fixed(settings, label)
    return given[0], settings


def _no_fixed(settings: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for settings that have a place of their own."""
    for path, value in settings.items():
        if path in FIXED:
            raise ConfigError(f"{where}: {path}: {ELSEWHERE[path.partition('.')[0]]}")
        if path == "algorithm":
            raise ConfigError(f"{where}: an algorithm's options have dotted names, e.g. 'algorithm.x', got {value!r}")


def _factors(over: Any) -> dict[str, list[Any]]:
    """Return the values of each factor by its dotted name. Raises ConfigError."""
    if not isinstance(over, Mapping):
        raise ConfigError(f"over: a mapping is expected, {{'training.lr': [0.01, 0.1]}}, got {quoted(over)}")
    for path, values in over.items():
        if not isinstance(path, str):
            raise ConfigError(f"over: the dotted name of a parameter is a text, got {quoted(path)}")
        if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
            raise ConfigError(f"over: a list of values is expected for {path}, got {quoted(values)}")
    paths = {str(path): SHORT.get(str(path), str(path)) for path in over}
    check_once((f"over[{path!r}]", {dotted: None}) for path, dotted in paths.items())
    return {dotted: [plain(value, f"over[{path!r}]") for value in over[path]] for path, dotted in paths.items()}
