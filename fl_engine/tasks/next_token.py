"""Language modelling: predict the next token at every position of a sequence, with cross entropy and accuracy.

`accuracy` excludes out-of-vocabulary tokens (OOV) and the tokens for the start and end of a sequence, as in Adaptive
Federated Optimization (Reddi et al., ICLR 2021). `accuracy_all` counts all tokens except padding, as in FedRolex
(section 3.3). The metrics and the loss exclude padding.
"""

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
from fl_engine.core.task import Measured, Metric, wrong_shape
from fl_engine.tasks.classification import Distilled, numbers_below

IGNORED = -100
"""Value of `ignore_index` for torch's cross entropy if sequences do not have padding. No target has this value."""


@dataclass(frozen=True)
class NextToken(Distilled):
    """Language modelling. Targets are int64 (N, T), the next token at each position of a sample, and the network
    returns logits (batch, tokens, T)."""

    tokens: int
    """Number of tokens, including special tokens. Tokens are 0 to tokens - 1."""
    length: int
    """Number of positions in a sample (T)."""
    padding: int | None = 0
    """Token at the end of shorter sequences, which loss and metrics ignore; None if sequences have no padding."""
    masked: tuple[int, ...] = ()
    """Tokens that count for the loss but not for `accuracy`, such as OOV and the start and end of a sequence."""

    name: ClassVar[str] = "next_token"
    rowwise: ClassVar[bool] = True
    metric: ClassVar[Metric] = Metric("accuracy", low=0.0, high=1.0)
    of_all: ClassVar[Metric] = Metric("accuracy_all", low=0.0, high=1.0)
    sequences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for what, value, least in (("tokens", self.tokens, 2), ("length", self.length, 1)):
            if type(value) is not int or value < least:
                raise DataError(f"next_token: {what} must be an integer of at least {least}, got {value!r}")
        object.__setattr__(self, "masked", tuple(self.masked))
        special = (*self.masked, *([] if self.padding is None else [self.padding]))
        wrong = [token for token in special if type(token) is not int or not 0 <= token < self.tokens]
        if wrong or len(set(special)) < len(special) or len(special) >= self.tokens:
            raise DataError(
                f"next_token: padding and masked must be different tokens from 0 to {self.tokens - 1} and leave at "
                f"least one other token, got padding={self.padding!r} and masked={self.masked!r}"
            )

    @property
    def outputs(self) -> int:
        return self.tokens

    @property
    def label_count(self) -> int:
        """Number of labels for partition rules; always 0, because sequences do not have labels."""
        return 0

    def check(self, y: Tensor, what: str) -> Tensor:
        y = numbers_below(self.tokens, y, (len(y), self.length), f"{what}: the next tokens")
        if bool((~self._learnt(y)).all(1).any()) or not bool(self._counted(y).any()):
            raise DataError(f"{what}: each sample needs a token other than padding, and some tokens must not be masked")
        return y

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        return np.zeros(len(y), dtype=np.int64)

    def present(self, y: Tensor) -> Tensor:
        return torch.bincount(y[self._learnt(y)], minlength=self.tokens) > 0

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random targets without padding."""
        kinds, shape = self.tokens - (self.padding is not None), (count, self.length)
        drawn = torch.randint(0, kinds, shape, generator=generator)
        return drawn if self.padding is None else drawn + (drawn >= self.padding)

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, which is the mean over all positions except padding."""
        self._check_outputs(outputs_bo)
        padding = IGNORED if self.padding is None else self.padding
        terms_bt = F.cross_entropy(outputs_bo, y, ignore_index=padding, reduction="none")
        return terms_bt.sum(1) / self._learnt(y).sum(1)

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return int64 (4,): the number of correct and of counted positions, first for `accuracy`, then for
        `accuracy_all`."""
        self._check_outputs(outputs_bo)
        right = outputs_bo.argmax(1) == y
        masks = (self._counted(y), self._learnt(y))
        return torch.stack([part.sum() for mask in masks for part in (right & mask, mask)])

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return `accuracy` and `accuracy_all`. `accuracy` is NaN if all targets are masked."""
        right, counted, right_of_all, all_ = torch.stack(list(observed)).sum(0).tolist()
        accuracy = right / counted if counted else float("nan")
        return Measured({self.metric.name: accuracy, self.of_all.name: right_of_all / all_})

    def _learnt(self, y: Tensor) -> Tensor:
        """Return a mask, bool (B, T), of the positions that are not padding."""
        return torch.ones_like(y, dtype=torch.bool) if self.padding is None else y != self.padding

    def _counted(self, y: Tensor) -> Tensor:
        """Return a mask, bool (B, T), of the positions that count for `accuracy`."""
        special = [] if self.padding is None else [self.padding]
        return ~torch.isin(y, torch.tensor([*special, *self.masked], dtype=y.dtype, device=y.device))

    def _check_outputs(self, outputs_bo: Tensor) -> None:
        if outputs_bo.dim() != 3 or outputs_bo.shape[1:] != (self.tokens, self.length):
            raise wrong_shape(self, outputs_bo, f"(batch, {self.tokens}, {self.length})")
