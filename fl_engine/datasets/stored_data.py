"""Data that a user gave in Python, stored so that other processes and later runs find them.

    <root>/<key>/data.safetensors    train_x, train_y, test_x, test_y, natural_client
    <root>/<key>/data.json           name, task, mean, std

`dataset.name: sha256:<key>` names them in a configuration, and `dataset.root` is the root. A folder is written once and
never changed. The key is the SHA-256 of the data's fingerprint and of data.json, because the fingerprint contains
neither the name nor the task's other metrics (top-5 accuracy).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, DataError, IntegrityError
from fl_engine.core.registry import Contract
from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.data.transforms import fingerprint
from fl_engine.storage.store import FolderStore, canonical, decode, encode, sha256

PREFIX = "sha256:"
TENSORS, ABOUT = "data.safetensors", "data.json"
PARTS = ("train_x", "train_y", "test_x", "test_y")
KEY = re.compile("[0-9a-f]{64}")


def is_stored(name: str) -> bool:
    """Whether a data set's name in a configuration is that of stored data."""
    return name.startswith(PREFIX)


def display_name(name: str, root: Any) -> str:
    """Return the name that a user gave to stored data; `name` for other data, and if they are not below `root`."""
    if not is_stored(name) or root is None:
        return name
    try:
        return str(json.loads((Path(root) / name.removeprefix(PREFIX) / ABOUT).read_bytes())["name"])
    except (OSError, KeyError, TypeError, ValueError):
        return name


def exists(root: Path, name: str) -> bool:
    """Whether the data of this name are below `root`."""
    return (root / name.removeprefix(PREFIX) / ABOUT).is_file()


def store(data: Data, root: Path, tasks: dict[str, type]) -> str:
    """Write the data below `root` unless they exist, and return their name. `tasks` are the tasks that need no module.
    Raises DataError for a task that cannot be written as JSON."""
    about = canonical({"name": data.name, "task": _described(data.task, tasks), "mean": data.mean, "std": data.std})
    key = _key(data, about)
    if not exists(root, key):
        tensors = {part: getattr(data, part).contiguous() for part in PARTS}
        if data.natural_client is not None:
            tensors["natural_client"] = data.natural_client
        folder = FolderStore(root / key)
        folder.put(TENSORS, encode(tensors))
        folder.put(ABOUT, about)  # last: with this file the folder is complete
    return PREFIX + key


def read(root: Path, name: str, tasks: dict[str, type]) -> Data:
    """Return the data that `store` named. Raises DataError if they do not exist, IntegrityError if they are damaged."""
    key = name.removeprefix(PREFIX)
    if KEY.fullmatch(key) is None:
        raise ConfigError(f"dataset.name must be {PREFIX} and 64 hexadecimal digits, got {name!r}")
    path = root / key
    if not exists(root, name):
        raise DataError(
            f"{path} does not exist: these data were given in Python. Give them again, or set dataset.root to the "
            "folder .data of the store where they were given (flexfleet.load also finds it in the store of the run)"
        )
    folder = FolderStore(path)
    try:
        value = folder.get(ABOUT)
        about = json.loads(value)
        tensors = decode(folder.get(TENSORS), str(path / TENSORS))
        data = Data(
            about["name"],
            _task_of(about["task"], tasks),
            **{part: tensors[part] for part in PARTS},
            mean=tuple(about["mean"]),
            std=tuple(about["std"]),
            natural_client=tensors.get("natural_client"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        raise IntegrityError(f"{path} has no data: {error}. Remove it and give the data again") from error
    if _key(data, value) != key:
        raise IntegrityError(f"{path} is damaged. Remove it and give the data again")
    return data


def _key(data: Data, about: bytes) -> str:
    return sha256(fingerprint(data).encode() + about)


def _described(task: Task, tasks: dict[str, type]) -> dict[str, Any]:
    kind = type(task)
    name = next((name for name, each in tasks.items() if each is kind), f"{kind.__module__}:{kind.__qualname__}")
    if not is_dataclass(task):
        raise DataError(f"a task that is stored with its data must be a dataclass, got {task!r}")
    return {"name": name, **asdict(task)}


def _task_of(described: dict[str, Any], tasks: dict[str, type]) -> Task:
    options = {key: value for key, value in described.items() if key != "name"}
    contract: Contract[Any] = Contract("task", tasks, Task)
    made: Task = contract.kind(described["name"])(**options)
    return made
