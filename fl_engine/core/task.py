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
    """A figure of merit: its key in histories and artifacts, which direction is the better one, and between which
    values it is. A client that reports the metric (`evaluate.on`) can report no other value."""

    name: str
    higher_is_better: bool = True
    low: float = -1e6
    high: float = 1e6


def misnamed(name: object) -> str:
    """What is wrong with the name of a metric, which is a key of histories and tables; empty: nothing."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name):
        return ""
    return "a name is a plain identifier of at most 32 characters (letters, digits, underscores)"


class Measured(NamedTuple):
    """What a task says of a whole data set."""

    values: Mapping[str, float]
    """By the metric's name, `Task.metric` among them."""
    confusion: Tensor = torch.empty(0, 0)
    """int64 (classes, classes): how many samples of a class (row) were taken for which (column); empty without classes.
    """


@runtime_checkable
class Task(Protocol):
    """What a network learns from data. Implementations are frozen dataclasses in `fl_engine.tasks`.

    `outputs_bo` is float32 (batch, outputs), (batch, outputs, H, W) of a network that answers at every place of a map,
    or (batch, outputs, T) of one that answers at every position of a sequence; `y` holds as many targets, as `check`
    returned them.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]
    """The metric that decides, the first that `measure` gives: `avg` and `full` are means and values of it. The best
    round, gates and studies look for its highest value, so it is one that is better when higher."""

    @property
    def outputs(self) -> int:
        """The head's size."""

    @property
    def label_count(self) -> int:
        """How many labels `labels` tells apart; 0: the task has none."""

    @property
    def identity(self) -> object:
        """What a data set's fingerprint has of the task."""

    def check(self, y: Tensor, what: str) -> Tensor:
        """The targets in the form that the other functions take. Raises DataError, which begins with `what`."""

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """What partition rules and stratified subsets deal by: (N,) in 0 .. label_count - 1."""

    def present(self, y: Tensor) -> Tensor:
        """bool (outputs,): the outputs that occur as targets. Raises ModelError where outputs are no classes."""

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Made-up targets, for measurements without data."""

    def loss(self, outputs_bo: Tensor, y: Tensor, reduction: Literal["none", "sum"] = "none") -> Tensor:
        """One value for each sample, (batch,), or their sum."""

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """A student's outputs as `divergence` takes them, of the same shape."""

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """How far a softened student is from a teacher, for each output, of the same shape. Distillation sums it or
        takes its mean, times temperature^2."""

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """What `measure` has to know of a batch: sums where the metric adds up, else answers and targets themselves."""

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """The metrics over all batches: exactly those of the whole data set, however it was cut into batches."""


BESIDE = ("loss", "params")
"""What stands beside the metrics where results are written down, so that no metric has such a name."""


def measured(task: Task, observed: Sequence[Tensor]) -> Measured:
    """What the task says of a whole data set (`Task.measure`). Raises DataError where it does not say the metric that
    decides, or where a metric's name is none, or taken."""
    found, kind = task.measure(observed), type(task).__name__
    if task.metric.name not in found.values:
        raise DataError(f"{kind} decides by {task.metric.name!r}, and measures {', '.join(found.values) or 'nothing'}")
    for name in found.values:
        if wrong := unfit(name):
            raise DataError(f"{kind} measures {name!r}: {wrong}")
    return found


def unfit(name: object) -> str:
    """What is wrong with the name of a task's metric; empty: nothing."""
    taken = f"{' and '.join(BESIDE)} stand beside the metrics: give it another name"
    return misnamed(name) or (taken if name in BESIDE else "")


LABEL_WORD = r"[\w -]{1,40}"


def label_word(task: Task) -> str:
    """What people call one of the task's labels: its `label_word`, where it has one. Raises DataError for one that no
    file of a partition can hold."""
    word = getattr(task, "label_word", "label")
    if not isinstance(word, str) or not re.fullmatch(LABEL_WORD, word):
        raise DataError(
            f"the label_word of {type(task).__name__} is a text of letters, digits, spaces and hyphens, at most 40, "
            f"got {word!r}"
        )
    return word


def has_boxes(task: Task) -> bool:
    """Whether targets are boxes in the sample, several of them (`core.boxes`): its `boxes`, where it has one.
    Augmentations move them with the sample, and no label is a sample's only one."""
    return bool(getattr(task, "boxes", False))


def has_sequences(task: Task) -> bool:
    """Whether a sample has a target at each of its positions, as a text has next tokens: the task's `sequences`, where
    it has one."""
    return bool(getattr(task, "sequences", False))


def class_count(task: Task) -> int:
    """How many classes there are, one of which each sample's target is: the task's `classes`, where it has such; 0
    where targets are no classes."""
    return int(getattr(task, "classes", 0))


def class_names(task: Task) -> tuple[str, ...]:
    """The names of the classes: the task's `names`, if it has any."""
    return tuple(getattr(task, "names", ()))


def check_ready(task: Task) -> None:
    """Raises EnvironmentFailure where a package that the task's metric needs is not installed: the task's `ready`,
    where it has one."""
    ready = getattr(task, "ready", None)
    if ready is not None:
        ready()
