"""The part of a step after the backward pass: terms added to the gradient, then the optimiser's update."""

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
    """A function of the learning rate that updates all weights which have a gradient, as `torch.optim.SGD` or `Adam`
    does. Weights are (n, ...) for n lanes. Its state is kept in `moments`, by kind and weight.

    It calls the functions behind torch's classes: the classes themselves import torch's compiler, which takes 1.5 s in
    every pod on a fast core.
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
            raise ModelError(f"the learning rate {rate:g} is more than float16 can hold: set a smaller one")
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
    """Whether a product with it is never rounded: it is 0 or a power of two. On a CPU, torch's fused kernel rounds that
    product in the last elements of a tensor, which fill no register, and not in the others. The last elements of lanes
    that share a tensor are those of the last lane: the bits of a lane would depend on its place."""
    return math.frexp(momentum)[0] in (0.0, 0.5)


def forget(moments: Params) -> None:
    """Drops the state of a `stepper`'s Adam, in place; a loss scale stays."""
    for name in [name for name in moments if name.startswith(("mean/", "square/", "steps/"))]:
        del moments[name]


def gradient_terms(
    task: LocalTask, state: Params, anchors: Sequence[Params], linear: Sequence[Params], device: torch.device
) -> Callable[[], None]:
    """A function that corrects the gradients after the backward pass: it adds mu * (theta - anchor) (FedProx), or
    without `proximal_squared` that divided by its norm, subtracts the linear term (FedDyn), then clips the norm.
    `anchors` and `linear` have one entry per lane."""
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
    """float32 (n,): of each lane the L2 norm over all parts (n, ...)."""
    total: Tensor = torch.stack([part.flatten(1).float().norm(dim=1) for part in parts]).norm(dim=0)
    return total
