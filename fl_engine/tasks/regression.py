"""Regression with the mean squared error as the loss. Metrics are the coefficient of determination R2 and the mean
absolute error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.task import Described, Measured, Metric


@dataclass(frozen=True)
class Regression(Described):
    """Regression. Targets are float32 (N, outputs), or (N,) for one output. The network returns predictions."""

    outputs: int = 1
    bins: int = 10
    """Number of quantile bins of the first target, which partition rules use as labels; 0: no labels."""

    name: ClassVar[str] = "regression"
    rowwise: ClassVar[bool] = True
    metric: ClassVar[Metric] = Metric("r2", high=1.0)
    error: ClassVar[Metric] = Metric("mae", higher_is_better=False, low=0.0)
    label_word: ClassVar[str] = "quantile bin"

    def __post_init__(self) -> None:
        if type(self.outputs) is not int or self.outputs < 1:
            raise DataError(f"regression: outputs must be an integer of at least 1, got {self.outputs!r}")
        if type(self.bins) is not int or self.bins < 0 or self.bins == 1:
            raise DataError(f"regression: bins must be 0 (no labels) or an integer of at least 2, got {self.bins!r}")

    @property
    def label_count(self) -> int:
        return self.bins

    def check(self, y: Tensor, what: str) -> Tensor:
        if y.dim() == 1 and self.outputs == 1:
            y = y[:, None]
        if y.is_complex() or y.dtype == torch.bool or y.dim() != 2 or y.shape[1] != self.outputs:
            raise DataError(
                f"{what}: targets must be numbers of shape (N, {self.outputs}), got "
                f"{str(y.dtype).removeprefix('torch.')} {tuple(y.shape)}. Set the number of targets per sample with "
                "Regression(outputs=...)"
            )
        y = y.float()
        wrong = (~torch.isfinite(y)).any(1).nonzero().flatten()
        if len(wrong):
            raise DataError(
                f"{what}: targets must be finite float32 numbers, got {y[wrong[0]].tolist()} in sample {int(wrong[0])} "
                f"({len(wrong)} such samples). Remove these samples"
            )
        if bool((y == y[:1]).all(0).any()):
            raise DataError(f"{what}: each target must vary, because R2 is undefined for a constant target")
        return y

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the bin of each sample. Bin edges are always target values, so all machines compute the same bins.
        Equal targets are always in the same bin, so some bins may be empty."""
        first = y[:, 0].numpy()
        ordered = np.sort(first)
        edges = ordered[[i * len(ordered) // self.bins for i in range(1, self.bins)]]
        return np.searchsorted(edges, first, side="right").astype(np.int64)

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.outputs, generator=generator)

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the squared error of each sample, averaged over the outputs."""
        return (outputs_bo - y).square().mean(1)

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the squared difference to the teacher, because the KL divergence of a single output is always 0."""
        return (softened_bo - teacher_bo / temperature).square()

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return float64 (6, outputs): first target, number of samples, and sums of d, d^2, squared errors and absolute
        errors, with d = target - first target. Subtracting the first target avoids cancellation in the sums."""
        found, wanted = outputs_bo.double(), y.double()
        errors, d = found - wanted, wanted - wanted[:1]
        parts = (torch.ones_like(wanted), d, d.square(), errors.square(), errors.abs())
        return torch.stack([wanted[0], *(part.sum(0) for part in parts)])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return R2 = 1 - sum (y - f)^2 / sum (y - mean y)^2 and the mean absolute error, both averaged over the
        outputs. R2 is NaN if all targets of an output are equal."""
        first_po, *sums_po = torch.stack(list(observed)).cpu().unbind(1)
        shift_po, (count_po, total_po, squares_po, _, _) = first_po - first_po[0], sums_po
        count, _, _, errors, absolute = (each.sum(0) for each in sums_po)
        # The sums of each batch are relative to its own first target, which avoids cancellation. Make all sums relative
        # to the first target of the first batch before adding them.
        total = (total_po + count_po * shift_po).sum(0)
        squares = (squares_po + 2 * shift_po * total_po + count_po * shift_po.square()).sum(0)
        spread = squares - total.square() / count
        r2 = torch.where(spread > 0, 1 - errors / spread, torch.nan)
        return Measured({self.metric.name: float(r2.mean()), self.error.name: float((absolute / count).mean())})
