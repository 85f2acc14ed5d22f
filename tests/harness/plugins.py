"""Plug-ins for tests: a loss, an optimizer, a selection with a metric of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ClientContext, ClientMetric
from fl_engine.core.fields import STRICT
from fl_engine.core.samples import outputs_of
from fl_engine.core.types import Assignment, ClientResult, ClientUpdate, Device, Pick, Pool, RoundContext, Tables
from fl_engine.selection.capacity import dispatched
from fl_engine.testing.kinds import KINDS

OBJECTIVE, OPTIMIZER = f"{__name__}:loss", f"{__name__}:sgd"


def loss(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the last exit: cross entropy of classes (B,), the squared error of numbers (B, outputs),
    or the tiny tasks' own loss of next tokens (B, T), of boxes (B, most, 5) and of pixels (B, H, W)."""
    last = outputs_of(model(x))[-1]
    if y.dim() == 1:
        return F.cross_entropy(last, y, reduction="none").mean()
    if y.dim() == 2 and y.is_floating_point():
        return F.mse_loss(last, y)
    kind = "next_token" if y.dim() == 2 else "segmentation" if y.dtype == torch.uint8 else "detection"
    return KINDS[kind][1].task.loss(last, y).mean()


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return SGD with the defaults of `training`."""
    return torch.optim.SGD(parameters, lr, momentum=Training.momentum, weight_decay=Training.weight_decay)


MOST = 1e6


def utility(client: ClientContext) -> float:
    """|B| sqrt(mean loss^2) over a client's samples B, its statistical utility (Oort, Lai et al., OSDI 2021, Sec. 4.2);
    at most MOST."""
    return min(MOST, len(client.losses) * float(client.losses.double().square().mean().sqrt()))


@dataclass(frozen=True)
class LargestUtility:
    """Asks the clients whose last utility was the largest; those not asked yet come first, equal ones in random order,
    and those that failed last. Each is sent the largest model. Table `utility`: a number per client."""

    __pydantic_config__ = STRICT

    def client_metrics(self) -> tuple[ClientMetric, ...]:
        return (ClientMetric("utility", 0.0, MOST, utility),)

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        return {"utility": ((MOST,) * len(fleet),)}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        clients = rng.permutation([device.client for device in context.available])
        assignment = np.argsort(-np.asarray(state["utility"][0])[clients], kind="stable")
        return [(int(client), dispatched(context.pool)[-1]) for client in sorted(clients[assignment[:count]])]

    def learn(self, state: Tables, assignment: Assignment, result: ClientResult, seconds: float) -> Tables:
        known = list(state["utility"][0])
        known[assignment.client] = result.metrics["utility"] if isinstance(result, ClientUpdate) else 0.0
        return {"utility": (tuple(known),)}
