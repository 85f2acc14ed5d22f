"""From what is asked for in Python to a configuration.

`config`, `options` and keywords say the same things in three ways, and the later one wins: a file or a mapping of
sections; dotted names; and the short names of the run form (`overrides.PARAMETERS`). The same parameter in two of the
last two is an error. Objects become names that a configuration can hold: own data are kept in the store, an own class
is named as `module:Name`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fl_engine.algorithms import ALGORITHMS, CONTRACT
from fl_engine.core.errors import ConfigError, nearest
from fl_engine.core.fields import adapter
from fl_engine.core.samples import Data
from fl_engine.core.text import path_of
from fl_engine.datasets import stored_data
from fl_engine.models.traced.family import ModuleFamily
from fl_engine.tasks import TASKS
from flexfleet.config import Config, load_config, set_path
from flexfleet.config.explain import quoted
from flexfleet.config.form import PARAMETERS, whole
from flexfleet.config.read import giving_way, leaves, meet, names_first, parse, read_file
from flexfleet.config.sources import MAIN, cells, to_a_file

OWN_DATA = ".data"
"""Folder of the data that were given, in a store."""


class Default(str):
    """The default of a keyword: it counts only where nothing else says the parameter."""

    __slots__ = ()


def config_of(
    config: str | Path | Mapping[str, Any] | Config | None,
    options: Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
    below: Iterable[tuple[str, Any]] = (),
) -> Config:
    """The configuration that is asked for, checked. Keywords that are None are not given. `below`: options that give
    way to all others, however they are spelt. Raises ConfigError."""
    values = _base(config)
    given = {name: value for name, value in keywords.items() if value is not None}
    if unknown := [name for name in given if name not in PARAMETERS]:
        raise ConfigError(f"unknown keyword {unknown[0]!r}{nearest(unknown[0], PARAMETERS)}")
    own = {PARAMETERS[name]: (name, value) for name, value in given.items() if not isinstance(value, Default)}
    told, below = dict(options or {}), list(below)
    for path in (*told, *(path for path, _ in below)):
        if not isinstance(path, str) or not path:
            raise ConfigError(f"options: dotted names are expected, e.g. {{'rounds.stop': 5}}, got {path!r}")
    for path in told:
        for taken, (name, _) in own.items():
            if path == taken or (taken.startswith(f"{path}.") and _holds(told[path], taken.removeprefix(f"{path}."))):
                raise ConfigError(f"{name!r} is given as a keyword and as options[{path!r}]: say it once")
    if config is None:  # what a file leaves out is the file's to say
        for name, value in given.items():
            if isinstance(value, Default) and PARAMETERS[name] not in told:
                set_path(values, PARAMETERS[name], str(value))
    pairs, below = (
        [(path, plain(value, f"options[{path!r}]")) for path, value in each] for each in (told.items(), below)
    )
    store = _store(values, [*below, *pairs], own.get("run.store", (None, None))[1])
    for name, value in own.values():
        pairs.extend(_of_keyword(name, value, store))
    check_once(pairs, "by a keyword and an option or by two options")
    named = {leaf for path, value in pairs for leaf in leaves({path: value})}
    before = [pair for path, value in below for pair in giving_way(named, path, value)]
    for path, value in names_first([*before, *pairs]):  # all of them: a name drops the options of the one before it
        set_path(values, path, value)
    if isinstance(data := given.get("dataset"), Data) and data.natural_client is not None:
        set_partition(values, data, {*leaves(_given_by(config)), *leaves(dict(before)), *named})
    return parse(values)


def set_partition(values: dict[str, Any], data: Data, given: Collection[str]) -> None:
    """Set the partition of data whose samples have owners, unless the parameters are `given`: the rule `natural`, a
    client for each owner, and no minimum. Raises ConfigError for an alpha that `natural` does not use."""
    assert data.natural_client is not None
    section = values["partition"]
    if "partition.rule" not in given:
        if "partition.alpha" in given:
            raise ConfigError(
                "partition.alpha is given without partition.rule, and the data say whose each sample is, so their rule "
                "is natural, which has no alpha. Set partition.rule to dirichlet, or leave alpha out"
            )
        section["rule"] = "natural"
    if "partition.clients" not in given:
        section["clients"] = len(set(data.natural_client.tolist()))
    if "partition.minimum" not in given and section["rule"] == "natural":
        section["minimum"] = 1


def _of_keyword(name: str, value: Any, store: str) -> list[tuple[str, Any]]:
    """The dotted names and values that a keyword stands for. `store`: the folder of all runs, where data are kept."""
    if name == "store_uri" and "://" in str(value):
        return [("run.remote", str(value))]
    if name == "dataset":
        return list(_dataset(value, store).items())
    if name == "model":
        return list(_model(value).items())
    if name == "algorithm":
        return list(algorithm_options(value).items())
    value = plain(value, name)
    return [(PARAMETERS[name], whole(value) if name == "seed" else value)]


def _store(values: dict[str, Any], options: Sequence[tuple[str, Any]], uri: Any) -> str:
    """The folder of all runs on this machine."""
    if uri is not None and "://" not in str(uri):
        return str(path_of(uri))
    asked = {"run": copy.deepcopy(values["run"])}
    for path, value in options:
        if path.partition(".")[0] == "run":
            set_path(asked, path, value)
    return str(path_of(asked["run"]["store"]))


def check_once(pairs: Iterable[tuple[str, Any]], how: str) -> None:
    """Raises ConfigError where dotted names and values give a parameter twice, or a value for a section and a parameter
    in it; `how`: by which spellings that can be."""
    seen: list[str] = []
    for path, value in pairs:
        for leaf in leaves({str(path): value}):
            if twice := next((each for each in seen if meet(each, leaf)), None):
                raise ConfigError(f"{min(twice, leaf, key=len)} is given twice, {how}: say it once")
            seen.append(leaf)


def check_kinds(config: Any, options: Any) -> None:
    """Raises ConfigError where `config` or `options` of a call are no such thing."""
    if config is not None and not isinstance(config, str | Path | Mapping | Config):
        raise ConfigError(
            f"config: a file, its sections as a mapping, or a Config is expected, got {type(config).__name__}; of a "
            "result or a study take its config"
        )
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"options: a mapping by dotted names is expected, {{'rounds.stop': 5}}, got {quoted(options)}"
        )


def _given_by(config: str | Path | Mapping[str, Any] | Config | None) -> Mapping[str, Any]:
    """The sections of `config` with the parameters that it sets itself."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    return config.model_dump(mode="json", exclude_unset=True) if isinstance(config, Config) else read_file(config)


def _base(config: str | Path | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    if config is None:
        return Config().model_dump(mode="json")
    if isinstance(config, Mapping):
        return parse(dict(config)).model_dump(mode="json")
    found = config if isinstance(config, Config) else load_config(config)
    return found.model_dump(mode="json")


def _holds(value: Any, path: str) -> bool:
    """Whether a section given as a mapping has this dotted name."""
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def plain(value: Any, what: str) -> Any:
    """A value as JSON has it: numbers of NumPy, tuples and paths are taken too."""
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
def _dataset(value: Any, store: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"dataset.name": str(value)}
    if isinstance(value, Data):
        root = (Path(store) / OWN_DATA).resolve()
        return {"dataset.name": stored_data.store(value, root, TASKS), "dataset.root": str(root)}
    hint = ""
    if isinstance(value, tuple) or hasattr(value, "shape"):
        hint = ": flexfleet.from_arrays(x, y)"
    elif hasattr(value, "column_names"):
        hint = ": flexfleet.from_huggingface(train)"
    elif hasattr(value, "__getitem__"):
        hint = ": flexfleet.from_torch(train)"
    raise ConfigError(f"dataset: a name or data are expected, got {type(value).__name__}{hint}")


def with_own_data(config: Config, folder: Path) -> Config:
    """The configuration of the run in `folder`. If data were given to it that are no longer where they were when it
    began, but in the store in which the run is now, as after a move of the whole store, it names these. (The data's
    name is their fingerprint, which no other samples have.)"""
    name, root = config.dataset.name, config.dataset.root
    if not stored_data.is_stored(name) or (root is not None and stored_data.exists(Path(root), name)):
        return config
    stores = folder.parents  # more than one: a run of a comparison or a study lies deeper in its store
    found = next((store / OWN_DATA for store in stores if stored_data.exists(store / OWN_DATA, name)), None)
    if found is None:
        return config
    return config.model_copy(update={"dataset": config.dataset.model_copy(update={"root": str(found)})})


def _model(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"model.name": str(value)}
    if isinstance(value, Mapping):
        return {f"model.{key}": plain(each, "model") for key, each in value.items()}
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


def algorithm_options(value: Any) -> dict[str, Any]:
    """Name and options, by dotted names, of an algorithm that is given as a name, a mapping, a class or an object.
    Raises ConfigError."""
    if isinstance(value, str):
        return {"algorithm.name": str(value)}
    if isinstance(value, Mapping):
        return {f"algorithm.{key}": plain(each, "algorithm") for key, each in value.items()}
    if isinstance(value, type):
        names = (name for name, kind in ALGORITHMS.items() if kind is value)
        return {"algorithm.name": next(names, None) or name_of(value, "algorithm")}
    if not is_dataclass(value):
        raise ConfigError(f"algorithm: a name, a class or an object of one is expected, got {value!r}")
    return {f"algorithm.{key}": each for key, each in _section(value).items()}


def _section(algorithm: Any) -> dict[str, Any]:
    """The section `algorithm` for this object: its name, and its options."""
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
    """`module:Name`, by which `registry.resolve` finds the object again; of an object that a variable holds, in the
    module of its class or in a notebook or script, that variable's. Raises ConfigError where there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in sys.modules and name and getattr(sys.modules[module], name, None) is value:
        return f"{module}:{name}"
    for place in dict.fromkeys((MAIN, str(module))):
        for held, each in vars(sys.modules.get(place, sys.modules[MAIN])).items():
            if each is value and not held.startswith("_"):
                return f"{place}:{held}"
    raise ConfigError(
        f"{what}: {name or f'this {type(value).__name__}'} has no name by which it is found again: define it at the "
        "top of a module or a cell, or assign it to a variable there"
    )


def check_reach(config: Config, jobs: int = 1) -> None:
    """Raises ConfigError where other processes have to import what only this one has, or to read data that they cannot
    reach."""
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
