"""From the arguments of `flexfleet.run`, `compare` and `tune` to overrides and a configuration.

`config` is a file or a mapping of sections. On top of it are `options`, by dotted name, and the keywords, which are the
short names of the run form. A parameter that is given by two of the last two is an error. Objects become names that a
configuration can hold: own data are stored in the run store, an own class is named as `module:Name`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
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
from fl_engine.tasks import TASKS
from flexfleet.config import Config, Overrides, parse_with_algorithm
from flexfleet.config.explain import quoted
from flexfleet.config.form import whole
from flexfleet.config.form_fields import SHORT, place
from flexfleet.config.overrides import apply, check_once, leaves, merged
from flexfleet.config.read import read_file
from flexfleet.config.sources import MAIN, cells, to_a_file

OWN_DATA = ".data"
"""Folder of the data that were given, in a store."""


class Arguments:
    """The configuration that a call starts from, and what its objects stand for."""

    def __init__(self, config: Any, options: Any, keywords: Mapping[str, Any]) -> None:
        """Raises ConfigError. Keywords that are None are not given."""
        check_kinds(config, options)
        self._given = _sections(config)
        self._values = merged(Config().model_dump(mode="json"), self._given)
        self._data: dict[str, Data] = {}
        keywords = {name: value for name, value in keywords.items() if value is not None}
        self._store = self._store_of(keywords, options or {})
        self.overrides = self.overrides_of(keywords, options or {})

    def _store_of(self, keywords: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Return the folder of all runs on this machine."""
        uri = keywords.get("store_uri")
        if uri is None or "://" in str(uri):
            uri = leaves({str(path): value for path, value in options.items()}).get("run.store")
        return str(path_of(self._values["run"]["store"] if uri is None else uri))

    def overrides_of(self, keywords: Mapping[str, Any], options: Mapping[str, Any]) -> Overrides:
        """Return keywords and options by dotted name, with names instead of objects. Raises ConfigError, also if a
        parameter is given twice."""
        if unknown := [name for name in keywords if name not in SHORT]:
            raise ConfigError(f"unknown keyword {unknown[0]!r}{nearest(unknown[0], SHORT)}")
        for path in options:
            if not isinstance(path, str) or not path:
                raise ConfigError(f"options: dotted names are expected, e.g. {{'rounds.stop': 5}}, got {path!r}")
        by_keyword = {name: self._of_keyword(name, value) for name, value in keywords.items()}
        plain_options = {path: plain(value, f"options[{path!r}]") for path, value in options.items()}
        check_once([*((f"{name}=", values) for name, values in by_keyword.items()), ("options", plain_options)])
        return {**plain_options, **{path: value for values in by_keyword.values() for path, value in values.items()}}

    def _of_keyword(self, name: str, value: Any) -> Overrides:
        if name == "dataset" and isinstance(value, Data):
            root = (Path(self._store) / OWN_DATA).resolve()
            fingerprint = stored_data.store(value, root, TASKS)
            self._data[fingerprint] = value
            return {"dataset.name": fingerprint, "dataset.root": str(root)}
        if name == "dataset":
            return _dataset(value)
        if name == "model":
            return _model(value)
        if name == "algorithm":
            return algorithm_options(value)
        value = plain(value, name)
        return {place(name, value): whole(value) if name == "seed" else value}

    def load(self, overrides: Mapping[str, Any]) -> tuple[Config, Algorithm]:
        """Return the checked configuration with these overrides, and its algorithm. Raises ConfigError."""
        values = copy.deepcopy(self._values)
        apply(values, overrides)
        data = self._data.get(values["dataset"]["name"])
        if data is not None and data.natural_client is not None:
            set_partition(values, data, {*leaves(self._given), *leaves(overrides)})
        return parse_with_algorithm(values)


def set_partition(values: dict[str, Any], data: Data, given: Collection[str]) -> None:
    """Set the partition of data whose samples have owners, unless the parameters are `given`: the rule `natural`, a
    client for each owner, and no minimum. Raises ConfigError for an alpha, which `natural` does not use."""
    assert data.natural_client is not None
    section = values["partition"]
    if "partition.rule" not in given:
        if "partition.alpha" in given:
            raise ConfigError(
                "partition.alpha is given without partition.rule, but the data have owners, so their rule is natural, "
                "which has no alpha. Set partition.rule to dirichlet, or leave alpha out"
            )
        section["rule"] = "natural"
    if "partition.clients" not in given:
        section["clients"] = len(set(data.natural_client.tolist()))
    if "partition.minimum" not in given and section["rule"] == "natural":
        section["minimum"] = 1


def check_kinds(config: Any, options: Any) -> None:
    """Raise ConfigError if `config` or `options` have a wrong type."""
    if config is not None and not isinstance(config, str | Path | Mapping | Config):
        raise ConfigError(
            f"config: a file, its sections as a mapping, or a Config is expected, got {type(config).__name__}; of a "
            "result or a study take its config"
        )
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"options: a mapping by dotted names is expected, {{'rounds.stop': 5}}, got {quoted(options)}"
        )


def _sections(config: str | Path | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    """Return the sections of `config`, with only the parameters that it sets."""
    if config is None:
        return {}
    if isinstance(config, Config):
        return config.model_dump(mode="json", exclude_unset=True)
    return dict(plain(config, "config")) if isinstance(config, Mapping) else read_file(config)


def plain(value: Any, what: str) -> Any:
    """Return a value as JSON has it; numbers of NumPy, tuples, paths and importable objects are converted."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(each, what) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each, what) for each in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return name_of(value, what)
    try:
        json.dumps(value)
    except TypeError as error:
        raise ConfigError(f"{what}: a number, a text, a list or a mapping is expected, got {quoted(value)}") from error
    return value


# -------------------------------------------------------------------------------------------------- objects
def _dataset(value: Any) -> Overrides:
    if isinstance(value, str):
        return {"dataset.name": value}
    hint = ""
    if isinstance(value, tuple) or hasattr(value, "shape"):
        hint = ": flexfleet.from_arrays(x, y)"
    elif hasattr(value, "column_names"):
        hint = ": flexfleet.from_huggingface(train)"
    elif hasattr(value, "__getitem__"):
        hint = ": flexfleet.from_torch(train)"
    raise ConfigError(f"dataset: a name or data are expected, got {type(value).__name__}{hint}")


def with_own_data(config: Config, folder: Path) -> Config:
    """Return the configuration of the run in `folder`. If its own data have moved with the store, the configuration
    names their new place; their name is their fingerprint."""
    name, root = config.dataset.name, config.dataset.root
    if not stored_data.is_stored(name) or (root is not None and stored_data.exists(Path(root), name)):
        return config
    stores = folder.parents  # more than one: a run of a comparison or a study lies deeper in its store
    found = next((store / OWN_DATA for store in stores if stored_data.exists(store / OWN_DATA, name)), None)
    if found is None:
        return config
    return config.model_copy(update={"dataset": config.dataset.model_copy(update={"root": str(found)})})


def _model(value: Any) -> Overrides:
    if isinstance(value, str):
        return {"model.name": value}
    if isinstance(value, Mapping):
        return {"model": plain(value, "model")}
    if isinstance(value, type) and issubclass(value, ModuleFamily):  # of `from_module`
        kind: Any = value
        told = {"model.whole": kind.whole, "model.pin": list(kind.pin)}
        return {"model.name": name_of(kind.build[0], "model"), **{path: each for path, each in told.items() if each}}
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "layout"):
        raise ConfigError(
            f"model: the network {type(value).__name__} is given with its input and outputs, which follow from the "
            f"data: give the class, and its options as options={{'model.<option>': ...}}"
        )
    return {"model.name": name_of(value, "model")}


def algorithm_options(value: Any) -> Overrides:
    """Return name and options of an algorithm that is a name, a mapping, a class or an object. Raises ConfigError."""
    if isinstance(value, str):
        return {"algorithm.name": value}
    if isinstance(value, Mapping):
        return {"algorithm": plain(value, "algorithm")}
    if isinstance(value, type):
        names = (name for name, kind in ALGORITHMS.items() if kind is value)
        return {"algorithm.name": next(names, None) or name_of(value, "algorithm")}
    if not is_dataclass(value):
        raise ConfigError(f"algorithm: a name, a class or an object of one is expected, got {value!r}")
    return {"algorithm": _section(value)}


def _section(algorithm: Any) -> dict[str, Any]:
    """Return the section `algorithm` for this object."""
    kind = type(algorithm)
    registered = next((name for name, each in ALGORITHMS.items() if each is kind), None)
    name = registered or name_of(kind, "algorithm")
    CONTRACT.kind(name)  # raises where it is no algorithm
    written = adapter(kind).dump_python(algorithm, mode="json")
    default = {field.name: field.default for field in fields(kind)}
    if "training" in written and algorithm.training != default["training"]:
        raise ConfigError(
            "algorithm: its training is shared by all algorithms: give learning_rate, local_epochs and client_fraction "
            "as keywords, the rest as options={'training.<option>': ...}"
        )
    return {"name": name, **{key: value for key, value in written.items() if key != "training"}}


def name_of(value: Any, what: str) -> str:
    """Return `module:Name`, by which the object can be imported; for an object in a variable of its module, a notebook
    or a script, that variable's name. Raises ConfigError."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in sys.modules and name and getattr(sys.modules[module], name, None) is value:
        return f"{module}:{name}"
    for home in dict.fromkeys((MAIN, str(module))):
        for held, each in vars(sys.modules.get(home, sys.modules[MAIN])).items():
            if each is value and not held.startswith("_"):
                return f"{home}:{held}"
    raise ConfigError(
        f"{what}: {name or f'this {type(value).__name__}'} has no name by which it is found again: define it at the "
        "top of a module or a cell, or assign it to a variable there"
    )


def check_reach(config: Config, jobs: int = 1) -> None:
    """Raise ConfigError if other processes would have to import what only this one has, or to read data that they
    cannot reach."""
    where = {"processes": "worker processes", "kubernetes": "pods", "agents": "other devices"}.get(config.run.backend)
    if where is None and jobs > 1:
        where = f"{jobs} processes side by side"
    if where and (own := cells(config.model_dump(mode="json"))):
        raise ConfigError(to_a_file(own[0], where))
    if config.run.apart and stored_data.is_stored(config.dataset.name):
        raise ConfigError(
            f"the data lie in {config.dataset.root} on this machine, which {where} cannot reach: put that folder "
            "where they find it (a volume, a copy), and run with dataset.root"
        )
