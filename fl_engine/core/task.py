"""What is learned from data: the task, which owns loss, labels and metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError


# ----------------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class Metric:
    """A metric: its key in histories and artifacts, its direction, and the bounds within which a client may report it
    (`evaluate.on`)."""

    name: str
    higher_is_better: bool = True
    low: float = -1e6
    high: float = 1e6


def misnamed(name: object) -> str:
    """Return why a metric cannot have this name, or an empty text."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name):
        return ""
    return "a name is a plain identifier of at most 32 characters (letters, digits, underscores)"


class Measured(NamedTuple):
    """A task's metrics of a whole data set."""

    values: Mapping[str, float]
    """By the metric's name, `Task.metric` among them."""
    confusion: Tensor = torch.empty(0, 0)
    """int64 (classes, classes): samples of a class (row) by predicted class (column); empty without classes."""


@runtime_checkable
class Task(Protocol):
    """What a network learns from data. A frozen dataclass in `fl_engine.tasks`.

    `outputs_bo` is float32 (batch, outputs), with more axes if the network predicts at every place of a map, (batch,
    outputs, H, W), or at every position of a sequence, (batch, outputs, T). `y` are as many targets, as `check` returns
    them.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]
    """The first metric of `measure`. `avg` and `full` are means and values of it, and the best round, gates and studies
    maximise it, so it must be better when higher."""

    @property
    def outputs(self) -> int:
        """The head's size."""

    @property
    def label_count(self) -> int:
        """The number of labels of `labels`; 0 if the task has none."""

    @property
    def identity(self) -> object:
        """The task's part of a data set's fingerprint."""

    def check(self, y: Tensor, what: str) -> Tensor:
        """Return the targets as the other functions expect them. Raises DataError, whose text begins with `what`."""

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the labels for partition rules and stratified subsets: (N,) in 0 .. label_count - 1."""

    def present(self, y: Tensor) -> Tensor:
        """Return which outputs occur as targets, bool (outputs,). Raises ModelError if outputs are not classes."""

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random targets, for measurements without data."""

    def loss(self, outputs_bo: Tensor, y: Tensor, reduction: Literal["none", "sum"] = "none") -> Tensor:
        """Return one value per sample, (batch,), or their sum."""

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Return a student's outputs as `divergence` expects them, of the same shape."""

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the divergence of a softened student from a teacher, of the same shape. Distillation sums or averages
        it, times temperature^2."""

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return what `measure` needs of a batch: sums if the metric adds up, else outputs and targets."""

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return the metrics over all batches, independent of how the data set was cut into batches."""


BESIDE = ("loss", "params")
"""Keys beside the metrics in results, which no metric may have."""


def measured(task: Task, observed: Sequence[Tensor]) -> Measured:
    """Return `task.measure(observed)`. Raises DataError if it lacks the first metric, or has a wrong name."""
    found, kind = task.measure(observed), type(task).__name__
    if task.metric.name not in found.values:
        raise DataError(f"{kind} decides by {task.metric.name!r}, and measures {', '.join(found.values) or 'nothing'}")
    for name in found.values:
        if wrong := unfit(name):
            raise DataError(f"{kind} measures {name!r}: {wrong}")
    return found


def unfit(name: object) -> str:
    """Return why a task's metric cannot have this name, or an empty text."""
    taken = f"{' and '.join(BESIDE)} stand beside the metrics: give it another name"
    return misnamed(name) or (taken if name in BESIDE else "")


LABEL_WORD = r"[\w -]{1,40}"


def label_word(task: Task) -> str:
    """Return what a label of the task is called in texts: its `label_word`, if it has one. Raises DataError for a text
    that a partition's file cannot hold."""
    word = getattr(task, "label_word", "label")
    if not isinstance(word, str) or not re.fullmatch(LABEL_WORD, word):
        raise DataError(
            f"the label_word of {type(task).__name__} is a text of letters, digits, spaces and hyphens, at most 40, "
            f"got {word!r}"
        )
    return word


def has_boxes(task: Task) -> bool:
    """Return whether the targets are boxes (`core.boxes`), which augmentations move with the sample."""
    return bool(getattr(task, "boxes", False))


def has_sequences(task: Task) -> bool:
    """Return whether a sample has a target at each position, as a text has next tokens."""
    return bool(getattr(task, "sequences", False))


def class_count(task: Task) -> int:
    """Return the number of classes, or 0 if the targets are not classes."""
    return int(getattr(task, "classes", 0))


def class_names(task: Task) -> tuple[str, ...]:
    """Return the names of the classes, if the task has any."""
    return tuple(getattr(task, "names", ()))


def check_ready(task: Task) -> None:
    """Raise EnvironmentFailure if a package that the task's metric needs is not installed."""
    ready = getattr(task, "ready", None)
    if ready is not None:
        ready()
