"""Stores data that a user passes as Python objects, so that other processes and later runs can load them.

The files `<root>/<key>/<part>.npy` contain train_x, train_y, test_x, test_y, natural_client and natural_test_client.
The file `<root>/<key>/data.json` contains name, task, mean and std.

In a configuration, `dataset.name` is `sha256:<key>`, and `dataset.root` is `<root>`. A folder never changes after it is
written. The key is the SHA-256 of the data's fingerprint and of data.json, because the fingerprint does not cover the
data's name or additional metrics of the task, such as top-5 accuracy.
"""

from __future__ import annotations

import json
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from fl_engine.core.errors import ConfigError, DataError, IntegrityError
from fl_engine.core.registry import Contract
from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.data.files import replacing
from fl_engine.data.transforms import fingerprint
from fl_engine.storage.store import FolderStore, canonical, sha256
from fl_engine.tasks import TASKS

PREFIX = "sha256:"
ABOUT = "data.json"
PARTS = ("train_x", "train_y", "test_x", "test_y")
SOURCES = ("natural_client", "natural_test_client")
KEY = re.compile("[0-9a-f]{64}")
TASK: Contract[Any] = Contract("task", TASKS, Task)

_STORED: WeakValueDictionary[str, Data] = WeakValueDictionary()
"""Maps keys to data that this process stored and still uses. `read` returns these objects instead of a copy."""


def is_stored(name: str) -> bool:
    """Return True if the name of a data set in a configuration refers to stored data."""
    return name.startswith(PREFIX)


def display_name(name: str, root: Any) -> str:
    """Return the user-defined name of the data stored as `name` below `root`, or `name` if these data do not exist."""
    if not is_stored(name) or root is None:
        return name
    try:
        return str(json.loads((Path(root) / name.removeprefix(PREFIX) / ABOUT).read_bytes())["name"])
    except (OSError, KeyError, TypeError, ValueError):
        return name


def exists(root: Path, name: str) -> bool:
    """Return True if data with this name exist below `root`."""
    return (root / name.removeprefix(PREFIX) / ABOUT).is_file()


def store(data: Data, root: Path) -> str:
    """Write the data below `root` unless they exist there, and return their name `sha256:<key>`. Raises DataError if
    the task cannot be written as JSON."""
    if not is_dataclass(data.task):
        raise DataError(f"data.task must be a dataclass, so that it can be stored, got {data.task!r}")
    about = canonical({"name": data.name, "task": TASK.section(data.task), "mean": data.mean, "std": data.std})
    key = _key(data, about)
    if not exists(root, key):
        for part in (*PARTS, *SOURCES):
            if (tensor := getattr(data, part)) is not None:
                with replacing(root / key / f"{part}.npy") as file:
                    np.save(file, tensor.numpy())
        FolderStore(root / key).put(ABOUT, about)  # write this file last, because it marks the folder as complete
    _STORED[key] = data
    return PREFIX + key


def read(root: Path, name: str) -> Data:
    """Return data that `store` wrote. If this process still uses the data, return the existing object. Raises DataError
    if the data do not exist, and IntegrityError if the data are damaged."""
    key = name.removeprefix(PREFIX)
    if KEY.fullmatch(key) is None:
        raise ConfigError(f"dataset.name must consist of {PREFIX!r} and 64 hexadecimal digits, got {name!r}")
    path = root / key
    if not exists(root, name):
        raise DataError(
            f"{path} does not exist. The data of the run were passed as Python objects. Pass the data again, or set "
            "dataset.root to the folder .data in the store of the first run (flexfleet.load also searches the store of "
            "the loaded run)"
        )
    try:
        value = FolderStore(path).get(ABOUT)
        stored = _STORED.get(key)
        if stored is not None and _key(stored, value) == key:  # check that the user has not changed the arrays
            return stored
        about = json.loads(value)
        TASK.kind(about["task"]["name"])  # check that the task's class can be imported
        arrays: dict[str, Any] = {}
        for part in (*PARTS, *SOURCES):
            if (file := path / f"{part}.npy").exists() or part in PARTS:
                mapped = part.endswith("_x")
                arrays[part] = np.load(file, mmap_mode="r") if mapped else torch.from_numpy(np.load(file))
        task, mean, std = TASK.parse(about["task"]), tuple(about["mean"]), tuple(about["std"])
        data = Data(about["name"], task, **arrays, mean=mean, std=std)
    except (OSError, EOFError, KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        raise IntegrityError(f"{path} is damaged ({error}). Delete the folder and pass the data again") from error
    if _key(data, value) != key:
        raise IntegrityError(f"{path} is damaged. Delete the folder and pass the data again")
    return data


def _key(data: Data, about: bytes) -> str:
    return sha256(fingerprint(data).encode() + about)
