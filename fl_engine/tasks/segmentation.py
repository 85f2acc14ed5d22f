"""Semantic segmentation: predict the category of every pixel. Metrics are the mean IoU and the pixel accuracy."""

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
from fl_engine.core.task import VOID, Measured, Metric, wrong_shape
from fl_engine.tasks.classification import Distilled, check_names


@dataclass(frozen=True)
class Segmentation(Distilled):
    """Semantic segmentation. Targets are uint8 (N, H, W) with the category of each pixel; 255 marks pixels that loss
    and metrics ignore. The network returns logits (batch, categories, H, W)."""

    categories: int
    names: tuple[str, ...] = field(default=(), repr=False)
    """Names of the categories; may be empty."""

    name: ClassVar[str] = "segmentation"
    metric: ClassVar[Metric] = Metric("miou", low=0.0, high=1.0)
    of_pixels: ClassVar[Metric] = Metric("accuracy", low=0.0, high=1.0)
    label_word: ClassVar[str] = "most frequent category"
    sequences: ClassVar[bool] = True
    maps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.categories) is not int or not 2 <= self.categories <= VOID:
            raise DataError(f"segmentation: categories must be an integer from 2 to {VOID}, got {self.categories!r}")
        object.__setattr__(self, "names", check_names(self.names, self.categories))

    @property
    def outputs(self) -> int:
        return self.categories

    label_count = outputs

    def check(self, y: Tensor, what: str) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.dim() != 3:
            kind = str(y.dtype).removeprefix("torch.")
            raise DataError(f"{what}: categories must be integers of shape (N, H, W), got {kind} {tuple(y.shape)}")
        wrong = ((y < 0) | (y >= self.categories)) & (y != VOID)
        if bool(wrong.any()):
            raise DataError(
                f"{what}: categories must be from 0 to {self.categories - 1}, or {VOID} for ignored pixels, got "
                f"{int(y[wrong][0])} in {int(wrong.flatten(1).any(1).sum())} samples"
            )
        if bool((y == VOID).flatten(1).all(1).any()):
            raise DataError(f"{what}: each sample needs a pixel that is not {VOID} (ignored). Remove the other samples")
        return y.to(torch.uint8)

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the most frequent category of each sample. In case of a tie, return the lowest category number."""
        counts = torch.stack([(y == category).flatten(1).sum(1) for category in range(self.categories)], dim=1)
        found: NDArray[np.int64] = counts.numpy().argmax(1)  # NumPy's argmax returns the first maximum, unlike torch's
        return found

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random targets of 4 x 4 pixels."""
        return torch.randint(0, self.categories, (count, 4, 4), generator=generator).to(torch.uint8)

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, which is the mean over all pixels except ignored pixels."""
        self._check_outputs(outputs_bo, y)
        terms_bhw = F.cross_entropy(outputs_bo, y.long(), ignore_index=VOID, reduction="none")
        return terms_bhw.sum((1, 2)) / (y != VOID).sum((1, 2))

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the confusion matrix of pixels, int64. Rows are true and columns are predicted categories."""
        self._check_outputs(outputs_bo, y)
        cells = (y.long() * self.categories + outputs_bo.argmax(1))[y != VOID]
        return torch.bincount(cells, minlength=self.categories**2).view(self.categories, self.categories)

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return the mean IoU over all categories that occur in targets or predictions, and the pixel accuracy."""
        confusion = torch.stack(list(observed)).sum(0).cpu()
        right = confusion.diagonal().double()
        union = confusion.sum(0) + confusion.sum(1) - right
        values = {
            self.metric.name: float((right / union)[union > 0].mean()),
            self.of_pixels.name: float(right.sum() / confusion.sum()),
        }
        return Measured(values, confusion)

    def _check_outputs(self, outputs_bo: Tensor, y: Tensor) -> None:
        wanted = (len(y), self.categories, *y.shape[1:])
        if outputs_bo.shape != wanted:
            raise wrong_shape(self, outputs_bo, str(wanted))
