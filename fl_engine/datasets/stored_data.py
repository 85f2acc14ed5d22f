"""Data of one's own, kept under their fingerprint where other processes and later runs find them.

    <root>/<fingerprint>/data.safetensors    train_x, train_y, test_x, test_y, natural_client
    <root>/<fingerprint>/data.json           name, task, mean, std

`dataset.name: sha256:<fingerprint>` names them in a configuration, and `dataset.root` is the root. A folder is written
once and never changed. The fingerprint has neither the data's name nor what else a task measures (top-5 accuracy), so
equal arrays with another name or task lie in a folder `<fingerprint>-<the beginning of data.json's SHA-256>`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, DataError, FlexfleetError, IntegrityError
from fl_engine.core.registry import Contract
from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.data.transforms import fingerprint
from fl_engine.storage.store import FolderStore, canonical, decode, encode, sha256

PREFIX = "sha256:"
TENSORS, ABOUT = "data.safetensors", "data.json"
PARTS = ("train_x", "train_y", "test_x", "test_y")
HEX, MORE = 64, 12
"""Digits of a fingerprint, and of the hash of data.json."""
NAME = re.compile(rf"([0-9a-f]{{{HEX}}})(-[0-9a-f]{{{MORE}}})?")


def is_stored(name: str) -> bool:
    """Whether a data set's name in a configuration is that of kept data."""
    return name.startswith(PREFIX)


def display_name(name: str, root: Any) -> str:
    """What a person reads for a data set's name in a configuration: of kept data the name that they were given with;
    the other name where it is not known, as where they no longer lie below `root`."""
    if not is_stored(name) or root is None:
        return name
    try:
        return str(json.loads((Path(root) / name.removeprefix(PREFIX) / ABOUT).read_bytes())["name"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return name


def exists(root: Path, name: str) -> bool:
    """Whether the data of this name lie below `root`."""
    return (root / name.removeprefix(PREFIX) / ABOUT).is_file()


def store(data: Data, root: Path, tasks: dict[str, type]) -> str:
    """Writes the data below `root` if they are not there; returns their name. `tasks`: by name, those that need no
    module. Raises DataError for a task that cannot be written down."""
    found = fingerprint(data)
    folder = FolderStore(root / found)
    about = canonical({"name": data.name, "task": _told(data.task, tasks), "mean": data.mean, "std": data.std})
    if folder.list(ABOUT) and not _says(folder.get(ABOUT), data, tasks):
        found = f"{found}-{sha256(about)[:MORE]}"
        folder = FolderStore(root / found)
    if not folder.list(ABOUT):
        tensors = {part: getattr(data, part).contiguous() for part in PARTS}
        if data.natural_client is not None:
            tensors["natural_client"] = data.natural_client
        folder.put(TENSORS, encode(tensors))
        folder.put(ABOUT, about)  # last: with this file the folder is complete
    return PREFIX + found


def _says(stored: bytes, data: Data, tasks: dict[str, type]) -> bool:
    """Whether a data.json has the name and the task of these data. Options that the task did not have yet when it was
    written have their defaults. A damaged one is no other: `read` names it."""
    try:
        about = json.loads(stored)
        there = about["name"], _told(_task_of(about["task"], tasks), tasks)
    except FlexfleetError:  # a task that cannot be imported here
        return False
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return True
    return canonical(there) == canonical((data.name, _told(data.task, tasks)))


def read(root: Path, name: str, tasks: dict[str, type]) -> Data:
    """The data that `store` named. Raises DataError where there are none, IntegrityError where they are damaged."""
    wanted = name.removeprefix(PREFIX)
    form = NAME.fullmatch(wanted)
    if form is None:
        raise ConfigError(f"dataset.name = {name!r}: after {PREFIX} the {HEX} digits of a fingerprint are expected")
    path = root / wanted
    if not exists(root, name):
        raise DataError(
            f"{path} does not exist: these are data that were given in Python. Give them again, or set dataset.root to "
            "the folder .data of the store where they were given (flexfleet.load also finds it in the store of the run)"
        )
    folder = FolderStore(path)
    try:
        about = json.loads(folder.get(ABOUT))
        tensors = decode(folder.get(TENSORS), str(path / TENSORS))
        task = _task_of(about["task"], tasks)
        data = Data(
            about["name"],
            task,
            **{part: tensors[part] for part in PARTS},
            mean=tuple(about["mean"]),
            std=tuple(about["std"]),
            natural_client=tensors.get("natural_client"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, DataError) as error:
        raise IntegrityError(f"{path} holds no data: {error}. Remove it and give the data again") from error
    if (found := fingerprint(data)) != form[1]:
        raise IntegrityError(f"{path} is damaged: it holds the data {found[:12]}. Remove it and give the data again")
    return data


def _told(task: Task, tasks: dict[str, type]) -> dict[str, Any]:
    kind = type(task)
    name = next((name for name, each in tasks.items() if each is kind), f"{kind.__module__}:{kind.__qualname__}")
    if not is_dataclass(task):
        raise DataError(f"a task that is kept with its data is a dataclass, got {task!r}")
    return {"name": name, **asdict(task)}


def _task_of(told: dict[str, Any], tasks: dict[str, type]) -> Task:
    options = {key: value for key, value in told.items() if key != "name"}
    contract: Contract[Any] = Contract("task", tasks, Task)
    made: Task = contract.kind(told["name"])(**options)
    return made
