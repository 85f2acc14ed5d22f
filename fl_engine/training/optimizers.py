"""Updates the weights after the backward pass: changes the gradients, then runs the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fl_engine.core.errors import ModelError
from fl_engine.core.types import SGD, Adam, LocalTask, Params
from fl_engine.training import lanes
from fl_engine.training.lanes import beside


def stepper(optimizer: SGD | Adam, weights: Params, moments: Params) -> Callable[[float], None]:
    """Return a function that takes a learning rate and updates all weights (n, ...) that have a gradient. The update is
    the same as in `torch.optim.SGD` or `Adam`. `moments` contains the optimizer's state for each weight.

    The function calls torch's functional optimizers, because importing torch's optimizer classes takes 1.5 s.
    """
    o = optimizer
    named = list(weights.items())
    # On a CPU, the fused kernels of torch 2.13 return wrong results for float16 weights.
    half = any(w.dtype == torch.float16 for w in weights.values())
    shared = any(len(w) > 1 for w in weights.values())
    fused = not half and not (shared and isinstance(o, SGD) and not _is_exact(o.momentum))

    @torch.no_grad()
    def step(rate: float) -> None:
        used = [name for name, w in named if w.grad is not None]
        moved, gradients = [weights[name] for name in used], [g for _, w in named if (g := w.grad) is not None]
        if half and rate > torch.finfo(torch.float16).max:
            raise ModelError.at(f"training.lr must be at most 65504 (float16), got {rate:g}")
        if isinstance(o, SGD):
            buffers = [moments.get(f"momentum/{name}") for name in used]
            sgd(
                moved, gradients, buffers, foreach=False, fused=fused, lr=rate, momentum=o.momentum,
                weight_decay=o.weight_decay, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            moments.update({f"momentum/{name}": b for name, b in zip(used, buffers, strict=True) if b is not None})
            return
        for name, w in zip(used, moved, strict=True):
            if f"mean/{name}" not in moments:
                moments[f"mean/{name}"], moments[f"square/{name}"] = torch.zeros_like(w), torch.zeros_like(w)
                moments[f"steps/{name}"] = torch.zeros((), device=w.device)
        means, squares, steps = ([moments[f"{kind}/{name}"] for name in used] for kind in ("mean", "square", "steps"))
        adam(
            moved, gradients, means, squares, [], steps, foreach=False, fused=fused, lr=rate, beta1=0.9, beta2=0.999,
            eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def _is_exact(momentum: float) -> bool:
    """Return True if the momentum is 0 or a power of two, so that products with the momentum are exact.

    On a CPU, torch's fused kernel rounds products differently for the last elements of a tensor, and these elements
    belong to the last lane. Therefore inexact products would make results depend on the lane's position.
    """
    return math.frexp(momentum)[0] in (0.0, 0.5)


def gradient_terms(
    task: LocalTask, state: Params, starts: Sequence[Params], linear: Sequence[Params], device: torch.device
) -> Callable[[], None]:
    """Return a function that changes the gradients after the backward pass. The function adds mu * (theta - start)
    (FedProx), subtracts the linear term (FedDyn), then clips the norm. `starts` and `linear` have one entry per
    lane."""
    mu, limit = task.proximal, task.clip_norm
    trained = {name: t for name, t in state.items() if t.requires_grad}
    start = lanes.stack(starts, device) if mu > 0 else {}
    subtracted = lanes.stack(linear, device) if linear[0] else {}

    def correct() -> None:
        for name, weight in trained.items():
            if weight.grad is not None and name in start:
                weight.grad.add_(weight.detach() - start[name], alpha=mu)
        for name, weight in trained.items():
            if weight.grad is not None and name in subtracted:
                weight.grad.sub_(subtracted[name])
        if limit is not None:
            _clip([t.grad for t in trained.values() if t.grad is not None], limit)

    return correct


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, but separately for each lane."""
    norms_n: Tensor = torch.stack([g.flatten(1).float().norm(dim=1) for g in gradients]).norm(dim=0)
    factors_n = (limit / (norms_n + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(beside(factors_n, g))


FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
SCALE, GOOD = "scale/loss", "scale/good"
"""Keys in the moments for the scale and for the number of steps since the scale last changed, both float32 (1,)."""


class LossScale:
    """Loss scaling for float16 gradients (Micikevicius et al., Mixed Precision Training, ICLR 2018, Sec. 3.2).

    The method and the constants are the same as in `torch.amp.GradScaler`. The loss is multiplied by a scale, and the
    gradients are divided by the scale. If a gradient is not finite, the step is skipped and the scale is halved. After
    2000 steps with finite gradients, the scale is doubled. Each client starts with a scale of 2^16.

    `step` updates the `weights`, which have the shapes (1, ...). The scale is stored in `moments`.
    """

    def __init__(
        self, step: Callable[[float], None], weights: Params, moments: Params, device: torch.device | None
    ) -> None:
        self._step, self._weights, self._moments, self._finite = step, weights, moments, True
        moments[SCALE], moments[GOOD] = torch.full((1,), FIRST, device=device), torch.zeros(1, device=device)

    def scaled(self, loss_n: Tensor) -> Tensor:
        return loss_n * self._moments[SCALE]

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the gradients by the scale and check that all gradients are finite."""
        gradients = [w.grad for w in self._weights.values() if w.grad is not None]
        self._finite = bool(torch.stack([g.isfinite().all() for g in gradients]).all())
        for g in gradients:
            g.div_(self._moments[SCALE])

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the weights if all gradients are finite, and adjust the scale."""
        scale, good = self._moments[SCALE], self._moments[GOOD]
        if not self._finite:
            scale.mul_(BACKOFF)
            good.zero_()
            return
        self._step(rate)
        good.add_(1)
        if good == INTERVAL:
            if (scale * GROWTH).isfinite():
                scale.mul_(GROWTH)
            good.zero_()
