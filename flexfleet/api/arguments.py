"""Convert the arguments of `flexfleet.run`, `compare` and `tune` to configurations.

`options` (by dotted name) and keywords (short names, such as `rounds`) override values of `config`. A parameter must
not be set by both `options` and a keyword. Objects are replaced by names, because configurations contain only JSON
values. Data sets are stored in the run store, and their names contain their fingerprints. A class is replaced by
`module:Name`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.algorithms import ALGORITHMS, CONTRACT
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, nearest
from fl_engine.core.fields import adapter
from fl_engine.core.samples import Data
from fl_engine.core.text import path_of
from fl_engine.datasets import stored_data
from fl_engine.models.traced.family import ModuleFamily
from fl_engine.models.traced.user_module import options_of
from flexfleet.config import Config, flatten, parse_with_algorithm
from flexfleet.config.comparison_runs import PlannedRun, by_label, check_factors, check_label, entries_from
from flexfleet.config.dotted import FIELDS, SHORT, Overrides, applied, check_once, leaves, locate, merged, on_top, place
from flexfleet.config.explain import quoted
from flexfleet.config.form import restore_integers
from flexfleet.config.read import read_file
from flexfleet.config.sources import MAIN, cells, local_name, to_a_file
from flexfleet.tracking.server import active_run

OWN_DATA = ".data"
"""Name of the folder in a run store in which the user's own data sets are saved."""


class Arguments:
    """Configuration, overrides and data sets that were passed in one call."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Read `config`, `options` and keywords. Arguments that are None are ignored. Raises ConfigError."""
        keywords = {name: value for name, value in given.items() if value is not None}
        config, options = keywords.pop("config", None), keywords.pop("options", {})
        if not isinstance(options, Mapping):
            raise ConfigError.at(f"options must map dotted names to values, got {quoted(options)}")
        self._given = _sections(config)
        self._values = merged(Config().model_dump(mode="json"), self._given)
        self._data: dict[str, Data] = {}
        self._active_run = active_run()
        uri = keywords.get("store_uri")
        if uri is None or "://" in str(uri):
            uri = leaves({str(path): value for path, value in options.items()}).get("run.store")
        self._store = str(path_of(self._values["run"]["store"] if uri is None else uri))
        self.overrides = self.overrides_of(keywords, options)

    def overrides_of(self, keywords: Mapping[str, Any], options: Mapping[str, Any]) -> Overrides:
        """Map dotted names to the values of keywords and options. Objects are replaced by their names. Raises
        ConfigError if a keyword is unknown, or if a parameter is set twice."""
        check_keywords(keywords, (*SHORT, "options", "config"))
        by_keyword = {name: self._of_keyword(name, value) for name, value in keywords.items()}
        plain_options = {str(path): plain(value, f"options[{path!r}]") for path, value in options.items()}
        check_once([*((f"{name}=", values) for name, values in by_keyword.items()), ("options", plain_options)])
        return {**plain_options, **{path: value for values in by_keyword.values() for path, value in values.items()}}

    def _of_keyword(self, name: str, value: Any) -> Overrides:
        if name == "dataset" and isinstance(value, Data):
            root = (Path(self._store) / OWN_DATA).resolve()
            fingerprint = stored_data.store(value, root)
            self._data[fingerprint] = value
            return {"dataset.name": fingerprint, "dataset.root": str(root)}
        if name == "dataset" and not isinstance(value, str):
            raise ConfigError(
                f"dataset must be a name or a Data object, got {type(value).__name__}. Create the object with "
                "flexfleet.from_arrays(x, y), from_torch(dataset) or from_huggingface(dataset)",
                path="dataset.name",
            )
        if name == "model":
            return _model(value)
        if name == "algorithm":
            return algorithm_options(value)
        value = plain(value, name)
        return {place(name, value): restore_integers(value) if name == "seed" else value}

    def load(self, overrides: Mapping[str, Any]) -> tuple[Config, Algorithm]:
        """Check the configuration with these overrides, and return it with its algorithm. Raises ConfigError."""
        values = applied(self._values, overrides)
        given = {*leaves(self._given), *leaves(overrides)}
        if "tracking.mlflow" not in given and self._active_run is not None:
            uri, experiment, _ = self._active_run
            chosen = values["tracking"]["experiment"] or experiment
            values = {**values, "tracking": {"mlflow": uri, "experiment": chosen}}
        data = self._data.get(leaves(values).get("dataset.name", ""))
        if data is not None and data.natural_client is not None:
            if "partition.alpha" in given and "partition.rule" not in given:
                raise ConfigError.at(
                    "partition.alpha requires partition.rule=dirichlet. For data with owners, the default is natural",
                    code="config.conflict",
                )
            owned = {"rule": "natural", "clients": len(set(data.natural_client.tolist())), "minimum": 1}
            if "partition.rule" in given and values["partition"]["rule"] != "natural":
                del owned["minimum"]
            new = {key: value for key, value in owned.items() if f"partition.{key}" not in given}
            values = {**values, "partition": {**values["partition"], **new}}
        return parse_with_algorithm(values)


def check_keywords(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError if a keyword is not in `known`. The error message names the correct keyword or option."""
    for name, value in given.items():
        if name in known:
            continue
        defaults = leaves(Config().model_dump(exclude={"tune"})) if "options" in known and name != "name" else {}
        path = locate(name, defaults)
        if path in FIELDS:
            cure = f". Use {FIELDS[path]}="
        elif path:
            cure = f". Use options={{{path!r}: {quoted([value] if isinstance(defaults[path], tuple) else value)}}}"
        else:
            cure = nearest(name, known)
        raise ConfigError(f"unknown keyword {name!r}{cure}", code="config.unknown", path=name)


def _sections(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Config):
        return config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, Mapping):
        return dict(plain(config, "config"))
    if isinstance(config, str | Path):
        return read_file(config)
    raise ConfigError.at(f"config must be a file, a mapping or a Config, got {type(config).__name__}")


def plain(value: Any, what: str) -> Any:
    """Convert a value to JSON types. Supports NumPy scalars, tuples, ranges, paths and importable objects."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(each, what) for key, each in value.items()}
    if isinstance(value, tuple | list | range):
        return [plain(each, what) for each in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return name_of(value, what)
    try:
        json.dumps(value)
    except TypeError as error:
        raise ConfigError(f"{what} must be a number, a string, a list or a mapping, got {quoted(value)}") from error
    return value


def with_own_data(config: Config, folder: Path) -> Config:
    """Return the configuration of a run. If the run store was moved, update the path of the user's data."""
    name, root = config.dataset.name, config.dataset.root
    if not stored_data.is_stored(name) or (root is not None and stored_data.exists(Path(root), name)):
        return config
    # Runs of comparisons and studies are in subfolders of the store, so search all parents.
    found = next((store / OWN_DATA for store in folder.parents if stored_data.exists(store / OWN_DATA, name)), None)
    moved = config.dataset if found is None else config.dataset.model_copy(update={"root": str(found)})
    return config.model_copy(update={"dataset": moved})


def _model(value: Any) -> Overrides:
    if isinstance(value, str):
        return {"model.name": value}
    if isinstance(value, Mapping):
        return {"model": plain(value, "model")}
    if isinstance(value, type) and issubclass(value, ModuleFamily):  # created by `from_module`
        return _model(value.build[0]) | ({"model.whole": True} if value.whole else {})
    if isinstance(value, partial) and (options := _plain_options(value)) is not None:
        return {"model.name": name_of(value.func, "model"), **options}
    return {"model.name": name_of(value, "model")}


def _plain_options(build: partial[Any]) -> Overrides | None:
    """Return the arguments of a `functools.partial` as options of the network; None if one cannot be an option."""
    try:
        arguments = inspect.signature(build.func).bind_partial(*build.args, **build.keywords).arguments
        values = json.loads(json.dumps(arguments))
    except (TypeError, ValueError):
        return None
    known = {name for name, each in options_of(build.func).items() if each.kind is not each.VAR_KEYWORD}
    return {f"model.{name}": each for name, each in values.items()} if known >= arguments.keys() else None


def algorithm_options(value: Any) -> Overrides:
    """Return the name and options of an algorithm (a name, mapping, class or object). Raises ConfigError."""
    if isinstance(value, str):
        return {"algorithm.name": value}
    if isinstance(value, Mapping):
        return {"algorithm": plain(value, "algorithm")}
    if isinstance(value, type):
        names = (name for name, kind in ALGORITHMS.items() if kind is value)
        return {"algorithm.name": next(names, None) or name_of(value, "algorithm")}
    kind: Any = type(value)
    if not is_dataclass(kind):
        raise ConfigError(
            f"algorithm must be a name, a class or a dataclass object, got {value!r}", path="algorithm.name"
        )
    name = algorithm_options(kind)["algorithm.name"]
    CONTRACT.kind(name)  # check that the class is an algorithm
    if value.training != next(field.default for field in fields(kind) if field.name == "training"):
        raise ConfigError(
            "The algorithm object must have the default `training`, because all algorithms share these options. Set "
            "learning_rate= or options=",
            path="training",
        )
    written = adapter(kind).dump_python(value, mode="json")
    return {"algorithm": {"name": name, **{key: each for key, each in written.items() if key != "training"}}}


def name_of(value: Any, what: str) -> str:
    """Return `module:Name`, by which the object can be imported. `Name` is the name of the object itself, or of a
    variable in its module. For classes and functions, the variable can also be in the notebook or script. Other objects
    get a name that only this process can use. Raises ConfigError if the value is not a class, function or module."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in sys.modules and name and getattr(sys.modules[module], name, None) is value:
        return f"{module}:{name}"
    for home in dict.fromkeys((MAIN, str(module))):
        for variable, each in vars(sys.modules.get(home, sys.modules[MAIN])).items():
            if each is value and not variable.startswith("_") and (name or home != MAIN):
                return f"{home}:{variable}"
    if not callable(value):
        raise ConfigError(f"{what} must be a name, a class, a function or a module, got {quoted(value)}", path=what)
    return local_name(value)


def check_reach(config: Config, jobs: int = 1) -> None:
    """Raise ConfigError if the run uses other processes that cannot access the user's classes or data."""
    where = {"processes": "worker processes", "kubernetes": "pods", "agents": "other devices"}.get(config.run.backend)
    if where is None and jobs > 1:
        where = f"{jobs} parallel processes"
    if where and (own := cells(config)):
        path = next(path for path, value in flatten(config).items() if value == own[0])
        raise ConfigError(to_a_file(own[0], where), code="config.own_code", path=path)
    if config.run.apart and stored_data.is_stored(config.dataset.name):
        raise ConfigError(
            f"{where} cannot read the data in {config.dataset.root} on this machine. Copy the folder to a volume that "
            f"{where} can read, and set dataset.root to its path there",
            path="dataset.root",
        )


def entries_of(
    algorithms: Any, seeds: Sequence[int], over: Any, id: str, common: Mapping[str, Any]
) -> list[PlannedRun]:
    """Plan all runs of a comparison. Raises ConfigError."""
    arguments = Arguments(common)
    given, labels = dict(arguments.overrides), _labels(algorithms)
    # These parameters also accept Python objects instead of names.
    objects = {SHORT[name]: name for name in ("dataset", "model")}
    for label, (_, settings) in labels.items():
        settings = {objects.get(name, name): value for name, value in settings.items()}
        own = arguments.overrides_of(
            {name: value for name, value in settings.items() if name in SHORT},
            {path: value for path, value in settings.items() if path not in SHORT},
        )
        given |= {f"{label}:{path}": value for path, value in own.items()}
    factors = {path: plain(values, f"over[{path!r}]") for path, values in by_dotted_name(over, "over").items()}
    own_of = by_label(given, labels)
    check_factors(factors, given)
    overrides = {
        label: on_top(own_of[None], on_top(algorithm_options(algorithm), own_of[label]))
        for label, (algorithm, _) in labels.items()
    }
    return entries_from(overrides, seeds, lambda each: arguments.load(each)[0], id, factors)


def _labels(algorithms: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Map the label of each variant to its algorithm and its other settings. Raises ConfigError."""
    if isinstance(algorithms, str | type) or not hasattr(algorithms, "__iter__"):
        raise ConfigError.at(
            f"algorithms must be a list, or a mapping from labels to algorithms, got {quoted(algorithms)}"
        )
    labels: dict[str, tuple[Any, dict[str, Any]]] = {}
    for item in algorithms.items() if isinstance(algorithms, Mapping) else algorithms:
        label, value = item if isinstance(algorithms, Mapping) else (None, item)
        settings: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
        if settings:
            value = settings.pop("algorithm", settings.pop("algorithm.name", None))
        if value is None or (settings and label is None):
            raise ConfigError(
                "an entry of algorithms with settings must have a label: {'mine': {'algorithm': 'flexfl', ...}}, got "
                f"{quoted(item)}",
                path="algorithms",
            )
        if label is None:
            options = algorithm_options(value)
            label = (options.get("algorithm.name") or options["algorithm"]["name"]).rpartition(":")[2]
        check_label(label)
        if label in labels:
            raise ConfigError.at(f"algorithms: {label!r} is given twice. Use labels: {{'a': ..., 'b': ...}}")
        labels[label] = value, settings
    if not labels:
        raise ConfigError.at("algorithms must contain at least one algorithm")
    return labels


def by_dotted_name(values: Any, what: str) -> dict[str, Any]:
    """Return a copy of `values` in which dotted names replace short names. Raises ConfigError if `values` is not a
    mapping, or if it contains a parameter twice."""
    if not isinstance(values, Mapping):
        raise ConfigError.at(f"{what} must be a mapping such as {{'training.lr': ...}}, got {quoted(values)}")
    paths = {path: SHORT.get(str(path), str(path)) for path in values}
    check_once((f"{what}[{path!r}]", {name: None}) for path, name in paths.items())
    return {name: values[path] for path, name in paths.items()}
