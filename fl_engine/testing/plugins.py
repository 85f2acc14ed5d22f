"""Plug-ins for tests: a loss, an optimizer, an algorithm with client state, a selection with a metric of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.algorithms.pooled import PooledAlgorithm
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ClientContext, ClientMetric, ModelFamily
from fl_engine.core.fields import STRICT
from fl_engine.core.samples import outputs_of
from fl_engine.core.slicing import full_shapes
from fl_engine.core.types import (
    HEAD,
    ClientUpdate,
    Device,
    LocalTask,
    Outcome,
    Params,
    Pick,
    Pool,
    RoundContext,
    Start,
    Tables,
    TaskContext,
    WorkOrder,
)
from fl_engine.selection import Selection, Uniform
from fl_engine.selection.capacity import dispatched
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


@dataclass(frozen=True)
class PersonalHeads(PooledAlgorithm):
    """FedPer: Federated Learning with Personalization Layers (Arivazhagan et al., arXiv:1912.00818, 2019, Alg. 1, 2).
    The parameters of the head stay with the client, the others are averaged.

    Departs from the paper: a client begins with the global model's head; in the paper it draws a head of its own.
    """

    selection: Selection = Uniform(model="largest")

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return self.local_task(order, order.spec)

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        """All parameters that have an axis of the network's outputs."""
        heads = {n for n, slot in family.layout().slots.items() if any(axis.group == HEAD for axis in slot.axes)}
        return {name: tuple(shape) for name, shape in full_shapes(family).items() if name in heads}

    def begin(self, state: Params, start: Start, order: WorkOrder, task: LocalTask, ctx: TaskContext) -> Start:
        return replace(start, params={**start.params, **state})

    def keep(self, state: Params, client: ClientContext) -> Params:
        return {name: client.trained[name] for name in self.client_state(client.family, ())}


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
        order = np.argsort(-np.asarray(state["utility"][0])[clients], kind="stable")
        return [(int(client), dispatched(context.pool)[-1]) for client in sorted(clients[order[:count]])]

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        known = list(state["utility"][0])
        known[order.client] = outcome.metrics["utility"] if isinstance(outcome, ClientUpdate) else 0.0
        return {"utility": (tuple(known),)}
