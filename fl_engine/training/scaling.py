"""Loss scaling, for gradients in float16: Mixed Precision Training (Micikevicius et al., ICLR 2018), Sec. 3.2.

The rule is that of `torch.amp.GradScaler` with its defaults, for each lane by itself. The loss is multiplied by a
scale, and the gradients are divided by it. A step with a gradient that is not finite is skipped and halves the scale;
after 2000 steps without one the scale doubles. Each job starts with the scale 2^16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_engine.core.types import Params
from fl_engine.training.lanes import beside

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
SCALE, GOOD = "scale/loss", "scale/good"
"""Keys in the moments: the scale of each lane, and its steps since the scale last changed, float32 (n,)."""


class LossScale:
    """Wraps `step`, the optimiser's update of the `weights`, each (n, ...). Both keep their state in `moments`."""

    def __init__(self, step: Callable[[float], None], weights: Params, moments: Params, like: Tensor) -> None:
        """`like` (n,): any tensor with one value per lane, on the device that trains."""
        self._step, self._weights, self._moments = step, weights, moments
        moments[SCALE] = torch.full_like(like, FIRST, dtype=torch.float32)
        moments[GOOD] = torch.zeros_like(like, dtype=torch.float32)
        self._bad = torch.zeros_like(like, dtype=torch.bool)

    def scaled(self, loss_n: Tensor) -> Tensor:
        return loss_n * self._moments[SCALE]

    @torch.no_grad()
    def unscale(self) -> None:
        """Divides the gradients by the scale, and notes which lanes have one that is not finite."""
        gradients = [w.grad for w in self._weights.values() if w.grad is not None]
        self._bad = torch.stack([~g.isfinite().flatten(1).all(1) for g in gradients]).any(0)
        for g in gradients:
            g.div_(beside(self._moments[SCALE], g))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Takes the optimiser's step in all lanes whose gradients are finite, then updates the scale."""
        bad = self._bad
        if not bad.any():
            self._step(rate)
        elif not bad.all():
            kept = {name: w.clone() for name, w in self._weights.items()}
            remembered = {name: t.clone() for name, t in self._moments.items()}
            self._step(rate)
            for name, w in self._weights.items():
                w.copy_(torch.where(beside(bad, w), kept[name], w))
            for name, t in self._moments.items():
                before = remembered.get(name)  # None: this first step created it, from zeros
                t.copy_(torch.where(beside(bad, t), torch.zeros_like(t) if before is None else before, t))
        scale, good = self._moments[SCALE], torch.where(bad, 0.0, self._moments[GOOD] + 1)
        grown = (good == INTERVAL) & (scale * GROWTH).isfinite()
        scale.copy_(torch.where(bad, scale * BACKOFF, torch.where(grown, scale * GROWTH, scale)))
        self._moments[GOOD].copy_(torch.where(good == INTERVAL, 0.0, good))
