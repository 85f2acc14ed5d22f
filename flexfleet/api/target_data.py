"""Convert targets to the form that a task expects, and choose the task if the targets fit only one task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import DataError, nearest
from fl_engine.core.task import VOID, Task, class_names
from fl_engine.tasks import Classification, Multilabel, Regression, Segmentation

log = logging.getLogger("flexfleet")

Array = NDArray[Any]
RENUMBER = "Renumber them: numpy.unique(y, return_inverse=True)[1]"


def with_task(task: Any, parts: Sequence[Array], name: str) -> tuple[Task, list[Array]]:
    """Choose or check the task, and convert the targets to the form that the task expects; return both.

    Args:
        task: A task or its name (`TASKS`). None to choose the task by the type and shape of the targets.
        parts: Targets of the training and the test samples, or of each client.
        name: Name of the data set, for messages.

    Raises:
        DataError: The targets fit several tasks, or do not fit the given task.
    """
    kinds = {part.dtype.kind for part in parts}
    if len(kinds) > 1 and "U" in kinds:
        raise DataError(f"{name}: all targets must be numbers, or all must be strings")
    if task is None:
        task = _only_task(parts, name)
    if isinstance(task, str):
        if task not in TASKS:
            raise DataError.at(f"task must be the name of a task or a task object, got {task!r}{nearest(task, TASKS)}")
        if "U" in kinds and task != "classification":
            raise DataError(f"{name}: targets of the task {task} must be numbers, got strings", path="task")
        return TASKS[task](parts, name)
    if isinstance(task, type) or not isinstance(task, Task):
        raise DataError.at(f"task must be a name or a task object, such as Classification(10), got {task!r}")
    numbers = [_numbered(part, class_names(task), name) if "U" in kinds else part for part in parts]
    return task, [part.astype(np.uint8) if part.dtype.kind == "b" else part for part in numbers]


def _only_task(parts: Sequence[Array], name: str) -> str:
    """Return the name of the only task that fits the targets. Raises DataError if several tasks fit."""
    y = parts[0]
    floats, shape = y.dtype.kind == "f", f"{y.dtype} {y.shape}"
    if y.ndim == 1 or (y.shape[1:] == (1,) and not floats):
        return "regression" if floats else "classification"
    if y.ndim == 2 and y.dtype.kind != "U" and all(((part == 0) | (part == 1)).all() for part in parts):
        raise DataError(
            f"{name}: targets {shape} with only the values 0 and 1 fit several tasks. Set task='multilabel' if a "
            "sample can have several labels, 'classification' if each row is one-hot, or 'regression' for numbers",
            path="task",
        )
    if y.ndim == 2 and floats:
        return "regression"
    raise DataError(
        f"{name}: expected one class (N,) or float targets (N, outputs) for each sample, got {shape}. For "
        "integer targets of shape (N, H, W), set task='segmentation'. For any other targets, pass a task object",
        path="task",
    )


def _numbered(y: Array, names: Sequence[str], name: str) -> Array:
    """Return the index in `names` for each name in `y`."""
    if unknown := sorted(set(y.ravel().tolist()) - set(names)):
        raise DataError(f"{name}: the task's class names do not contain {unknown[0]!r}{nearest(unknown[0], names)}")
    order: Array = np.argsort(names)
    found: Array = order[np.searchsorted(np.asarray(names)[order], y)]
    return found


def _whole_numbers(y: Array, name: str) -> Array:
    if y.dtype.kind == "f" and not (y == np.rint(y)).all():
        raise DataError(f"{name}: classes must be whole numbers, got {y.dtype} with fractional values", path="task")
    return y.astype(np.int64)


def _classes(y: Array, name: str) -> Array:
    """Return the class index of each sample, shape (N,). `y` can also be a column (N, 1) or one-hot rows."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype.kind == "U" and y.ndim == 1:
        return y
    if y.ndim == 2 and y.dtype.kind != "U" and ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
        return np.nonzero(y)[1]
    if y.ndim != 1:
        raise DataError(f"{name}: expected one class for each sample (N,) or one-hot rows, got {y.dtype} {y.shape}")
    return _whole_numbers(y, name)


def _classification(parts: Sequence[Array], name: str) -> tuple[Task, list[Array]]:
    labels = [_classes(part, name) for part in parts]
    seen = np.unique(np.concatenate(labels))
    if not len(seen):
        raise DataError(f"{name}: training and test data must not be empty, got {[len(part) for part in parts]}")
    if seen.dtype.kind == "U":
        names = tuple(map(str, seen))
        return Classification(len(names), names=names), [_numbered(part, names, name) for part in labels]
    classes = max(int(seen[-1]) + 1, *(part.shape[1] for part in parts if part.ndim == 2), 0)
    if seen[0] < 0 or 2 * len(seen) < classes:
        raise DataError(
            f"{name}: classes must be 0, 1, 2, ..., got {len(seen)} classes from {seen[0]} to {seen[-1]}. {RENUMBER}"
        )
    if len(seen) < classes:
        log.warning("%s: only %d of the classes 0..%d have samples. %s", name, len(seen), classes - 1, RENUMBER)
    return Classification(classes), labels


def _regression(parts: Sequence[Array], name: str) -> tuple[Task, list[Array]]:
    outputs = parts[0].shape[1] if parts[0].ndim > 1 else 1
    return Regression(outputs), [part.astype(np.float32) if part.dtype.kind == "b" else part for part in parts]


def _multilabel(parts: Sequence[Array], name: str) -> tuple[Task, list[Array]]:
    outputs = parts[0].shape[1] if parts[0].ndim > 1 else 1
    return Multilabel(outputs), [part.astype(np.float32) for part in parts]


def _segmentation(parts: Sequence[Array], name: str) -> tuple[Task, list[Array]]:
    maps = [part[:, 0] if part.ndim == 4 and part.shape[1] == 1 else part for part in parts]
    maps = [_whole_numbers(part, name) if part.dtype.kind == "f" else part for part in maps]
    largest = max((int(part[part != VOID].max(initial=0)) for part in maps), default=0)
    if not largest:
        raise DataError(
            f"{name}: masks must contain a category of at least 1, got only 0 or {VOID} (ignored pixels). If "
            f"{VOID} is the foreground, pass mask // {VOID}"
        )
    return Segmentation(largest + 1), [part.astype(np.uint8) if part.dtype.kind == "b" else part for part in maps]


TASKS: dict[str, Callable[[Sequence[Array], str], tuple[Task, list[Array]]]] = {
    "classification": _classification,
    "regression": _regression,
    "multilabel": _multilabel,
    "segmentation": _segmentation,
}
"""Map each task name to a function that creates the task and converts the targets."""
