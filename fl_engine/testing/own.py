"""The built-in loss and optimizer, written as somebody's own: they give the same bits (`training.objective`,
`training.optimizer`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.algorithms.pooled import Training
from fl_engine.core.samples import outputs_of
from fl_engine.testing.kinds import KINDS

OBJECTIVE, OPTIMIZER = f"{__name__}:loss", f"{__name__}:sgd"


def loss(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    """The mean over the samples, at the last exit where there are several: cross entropy of classes (B,), the squared
    error of numbers (B, outputs), the tiny tasks' own loss of next tokens (B, T) and of boxes (B, most, 5)."""
    last = outputs_of(model(x))[-1]
    if y.dim() == 1:
        return F.cross_entropy(last, y, reduction="none").mean()
    if y.dim() == 2 and y.is_floating_point():
        return F.mse_loss(last, y)
    return KINDS["next_token" if y.dim() == 2 else "detection"][1].task.loss(last, y).mean()


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """With the defaults of `training`."""
    return torch.optim.SGD(parameters, lr, momentum=Training.momentum, weight_decay=Training.weight_decay)
