"""Protocol of the task that a network learns. A task defines loss, labels and metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError, ModelError

VOID = 255
"""Target of pixels that a segmentation ignores, as in Pascal VOC and Cityscapes."""


@dataclass(frozen=True)
class Metric:
    """Name, direction and bounds of a metric. `name` is the metric's key in histories and artifacts. Clients may report
    values from `low` to `high` (`evaluate.on`)."""

    name: str
    higher_is_better: bool = True
    low: float = -1e6
    high: float = 1e6


def find_name_error(name: object) -> str:
    """Return an error message if a metric cannot have this name, otherwise an empty string."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name):
        return ""
    return "a name must be an identifier of at most 32 characters (letters, digits, underscores)"


class Measured(NamedTuple):
    """Metrics of a network for a whole data set."""

    values: Mapping[str, float]
    confusion: Tensor = torch.empty(0, 0)
    """Confusion matrix, int64 (classes, classes): rows are labels, columns are predictions; empty without classes."""


@runtime_checkable
class Task(Protocol):
    """Defines the targets of a network, the loss and the metrics. A task is a frozen dataclass in `fl_engine.tasks`.

    `outputs_bo` is float32 (batch, outputs). For predictions at every position of a map, the shape is (batch, outputs,
    H, W). For predictions at every position of a sequence, the shape is (batch, outputs, T). `y` contains the targets
    of the batch, as returned by `check`.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]
    """First metric of `measure`, from which `avg` and `full` are computed. Higher values must be better, because gates,
    studies and the choice of the best round maximise this metric."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the network's head."""

    @property
    def label_count(self) -> int:
        """Number of labels that `labels` distinguishes; 0 for a task without labels."""

    @property
    def identity(self) -> object:
        """Value that identifies the task in the fingerprint of a data set."""

    def check(self, y: Tensor, what: str) -> Tensor:
        """Return the targets in the form that other methods expect. A DataError's message begins with `what`."""

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return labels (N,) from 0 to label_count - 1 for partition rules and stratified subsets."""

    def present(self, y: Tensor) -> Tensor | None:
        """Return a bool mask (outputs,) of the classes in the targets. Return None if samples do not have exactly one
        class; then `algorithm.mask_labels` has no effect."""

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return `count` random targets, for measurements that do not use a data set."""

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the losses of the samples, (batch,)."""

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Return the input of `divergence` for a student's outputs. The shape does not change."""

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the divergence of softened student outputs from teacher outputs, with the shape of the outputs.
        Distillation sums or averages the divergence and multiplies the result by temperature^2."""

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the input of `measure` for a batch: sums for additive metrics, otherwise outputs and targets."""

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return the metrics over all batches. The result must not depend on the batch size."""


class Described:
    """Base class of the built-in tasks, which are dataclasses of options."""

    name: ClassVar[str]

    @property
    def identity(self) -> object:
        """Tuple of the task's name and the values of all options."""
        task: Any = self
        return (self.name, *(getattr(self, option.name) for option in fields(task)))

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Return the outputs divided by the temperature."""
        return outputs_bo / temperature

    def present(self, y: Tensor) -> Tensor | None:
        """Return None instead of a class mask, because outputs are not classes or a sample may have several classes."""
        return None


BESIDE = ("loss", "params")
"""Keys of results that are not metrics. Metrics must not have these names."""


def check_metric_name(task: Task, name: str) -> None:
    """Raise DataError if a metric of the task cannot have this name."""
    wrong = "the engine uses this name" if name in BESIDE else find_name_error(name)
    if wrong:
        raise DataError(f"{type(task).__name__} measures {name!r}: {wrong}")


def measured(task: Task, observed: Sequence[Tensor]) -> Measured:
    """Return `task.measure(observed)`. Raises DataError if the first metric is missing or a name is invalid."""
    found = task.measure(observed)
    if task.metric.name not in found.values:
        raise DataError(f"{type(task).__name__} must return the metric {task.metric.name!r}, got {[*found.values]}")
    for name in found.values:
        check_metric_name(task, name)
    return found


def wrong_shape(task: Task, outputs_bo: Tensor, expected: str) -> ModelError:
    """Return the error for outputs of another shape than `expected`."""
    return ModelError(
        f"a network for the task {task.name} must return a tensor of shape {expected}, got {tuple(outputs_bo.shape)}"
    )


def label_word(task: Task) -> str:
    """Return the noun for a label of the task in messages, such as `class`."""
    return str(getattr(task, "label_word", "label"))


def has(task: Task, trait: Literal["boxes", "sequences", "maps", "rowwise"]) -> bool:
    """Return whether the optional attribute `trait` of a task is True.

    boxes: The targets are boxes (`core.boxes`), which augmentations move with the sample.
    sequences: A sample has a target at each position, such as the next token in a text or the category of a pixel.
    maps: The targets are maps with a target for each pixel of a sample.
    rowwise: The loss of a sample is bit-identical in every batch that contains the sample. Other losses use elementwise
        functions such as exp, which torch rounds differently for the last elements of a tensor.
    """
    return bool(getattr(task, trait, False))


def class_names(task: Task) -> tuple[str, ...]:
    """Return the names of the classes. The result is empty if the task does not have class names."""
    return tuple(getattr(task, "names", ()))


def class_count(task: Task) -> int:
    """Return the number of classes, or 0 if the targets are not classes."""
    return int(getattr(task, "classes", 0))
