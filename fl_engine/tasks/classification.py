"""Classification: cross entropy as the loss and accuracy as the metric, optionally with top-5 accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError, ModelError
from fl_engine.core.task import Measured, Metric

TOP = 5


@dataclass(frozen=True)
class Classification:
    """Targets are int64 (N,), the numbers of the classes. The network returns a logit for each class."""

    classes: int
    top5: bool = False
    """Also measure top-5 accuracy: the share of samples whose class is among the five highest logits. Of equal logits
    the lower class comes first. Needs at least six classes."""
    names: tuple[str, ...] = field(default=(), repr=False)
    """The name of each class, or empty."""

    name: ClassVar[str] = "classification"
    metric: ClassVar[Metric] = Metric("accuracy", low=0.0, high=1.0)
    among_five: ClassVar[Metric] = Metric("top5", low=0.0, high=1.0)
    label_word: ClassVar[str] = "class"

    def __post_init__(self) -> None:
        if type(self.classes) is not int or self.classes < 2:
            raise DataError(f"classification needs at least 2 classes, got {self.classes!r}")
        if self.top5 and self.classes <= TOP:
            raise DataError(f"top5 needs at least {TOP + 1} classes, got {self.classes}. Leave it out")
        object.__setattr__(self, "names", tuple(self.names))  # JSON has lists
        texts = {name for name in self.names if isinstance(name, str)}
        if self.names and {len(self.names), len(texts)} != {self.classes}:
            raise DataError(f"names must be {self.classes} different texts, one for each class, got {len(self.names)}")

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def label_count(self) -> int:
        return self.classes

    @property
    def identity(self) -> object:
        """The number of classes, and their names if they have some."""
        return (self.classes, self.names) if self.names else self.classes

    def check(self, y: Tensor, what: str) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            kind = str(y.dtype).removeprefix("torch.")
            whole = not y.is_complex() and bool((y == y.long()).all())
            cure = "Convert them with y.long()" if whole else "Numbers to predict are a Regression()"
            raise DataError(f"{what}: classes must be integers from 0 to {self.classes - 1}, got {kind}. {cure}")
        if y.dim() != 1:
            raise DataError(
                f"{what}: expected one class per sample, (N,), got the shape {tuple(y.shape)}; for one-hot rows give "
                "y.argmax(1), for a column y[:, 0]"
            )
        y = y.long()
        wrong = ((y < 0) | (y >= self.classes)).nonzero().flatten()
        if len(wrong):
            raise DataError(
                f"{what}: expected classes 0..{self.classes - 1}, found {int(y[wrong[0]])} at sample {int(wrong[0])} "
                f"({len(wrong)} such samples)"
            )
        return y

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        found: NDArray[np.int64] = y.numpy()
        return found

    def present(self, y: Tensor) -> Tensor:
        return torch.bincount(y, minlength=self.classes) > 0

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.classes, (count,), generator=generator)

    def loss(self, outputs_bo: Tensor, y: Tensor, reduction: Literal["none", "sum"] = "none") -> Tensor:
        if outputs_bo.dim() != 2:
            raise ModelError(
                f"classification needs networks that return (batch, {self.classes}), this one returns "
                f"{tuple(outputs_bo.shape)}"
            )
        return F.cross_entropy(outputs_bo, y, reduction=reduction)

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Return the logarithms of the softened probabilities."""
        return F.log_softmax(outputs_bo / temperature, dim=1)

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the terms of KL(softmax(teacher / temperature) || student), one per class."""
        return F.kl_div(softened_bo, F.softmax(teacher_bo / temperature, dim=1), reduction="none")

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return class * classes + predicted class, int64 (batch,); with `top5` (2, batch), the second row 1 if the
        class is among the first five."""
        taken = y * self.classes + outputs_bo.argmax(1)
        if not self.top5:
            return taken
        # For ties, torch does not define which classes topk gives; a stable sort keeps their order on every machine.
        first = outputs_bo.sort(dim=1, descending=True, stable=True).indices[:, :TOP]
        return torch.stack([taken, (first == y[:, None]).any(1).long()])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        taken, *among = torch.cat(list(observed), dim=-1).view(1 + self.top5, -1)
        confusion = torch.bincount(taken, minlength=self.classes**2).view(self.classes, self.classes).cpu()
        values = {self.metric.name: int(confusion.trace()) / len(taken)}
        for right in among:
            values[self.among_five.name] = int(right.sum()) / len(taken)
        return Measured(values, confusion)
