"""Data of any kind, and what is learnt from them: samples, targets, and the task that owns loss and metrics."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.sample_checks import (
    IMAGE_AXES,
    check_normalisation,
    numbers_of,
    said,
    samples_of,
    sources_of,
    tensor_of,
)


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
        if wrong := _unfit(name):
            raise DataError(f"{kind} measures {name!r}: {wrong}")
    return found


def _unfit(name: object) -> str:
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


# ------------------------------------------------------------------------------------------------------ data
@dataclass(frozen=True)
class Data:
    """A data set in memory: samples, targets, the task, and how samples are normalised.

    Samples (N, ...) are one of three kinds:

        images    uint8 (N, C, H, W); a network is fed `(x / 255 - mean) / std`, per channel (in units of 255)
        floats    of any shape: vectors (N, F), series (N, T, F), maps (N, C, H, W); a network is fed
                  `(x - mean) / std`, per feature (the last axis; the channel, of maps), or x itself where neither
                  is given
        tokens    integers from 0 on, of any shape; a network is fed them as they are

    NumPy arrays are taken, and become tensors. What targets look like is the task's to say. `natural_client`
    (N_train,) names the source of each training sample where the data set knows it (a writer, a user), for the
    natural partition. Raises DataError for samples of no such kind, for numbers that are not finite, and for fields
    that do not fit each other.
    """

    name: str
    task: Task
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    natural_client: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"a data set's name is a word, got {self.name!r}")
        if isinstance(self.task, type) or not isinstance(self.task, Task):
            raise DataError(
                f"{self.name}: task is one of fl_engine.tasks, for example Classification(10) or Regression(), "
                f"got {self.task!r}"
            )
        if wrong := _unfit(self.task.metric.name):
            raise DataError(f"{self.name}: {type(self.task).__name__} decides by {self.task.metric.name!r}: {wrong}")
        if not self.task.metric.higher_is_better:
            raise DataError(
                f"{self.name}: {self.task.metric.name} decides and is better when lower; let a task decide by a metric "
                "that is better when higher (R2, a negative error), and measure this one besides"
            )
        label_word(self.task)
        checked: dict[str, Any] = {"mean": numbers_of(self.mean, f"{self.name}: mean")}
        checked["std"] = numbers_of(self.std, f"{self.name}: std")
        for part in ("train", "test"):
            x, y = (tensor_of(getattr(self, f"{part}_{of}"), f"{self.name}: {part}_{of}") for of in "xy")
            x = samples_of(x, f"{self.name}: {part}_x")
            if not len(x):
                raise DataError(f"{self.name}: the {part} part has no samples; at least one is needed")
            if y.dim() == 0 or len(x) != len(y):
                raise DataError(
                    f"{self.name}: {part}_x has {len(x)} samples, {part}_y has {len(y) if y.dim() else 'none'}; "
                    "one target is needed for each sample"
                )
            checked |= {f"{part}_x": x, f"{part}_y": self.task.check(y, f"{self.name}: {part}_y")}
        train, test = checked["train_x"], checked["test_x"]
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"{self.name}: training samples are {said(train)}, test samples {said(test)}; they have to be alike"
            )
        check_normalisation(self.name, train, checked["mean"], checked["std"])
        if self.natural_client is not None:
            checked["natural_client"] = sources_of(self.name, self.natural_client, len(train))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """One line, without the samples: name, numbers of samples, type and shape of one, and task."""
        return (
            f"<Data {self.name}: {len(self.train_x)} training and {len(self.test_x)} test samples, "
            f"{said(self.train_x)}, {self.task}>"
        )

    def part(self, train: Tensor, test: Tensor) -> Data:
        """The training samples at these positions, and those at `test` as test samples. They are not checked again:
        what has to hold of the whole (an image with a box, targets that differ) need not hold of a part."""
        found = copy.copy(self)
        of = {"train_x": self.train_x[train], "train_y": self.train_y[train]}
        if test is train:
            of |= {"test_x": of["train_x"], "test_y": of["train_y"]}
        else:
            of |= {"test_x": self.train_x[test], "test_y": self.train_y[test]}
        for name, value in {**of, "natural_client": None}.items():
            object.__setattr__(found, name, value)
        return found

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @property
    def has_images(self) -> bool:
        return self.train_x.dtype == torch.uint8

    @property
    def has_tokens(self) -> bool:
        return self.train_x.dtype == torch.int64

    def normalise(self, x: Tensor) -> Tensor:
        """Samples (B, ...) as a network takes them, on the device where they lie: float32, or int64 tokens."""
        if not self.mean:
            return x
        shape = _feature_view(x)
        mean = torch.tensor(self.mean, device=x.device).view(shape)
        std = torch.tensor(self.std, device=x.device).view(shape)
        # In place, since all samples of a client are normalised at once, and results between would lie in memory too.
        centred = x.float().div_(255).sub_(mean) if x.dtype == torch.uint8 else x - mean
        return centred.div_(std)


def batch_layout(x: Tensor) -> Tensor:
    """A batch as networks take it in memory: maps channels last, anything else row by row."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == IMAGE_AXES else torch.contiguous_format)


def outputs_of(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a network puts out at each of its exits, the last one last. `out`: what it gave; without exits a tensor."""
    return out if isinstance(out, tuple) else (out,)


def split(x: Tensor, batch_size: int, answer: Callable[[Tensor], object]) -> Sequence[Tensor]:
    """Samples (N, ...) in batches for a network in evaluation, whose function is `answer`. A last batch of one sample
    joins the batch before it where the network cannot answer it, as batch norm without running statistics cannot for
    one value per channel."""
    parts = torch.split(x, batch_size)
    if len(parts) == 1 or len(parts[-1]) > 1:
        return parts
    try:
        with torch.no_grad():
            answer(parts[-1])
    except ValueError:
        return (*parts[:-2], x[-batch_size - 1 :])
    return parts


def _feature_view(x: Tensor) -> tuple[int, ...]:
    """The shape in which a value per feature is broadcast over samples."""
    return (1, -1, 1, 1) if x.dim() == IMAGE_AXES else (*[1] * (x.dim() - 1), -1)
