"""Server optimizers: how the global model moves towards the clients' mean.

Adaptive Federated Optimization (Reddi et al., ICLR 2021), Algorithm 2. With the pseudo-gradient
`delta = mean - old`, element by element:

    m = b1 * m + (1 - b1) * delta
    Adagrad: v = v + delta^2
    Yogi:    v = v - (1 - b2) * delta^2 * sign(v - delta^2)
    Adam:    v = b2 * v + (1 - b2) * delta^2
    new = old + lr * m / (sqrt(v) + tau)          m starts at 0, v at tau^2; no bias correction

With `bias_correction`, Adam is that of torch (Kingma and Ba, ICLR 2015, Algorithm 1) with tau for its eps, as in
FedAIoT's code. Yogi is corrected alike. Both moments then start at 0, and t counts the element's steps:

    new = old + lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + tau)

Departs from the paper: it has one model for all. Here an element that no client trained in a round has no
pseudo-gradient, so neither it nor its moments move. Running statistics of batch norm are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.core.contracts import ServerOptimizer
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.registry import Contract
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Params

Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Average:
    """FedAvg: the mean is the new model."""

    __pydantic_config__ = STRICT
    name: Literal["average"] = "average"

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        return {}, mean


class _Adaptive:
    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        return _step(self, moments, old, mean, trained)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad."""

    __pydantic_config__ = STRICT
    name: Literal["adagrad"] = "adagrad"
    lr: Positive = 0.1
    """eta of the server."""
    b1: Beta = 0.0
    tau: Positive = 1e-3
    """Degree of adaptivity: the smaller, the more adaptive."""

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta**2


@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam."""

    __pydantic_config__ = STRICT
    name: Literal["adam"] = "adam"
    lr: Positive = 0.01
    b1: Beta = 0.9
    b2: Beta = 0.99
    tau: Positive = 1e-3
    bias_correction: bool = False
    """true: as in torch's optimizers, whose usual b2 is 0.999 and tau 1e-8."""

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.b2 * v + (1 - self.b2) * delta**2


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi."""

    __pydantic_config__ = STRICT
    name: Literal["yogi"] = "yogi"
    lr: Positive = 0.01
    b1: Beta = 0.9
    b2: Beta = 0.99
    tau: Positive = 1e-3
    bias_correction: bool = False

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return v - (1 - self.b2) * delta**2 * torch.sign(v - delta**2)


def _step(
    rule: Adagrad | Adam | Yogi, moments: Params, old: Params, mean: Params, trained: Params
) -> tuple[Params, Params]:
    corrected = isinstance(rule, Adam | Yogi) and rule.bias_correction
    kept, new = {}, {}
    for name, before in old.items():
        if is_statistic(name):
            new[name] = mean[name]
            continue
        m = moments.get(f"m/{name}", torch.zeros_like(before))
        v = moments.get(f"v/{name}", torch.full_like(before, 0.0 if corrected else rule.tau**2))
        delta, mask = mean[name] - before, trained[name]
        m = torch.where(mask, rule.b1 * m + (1 - rule.b1) * delta, m)
        v = torch.where(mask, rule.second(v, delta), v)
        kept[f"m/{name}"], kept[f"v/{name}"] = m, v
        if corrected and isinstance(rule, Adam | Yogi):
            t = moments.get(f"t/{name}", torch.zeros_like(before)) + mask
            kept[f"t/{name}"] = t
            m, v = m / _share(rule.b1, t), v / _share(rule.b2, t)
        new[name] = torch.where(mask, before + rule.lr * m / (v.sqrt() + rule.tau), before)
    return kept, new


def _share(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^t, or 1 without a step. In double precision, because 1 - 0.999 loses three digits in single."""
    return torch.where(steps > 0, 1 - beta ** steps.double(), 1.0).to(steps.dtype)


SERVERS: dict[str, type[ServerOptimizer]] = {"average": Average, "adagrad": Adagrad, "adam": Adam, "yogi": Yogi}

Server = Annotated[ServerOptimizer, Contract("server optimizer", SERVERS, ServerOptimizer)]
"""The annotation of an algorithm's field."""
