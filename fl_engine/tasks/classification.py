"""Classification with cross entropy as the loss, and with accuracy and optionally top-5 accuracy as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.task import Described, Measured, Metric, wrong_shape

TOP = 5


def numbers_below(count: int, y: Tensor, shape: tuple[int, ...], what: str, cure: str = "") -> Tensor:
    """Return the targets `y` as int64. Raises DataError unless the targets are integers from 0 to `count` - 1 with the
    shape `shape`. The error message starts with `what`."""
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != shape:
        kind, wanted = str(y.dtype).removeprefix("torch."), f"{shape} from 0 to {count - 1}"
        raise DataError(f"{what} must be integers {wanted}, got {kind} {tuple(y.shape)}. {cure}".strip())
    y = y.long()
    wrong = (y < 0) | (y >= count)
    if bool(wrong.any()):
        samples = wrong.reshape(len(y), -1).any(1).nonzero().flatten()
        found = f"{int(y[wrong][0])} in sample {int(samples[0])} ({len(samples)} such samples)"
        raise DataError(f"{what} must be from 0 to {count - 1}, got {found}")
    return y


def check_names(names: Sequence[str], classes: int) -> tuple[str, ...]:
    """Return the class names as a tuple, because names from JSON are a list. Raises DataError unless `names` is empty
    or has one unique string per class."""
    texts = {name for name in names if isinstance(name, str)}
    if names and {len(names), len(texts)} != {classes}:
        raise DataError(f"names must be {classes} different strings, one per class, got {len(names)}")
    return tuple(names)


class Distilled(Described):
    """Mixin for distillation with class logits (batch, classes, ...)."""

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Divide the logits by the temperature, and return the log-probabilities."""
        return F.log_softmax(outputs_bo / temperature, dim=1)

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the terms of KL(softmax(teacher / temperature) || student) for each class and position of a sequence.
        Padding is included, because only targets show which positions are padding."""
        return F.kl_div(softened_bo, F.softmax(teacher_bo / temperature, dim=1), reduction="none")


@dataclass(frozen=True)
class Classification(Distilled):
    """Classification. Targets are class numbers, int64 (N,), and the network returns one logit per class."""

    classes: int
    top5: bool = False
    """Also measure top-5 accuracy: the fraction of samples whose class has one of the five highest logits. If logits
    are equal, lower class numbers come first. Top-5 accuracy requires at least six classes."""
    names: tuple[str, ...] = field(default=(), repr=False)
    """Class names; may be empty."""

    name: ClassVar[str] = "classification"
    rowwise: ClassVar[bool] = True
    metric: ClassVar[Metric] = Metric("accuracy", low=0.0, high=1.0)
    among_five: ClassVar[Metric] = Metric("top5", low=0.0, high=1.0)
    label_word: ClassVar[str] = "class"

    def __post_init__(self) -> None:
        if type(self.classes) is not int or self.classes < 2:
            raise DataError(f"classification: classes must be an integer of at least 2, got {self.classes!r}")
        if self.top5 and self.classes <= TOP:
            raise DataError(f"top5 requires at least {TOP + 1} classes, got {self.classes}. Set top5=False")
        object.__setattr__(self, "names", check_names(self.names, self.classes))

    @property
    def outputs(self) -> int:
        return self.classes

    label_count = outputs

    @property
    def identity(self) -> object:
        """Number of classes, or a tuple (number of classes, class names) if names are set."""
        return (self.classes, self.names) if self.names else self.classes

    def check(self, y: Tensor, what: str) -> Tensor:
        cure = "For one-hot rows pass y.argmax(1); to predict numbers use Regression()"
        return numbers_below(self.classes, y, (len(y),), f"{what}: classes", cure)

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        found: NDArray[np.int64] = y.numpy()
        return found

    def present(self, y: Tensor) -> Tensor:
        return torch.bincount(y, minlength=self.classes) > 0

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.classes, (count,), generator=generator)

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        if outputs_bo.dim() != 2:
            raise wrong_shape(self, outputs_bo, f"(batch, {self.classes})")
        return F.cross_entropy(outputs_bo, y, reduction="none")

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return true class * number of classes + predicted class, int64 (batch,). With `top5`, return (2, batch). The
        second row is 1 if the true class has one of the five highest logits, otherwise 0."""
        taken = y * self.classes + outputs_bo.argmax(1)
        if not self.top5:
            return taken
        # If logits are equal, the result of torch.topk is undefined; a stable sort gives the same result everywhere.
        first = outputs_bo.sort(dim=1, descending=True, stable=True).indices[:, :TOP]
        return torch.stack([taken, (first == y[:, None]).any(1).long()])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        taken, *among = torch.cat(list(observed), dim=-1).view(1 + self.top5, -1)
        confusion = torch.bincount(taken, minlength=self.classes**2).view(self.classes, self.classes).cpu()
        values = {self.metric.name: int(confusion.trace()) / len(taken)}
        for right in among:
            values[self.among_five.name] = int(right.sum()) / len(taken)
        return Measured(values, confusion)
