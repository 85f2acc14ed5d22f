"""SCAFFOLD: Stochastic Controlled Averaging (Karimireddy et al., ICML 2020; arXiv:1910.06378), Algorithm 1.

A client adds `c - c_i` to every gradient. The variate c estimates the gradient of all clients, and c_i estimates the
gradient of client i. After training, c_i becomes `c_i - c + (x - y_i) / (K * lr)` (option II), and the server adds the
mean change of the variates to c. The server computes the change of each variate from the client's update.

Departs from the paper: with momentum, K is the effective number of steps (`fednova.distance`). The option `weighting`
can give clients' updates unequal weights. The option `server` defines the server's step size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.rules import Mean
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.fednova import check_constant_sgd, distance
from fl_engine.algorithms.pooled import PooledState, Weighting
from fl_engine.core import costs
from fl_engine.core.contracts import ClientContext, ModelFamily, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import full_shapes, is_statistic
from fl_engine.core.types import (
    Assignment,
    ClientUpdate,
    Device,
    LocalTask,
    Params,
    Pool,
    Results,
    RoundContext,
    RoundPlan,
    Start,
    TaskContext,
)

VARIATE = "variate/"
"""Prefix for the tensor names of a client's variate in the client's state."""


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(PooledState):
    """`variate` contains the tensors of c, and is empty until the first update is merged. Missing tensors are 0."""

    variate: Params


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD: control variates correct the drift of clients with non-IID data (Karimireddy et al., ICML 2020)."""

    weighting: Weighting = "uniform"

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        check_constant_sgd(self.training)
        if type(self.aggregation) is not Mean:
            raise ConfigError.at(f"algorithm.aggregation must be mean, got {type(self.aggregation).__name__}")
        if self.mask_labels:
            raise ConfigError.at("algorithm.mask_labels must be false, because SCAFFOLD does not mask control variates")

    def first_state(self, common: PooledState) -> ScaffoldState:
        return ScaffoldState(**vars(common), variate={})

    def plan(self, state: ScaffoldState, context: RoundContext) -> RoundPlan:
        plan = super().plan(state, context)
        return replace(plan, assignments=tuple(replace(each, memory=state.variate) for each in plan.assignments))

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        shapes = full_shapes(family)
        return {VARIATE + name: tuple(shape) for name, shape in shapes.items() if not is_statistic(name)}

    def begin(self, state: Params, start: Start, assignment: Assignment, task: LocalTask, ctx: TaskContext) -> Start:
        linear = {name.removeprefix(VARIATE): tensor for name, tensor in state.items()}
        for name, tensor in start.linear.items():
            linear[name] = linear[name] - tensor if name in linear else -tensor
        return replace(start, linear=linear)

    def keep(self, state: Params, client: ClientContext) -> Params:
        steps = costs.steps(client.task, len(client.y))
        reach = client.task.optimizer.lr * distance(self.training, steps)
        variate: Params = {}
        for name, tensor in client.trained.items():
            if not is_statistic(name):
                own, common = state.get(VARIATE + name, 0), client.assignment.memory.get(name)
                moved = (client.received[name] - tensor) / reach
                variate[VARIATE + name] = moved + own - (0 if common is None else common.to(moved.device))
        return variate

    def merge(self, state: ScaffoldState, plan: RoundPlan, results: Results, server: ServerContext) -> ScaffoldState:
        merged: ScaffoldState = super().merge(state, plan, results, server)
        clip = self.aggregation.clip if isinstance(self.aggregation, Mean) else None
        rate, changes = self.training.optimizer_in(plan.round).lr, Params()
        regions = Regions(state.params, state.layout)
        for result in results:
            if not isinstance(result, ClientUpdate):
                continue
            sent = plan.assignment_of[result.client].payload
            reach = rate * distance(self.training, result.metrics["steps"])
            for name, tensor in limited(result.payload, result.spec, state.params, regions, clip).items():
                if not is_statistic(name):
                    change = (sent[name].double() - tensor) / reach - state.variate.get(name, 0)
                    changes[name] = changes.get(name, 0) + change
        variate = {
            name: (state.variate.get(name, 0) + change / len(server.samples)).float()
            for name, change in changes.items()
        }
        return replace(merged, variate={**state.variate, **variate})
