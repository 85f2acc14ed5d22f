"""The part of a step after the backward pass: terms added to the gradient, then the optimizer's update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fl_engine.core.errors import ModelError
from fl_engine.core.types import SGD, Adam, LocalTask, Params
from fl_engine.training import lanes
from fl_engine.training.lanes import beside


def stepper(optimizer: SGD | Adam, weights: Params, moments: Params) -> Callable[[float], None]:
    """A function of the learning rate that updates all weights (n, ...) with a gradient as `torch.optim.SGD` or `Adam`
    does. Its state is stored in `moments`, by kind and weight.

    It calls the functions behind torch's classes, because the classes import torch's compiler, which takes 1.5 s in
    every pod.
    """
    o = optimizer
    named = list(weights.items())
    # On a CPU, torch's fused kernels are wrong for float16 weights (torch 2.13: with momentum, from 16 elements on).
    half = any(w.dtype == torch.float16 for w in weights.values())
    shared = any(len(w) > 1 for w in weights.values())
    fused = not half and not (shared and isinstance(o, SGD) and not _is_exact(o.momentum))

    @torch.no_grad()
    def step(rate: float) -> None:
        used = [name for name, w in named if w.grad is not None]
        moved, gradients = [weights[name] for name in used], [g for _, w in named if (g := w.grad) is not None]
        if half and rate > torch.finfo(torch.float16).max:
            raise ModelError(f"the learning rate must be a float16 number, got {rate:g}: set a smaller one")
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
    """Whether products with it are never rounded: it is 0 or a power of two. On a CPU, torch's fused kernel rounds
    products differently in the last elements of a tensor, which do not fill a register. These belong to the last lane,
    so the bits of a lane would depend on its place."""
    return math.frexp(momentum)[0] in (0.0, 0.5)


def forget(moments: Params) -> None:
    """Drop the state of Adam, in place. A loss scale stays."""
    for name in [name for name in moments if name.startswith(("mean/", "square/", "steps/"))]:
        del moments[name]


def gradient_terms(
    task: LocalTask, state: Params, anchors: Sequence[Params], linear: Sequence[Params], device: torch.device
) -> Callable[[], None]:
    """A function that changes the gradients after the backward pass: it adds mu * (theta - anchor) (FedProx), without
    `proximal_squared` divided by its norm, subtracts the linear term (FedDyn), then clips the norm. `anchors` and
    `linear` have one entry per lane."""
    mu, limit = task.proximal, task.clip_norm
    trained = {name: t for name, t in state.items() if t.requires_grad}
    towards = lanes.stack(anchors, device) if mu > 0 else {}
    subtracted = lanes.stack(linear, device) if linear[0] else {}
    pulled = [(t, towards[name]) for name, t in trained.items() if name in towards]
    pushed = [(t, subtracted[name]) for name, t in trained.items() if name in subtracted]

    def correct() -> None:
        near = [(weight.grad, weight.detach(), anchor) for weight, anchor in pulled if weight.grad is not None]
        shares_n = None
        if near and not task.proximal_squared:
            norms_n = _norms(weight - anchor for _, weight, anchor in near)
            shares_n = torch.where(norms_n > 0, 1 / norms_n, 0.0)
        for gradient, weight, anchor in near:
            way = weight - anchor
            gradient.add_(way if shares_n is None else way * beside(shares_n, way), alpha=mu)
        for weight, g in pushed:
            if weight.grad is not None:
                weight.grad.sub_(g)
        if limit is not None:
            _clip([t.grad for t in trained.values() if t.grad is not None], limit)

    return correct


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """`torch.nn.utils.clip_grad_norm_`, for each lane by itself."""
    factors_n = (limit / (_norms(gradients) + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(beside(factors_n, g))


def _norms(parts: Iterable[Tensor]) -> Tensor:
    """float32 (n,): the L2 norm of each lane over all parts (n, ...)."""
    total: Tensor = torch.stack([part.flatten(1).float().norm(dim=1) for part in parts]).norm(dim=0)
    return total


FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
SCALE, GOOD = "scale/loss", "scale/good"
"""Keys in the moments: the scale of each lane, and its steps since the scale last changed, float32 (n,)."""


class LossScale:
    """Loss scaling for gradients in float16: Mixed Precision Training (Micikevicius et al., ICLR 2018), Sec. 3.2.

    Each lane follows the rule of `torch.amp.GradScaler` with its default values. The loss is multiplied by a scale, and
    the gradients are divided by it. A step with a gradient that is not finite is skipped and halves the scale. After
    2000 steps without such a gradient the scale doubles. Each job starts with the scale 2^16.

    Wraps `step`, the optimizer's update of the `weights`, each (n, ...). Both keep their state in `moments`."""

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
        """Divide the gradients by the scale, and remember the lanes with one that is not finite."""
        gradients = [w.grad for w in self._weights.values() if w.grad is not None]
        self._bad = torch.stack([~g.isfinite().flatten(1).all(1) for g in gradients]).any(0)
        for g in gradients:
            g.div_(beside(self._moments[SCALE], g))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take the optimizer's step in all lanes with finite gradients, then update the scale."""
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
