"""Language modelling: the next token at every position of a sequence, with cross entropy and accuracy.

`accuracy` excludes tokens that are not words: those out of the vocabulary (OOV), and the begin and the end of a
sequence, as in Adaptive Federated Optimization (Reddi et al., ICLR 2021). `accuracy_all` includes them, as FedRolex
(chapter 3.3). Padding counts in neither and is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError, ModelError
from fl_engine.core.task import Measured, Metric

IGNORED = -100
"""The index that torch's cross entropy ignores if there is no padding."""


@dataclass(frozen=True)
class NextToken:
    """Targets are int64 (N, T): the next token at each position of a sample. The network returns (batch, tokens, T): a
    logit for each token at each position."""

    tokens: int
    """The number of tokens, including the special ones: 0 .. tokens - 1."""
    length: int
    """T, the number of positions of a sample."""
    padding: int | None = 0
    """The token after the end of a shorter sequence, neither trained nor counted; None: no padding."""
    masked: tuple[int, ...] = ()
    """Tokens that are trained but excluded from the accuracy: OOV, begin and end of a sequence."""

    name: ClassVar[str] = "next_token"
    metric: ClassVar[Metric] = Metric("accuracy", low=0.0, high=1.0)
    of_all: ClassVar[Metric] = Metric("accuracy_all", low=0.0, high=1.0)
    sequences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for what, value, least in (("tokens", self.tokens, 2), ("length", self.length, 1)):
            if type(value) is not int or value < least:
                raise DataError(f"next_token: {what} is an integer of at least {least}, got {value!r}")
        object.__setattr__(self, "masked", tuple(self.masked))
        special = (*self.masked, *([] if self.padding is None else [self.padding]))
        wrong = [token for token in special if type(token) is not int or not 0 <= token < self.tokens]
        if wrong or len(set(special)) < len(special) or len(special) >= self.tokens:
            raise DataError(
                f"next_token: padding and masked are different tokens of 0..{self.tokens - 1} that leave one to count, "
                f"got padding={self.padding!r} and masked={self.masked!r}"
            )

    @property
    def outputs(self) -> int:
        return self.tokens

    @property
    def label_count(self) -> int:
        """0: a sequence has no label for partition rules."""
        return 0

    @property
    def identity(self) -> object:
        return self.name, self.tokens, self.length, self.padding, self.masked

    def check(self, y: Tensor, what: str) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape[1:] != (self.length,):
            raise DataError(
                f"{what}: the next tokens are integers (N, {self.length}), one at each position, got "
                f"{str(y.dtype).removeprefix('torch.')} {tuple(y.shape)}"
            )
        y = y.long()
        wrong = ((y < 0) | (y >= self.tokens)).any(1).nonzero().flatten()
        if len(wrong):
            row = y[wrong[0]]
            raise DataError(
                f"{what}: expected tokens 0..{self.tokens - 1}, found {int(row[(row < 0) | (row >= self.tokens)][0])} "
                f"in sample {int(wrong[0])} ({len(wrong)} such samples)"
            )
        empty = (~self._learnt(y)).all(1).nonzero().flatten()
        if len(empty):
            raise DataError(
                f"{what}: sample {int(empty[0])} holds padding alone ({len(empty)} such samples): leave them out"
            )
        if not bool(self._counted(y).any()):
            raise DataError(f"{what}: all targets are padding or masked, so the accuracy is undefined")
        return y

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        return np.zeros(len(y), dtype=np.int64)

    def present(self, y: Tensor) -> Tensor:
        return torch.bincount(y[self._learnt(y)], minlength=self.tokens) > 0

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return any tokens except padding."""
        kinds, shape = self.tokens - (self.padding is not None), (count, self.length)
        drawn = torch.randint(0, kinds, shape, generator=generator)
        return drawn if self.padding is None else drawn + (drawn >= self.padding)

    def loss(self, outputs_bo: Tensor, y: Tensor, reduction: Literal["none", "sum"] = "none") -> Tensor:
        """Return for each sample the mean over its positions without padding."""
        self._check_outputs(outputs_bo)
        padding = IGNORED if self.padding is None else self.padding
        terms_bt = F.cross_entropy(outputs_bo, y, ignore_index=padding, reduction="none")
        of_each = terms_bt.sum(1) / self._learnt(y).sum(1)
        return of_each.sum() if reduction == "sum" else of_each

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Return the logarithms of the softened probabilities at every position."""
        return F.log_softmax(outputs_bo / temperature, dim=1)

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return the terms of KL(softmax(teacher / temperature) || student), one per token and position. Positions
        after the end of a sequence count too, because only the targets tell padding."""
        return F.kl_div(softened_bo, F.softmax(teacher_bo / temperature, dim=1), reduction="none")

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return int64 (4,): correct and all positions that `accuracy` counts, then the same without padding only."""
        self._check_outputs(outputs_bo)
        right = outputs_bo.argmax(1) == y
        kept = (self._counted(y), self._learnt(y))
        return torch.stack([part.sum() for each in kept for part in (right & each, each)])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return both accuracies; `accuracy` is NaN if all targets are masked."""
        right, counted, right_of_all, all_ = torch.stack(list(observed)).sum(0).tolist()
        accuracy = right / counted if counted else float("nan")
        return Measured({self.metric.name: accuracy, self.of_all.name: right_of_all / all_})

    def _learnt(self, y: Tensor) -> Tensor:
        """Return the positions without padding, bool (B, T)."""
        return torch.ones_like(y, dtype=torch.bool) if self.padding is None else y != self.padding

    def _counted(self, y: Tensor) -> Tensor:
        """Return the positions that `accuracy` counts, bool (B, T)."""
        special = [] if self.padding is None else [self.padding]
        return ~torch.isin(y, torch.tensor([*special, *self.masked], dtype=y.dtype, device=y.device))

    def _check_outputs(self, outputs_bo: Tensor) -> None:
        if outputs_bo.dim() != 3 or outputs_bo.shape[1:] != (self.tokens, self.length):
            raise ModelError(
                f"next_token needs networks that return (batch, {self.tokens}, {self.length}), this one returns "
                f"{tuple(outputs_bo.shape)}"
            )
