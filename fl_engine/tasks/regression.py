"""Regression: the mean squared error as the loss; the coefficient of determination R2 and the mean absolute error as
metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError, ModelError
from fl_engine.core.task import Measured, Metric


@dataclass(frozen=True)
class Regression:
    """Targets are float32 (N, outputs), or (N,) for one output. The network returns the predicted numbers."""

    outputs: int = 1
    bins: int = 10
    """Quantile bins of the first target, the labels of partition rules; 0: none."""

    name: ClassVar[str] = "regression"
    metric: ClassVar[Metric] = Metric("r2", high=1.0)
    error: ClassVar[Metric] = Metric("mae", higher_is_better=False, low=0.0)
    label_word: ClassVar[str] = "quantile bin"

    def __post_init__(self) -> None:
        if type(self.outputs) is not int or self.outputs < 1:
            raise DataError(f"regression needs at least 1 output, got {self.outputs!r}")
        if type(self.bins) is not int or self.bins < 0 or self.bins == 1:
            raise DataError(f"regression needs at least 2 quantile bins, or 0 for none, got {self.bins!r}")

    @property
    def label_count(self) -> int:
        return self.bins

    @property
    def identity(self) -> object:
        return self.name, self.outputs, self.bins

    def check(self, y: Tensor, what: str) -> Tensor:
        if y.is_complex() or y.dtype == torch.bool:
            raise DataError(f"{what}: targets are numbers, got {str(y.dtype).removeprefix('torch.')}")
        if y.dim() == 1 and self.outputs == 1:
            y = y[:, None]
        if y.dim() != 2 or y.shape[1] != self.outputs:
            raise DataError(
                f"{what}: expected targets of {self.outputs} numbers, (N, {self.outputs}), got the shape "
                f"{tuple(y.shape)}; set the number with Regression(outputs=...)"
            )
        y = y.float()
        wrong = (~torch.isfinite(y)).any(1).nonzero().flatten()
        if len(wrong):
            raise DataError(
                f"{what}: the target of sample {int(wrong[0])} is NaN, infinite or more than float32 can hold "
                f"({len(wrong)} such samples); leave such samples out"
            )
        if bool((y == y[:1]).all(0).any()):
            raise DataError(f"{what}: all targets of an output are equal, so nothing can be learnt and R2 is undefined")
        return y

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the bin of each sample. The edges are targets that occur, so all machines agree. Equal targets share a
        bin, so other bins may be empty."""
        first = y[:, 0].numpy()
        ordered = np.sort(first)
        edges = ordered[[i * len(ordered) // self.bins for i in range(1, self.bins)]]
        return np.searchsorted(edges, first, side="right").astype(np.int64)

    def present(self, y: Tensor) -> Tensor:
        raise ModelError("regression has no classes whose outputs could be masked: set algorithm.mask_labels=false")

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.outputs, generator=generator)

    def loss(self, outputs_bo: Tensor, y: Tensor, reduction: Literal["none", "sum"] = "none") -> Tensor:
        """Return the squared error of each sample, the mean over the outputs."""
        of_each = (outputs_bo - y).square().mean(1)
        return of_each.sum() if reduction == "sum" else of_each

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Return the outputs over the temperature, so that distillation's factor temperature^2 cancels."""
        return outputs_bo / temperature

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the squared error to the teacher. (KL of a softmax over a single output would always be 0.)"""
        return (softened_bo - teacher_bo / temperature).square()

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return float64 (6, outputs): the first target, the number of samples, and the sums of d, d^2, squared errors
        and absolute errors, with d = target - first target. Sums of y^2 lose digits for targets far from 0."""
        found, wanted = outputs_bo.double(), y.double()
        errors, d = found - wanted, wanted - wanted[:1]
        parts = (torch.ones_like(wanted), d, d.square(), errors.square(), errors.abs())
        return torch.stack([wanted[0], *(part.sum(0) for part in parts)])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return R2 = 1 - sum (y - f)^2 / sum (y - mean y)^2 and the mean absolute error, each the mean over the
        outputs. R2 is NaN if all targets are equal."""
        first_po, *sums_po = torch.stack(list(observed)).cpu().unbind(1)
        shift_po, (count_po, total_po, squares_po, _, _) = first_po - first_po[0], sums_po
        count, _, _, errors, absolute = (each.sum(0) for each in sums_po)
        # As if all parts had counted from the first target of the first.
        total = (total_po + count_po * shift_po).sum(0)
        squares = (squares_po + 2 * shift_po * total_po + count_po * shift_po.square()).sum(0)
        spread = squares - total.square() / count
        r2 = torch.where(spread > 0, 1 - errors / spread, torch.nan)
        return Measured({self.metric.name: float(r2.mean()), self.error.name: float((absolute / count).mean())})
