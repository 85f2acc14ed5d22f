"""Multi-label classification with binary cross entropy as the loss, and with micro and macro F1 as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.task import Described, Measured, Metric, wrong_shape


@dataclass(frozen=True)
class Multilabel(Described):
    """Multi-label classification. Targets are float32 (N, outputs). Each target is 1 if the sample has the label,
    otherwise 0. The network returns one logit per label. A label with a positive logit is predicted."""

    outputs: int

    name: ClassVar[str] = "multilabel"
    metric: ClassVar[Metric] = Metric("f1", low=0.0, high=1.0)
    macro: ClassVar[Metric] = Metric("macro_f1", low=0.0, high=1.0)
    label_word: ClassVar[str] = "first label"

    def __post_init__(self) -> None:
        if type(self.outputs) is not int or self.outputs < 1:
            raise DataError(f"multilabel: outputs must be an integer of at least 1, got {self.outputs!r}")

    @property
    def label_count(self) -> int:
        """Number of outputs plus 1. The extra index marks samples without labels."""
        return self.outputs + 1

    def check(self, y: Tensor, what: str) -> Tensor:
        if y.is_complex() or y.dim() != 2 or y.shape[1] != self.outputs or not bool(((y == 0) | (y == 1)).all()):
            raise DataError(
                f"{what}: labels must have the shape (N, {self.outputs}) and be 0 or 1, got "
                f"{str(y.dtype).removeprefix('torch.')} {tuple(y.shape)}"
            )
        if not bool(y.any()):
            raise DataError(f"{what}: at least one sample must have a label, because F1 is undefined without labels")
        return y.float()

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the index of each sample's first label, or `outputs` for samples without labels."""
        none = ~y.bool().any(1, keepdim=True)
        # NumPy's argmax returns the first index of the maximum, while torch's argmax may return any index.
        found: NDArray[np.int64] = torch.cat([y.bool(), none], dim=1).numpy().argmax(1)
        return found

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 2, (count, self.outputs), generator=generator).float()

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross entropy of each sample, averaged over the labels."""
        if outputs_bo.shape != y.shape:
            raise wrong_shape(self, outputs_bo, f"(batch, {self.outputs})")
        return F.binary_cross_entropy_with_logits(outputs_bo, y, reduction="none").mean(1)

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        return divergence_of_labels(softened_bo, teacher_bo / temperature)

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return int64 (2, outputs). For each label, the first row contains the number of correct predictions, and the
        second row the number of predictions plus the number of samples with the label."""
        found, wanted = outputs_bo > 0, y.bool()
        return torch.stack([(found & wanted).sum(0), found.sum(0) + wanted.sum(0)])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return micro F1 and macro F1, with F1 = 2 * correct / (predicted + existing). Macro F1 excludes labels that
        no sample has and that are never predicted. If all labels are excluded, F1 is NaN."""
        right, total = torch.stack(list(observed)).sum(0).cpu().double()
        known = total > 0
        each = 2 * right[known] / total[known]
        return Measured({self.metric.name: float(2 * right.sum() / total.sum()), self.macro.name: float(each.mean())})


def divergence_of_labels(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) for each logit, which is converted to a separate probability."""
    wanted = teacher.sigmoid()
    cross, own = (F.binary_cross_entropy_with_logits(each, wanted, reduction="none") for each in (student, teacher))
    return cross - own
