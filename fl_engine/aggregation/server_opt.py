"""Server optimizers, which move the global model towards the clients' mean.

Adaptive Federated Optimization (Reddi et al., ICLR 2021), Algorithm 2. Each element has the pseudo-gradient `delta =
mean - old`:

    m = b1 * m + (1 - b1) * delta
    Adagrad: v = v + delta^2
    Yogi:    v = v - (1 - b2) * delta^2 * sign(v - delta^2)
    Adam:    v = b2 * v + (1 - b2) * delta^2
    new = old + lr * m / (sqrt(v) + tau).

The moment m starts at 0, and v starts at tau^2. With `bias_correction`, Adam is the same as in torch (Kingma and Ba,
ICLR 2015, Algorithm 1) with tau as eps, as in FedAIoT's code. Both moments then start at 0, and t is the element's
number of steps:

    new = old + lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + tau).

Departs from the paper, in which every client trains the whole model. Here an element that no client trained in a round
has no pseudo-gradient, so the element and its moments do not change. Running statistics of batch norm are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.core.contracts import ServerOptimizer
from fl_engine.core.fields import Options, Positive
from fl_engine.core.registry import Contract
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Params

Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Average(Options):
    """FedAvg: the mean is the new model."""

    name: Literal["average"] = "average"

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        return {}, mean


class _Adaptive(Options):
    lr: float
    b1: float
    b2: float = 0.0
    tau: float
    bias_correction: bool = False

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the updated second moment."""
        raise NotImplementedError

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        after, new = {}, {}
        for name, before in old.items():
            if is_statistic(name):
                new[name] = mean[name]
                continue
            m = moments.get(f"m/{name}", torch.zeros_like(before))
            v = moments.get(f"v/{name}", torch.full_like(before, 0.0 if self.bias_correction else self.tau**2))
            delta, mask = mean[name] - before, trained[name]
            m = torch.where(mask, self.b1 * m + (1 - self.b1) * delta, m)
            v = torch.where(mask, self.second(v, delta), v)
            after[f"m/{name}"], after[f"v/{name}"] = m, v
            if self.bias_correction:
                t = after[f"t/{name}"] = moments.get(f"t/{name}", torch.zeros_like(before)) + mask
                m, v = m / _share(self.b1, t), v / _share(self.b2, t)
            new[name] = torch.where(mask, before + self.lr * m / (v.sqrt() + self.tau), before)
        return after, new


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad."""

    name: Literal["adagrad"] = "adagrad"
    lr: Positive = 0.1
    """Learning rate eta of the server."""
    b1: Beta = 0.0
    tau: Positive = 1e-3
    """Degree of adaptivity. Smaller values make the step sizes more adaptive."""

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta**2


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """FedAdam."""

    name: Literal["adam"] = "adam"
    lr: Positive = 0.01
    b1: Beta = 0.9
    b2: Beta = 0.99
    tau: Positive = 1e-3
    bias_correction: bool = False
    """true: use bias correction as in torch's Adam, whose defaults are b2 = 0.999 and tau = 1e-8."""

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.b2 * v + (1 - self.b2) * delta**2


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi."""

    name: Literal["yogi"] = "yogi"
    lr: Positive = 0.01
    b1: Beta = 0.9
    b2: Beta = 0.99
    tau: Positive = 1e-3

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return v - (1 - self.b2) * delta**2 * torch.sign(v - delta**2)


def _share(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^t, or 1 if t is 0. Single precision would lose three digits in 1 - 0.999."""
    return torch.where(steps > 0, 1 - beta ** steps.double(), 1.0).to(steps.dtype)


SERVERS: dict[str, type[ServerOptimizer]] = {"average": Average, "adagrad": Adagrad, "adam": FedAdam, "yogi": Yogi}

Server = Annotated[ServerOptimizer, Contract("server optimizer", SERVERS, ServerOptimizer)]
