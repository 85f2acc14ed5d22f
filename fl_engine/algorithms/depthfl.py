"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients (Kim et al., ICLR 2023;
openreview.net/forum?id=pf8RIZTMU58).

A level contains the first blocks of the network at full width, with an exit at the end of the level and at the end of
every shallower level. A client trains all exits of its level. Each exit is also distilled from all other exits (Sec.
3.2, Eq. 3), with a weight that increases over the first rounds. The prediction of a level is the mean of the exits'
logits. Clients and server optimise with FedDyn (Acar et al., ICLR 2021; arXiv:2111.04263), as in the authors' code:

    client k:  min F_k(w) - <g_k, w> + alpha/2 * ||w - w^t||^2,     g_k <- g_k - alpha * (w_k - w^t)
    server:    h <- h - alpha/K * sum_k (w_k - w^t),                w^(t+1) = mean_k w_k - h / alpha

Departs from the paper: an exit consists of global pooling and one linear layer. The exit of a level follows the deepest
block for which the level's size is at most 5 percentage points above the target (`widths.choose_exits`). By default,
the levels contain 29.7, 50.1 and 100 % of the parameters of VGG16, and 15.8, 26.2 and 100 % of the parameters of
ResNet18. A device trains a smaller level if the assigned level does not fit into its free memory. In the paper devices
store g_k. Here the server's state contains g_k, which is as large as the model, for each client that has returned an
update. Each commit writes all g_k, so set `alpha: 0` for large networks, or increase `rounds.commit_every`.
`bytes_down` includes g_k, because the assignment contains g_k.

If a codec compresses the server's weights, w^t in the updates of g_k and h is the model that client k has decoded. With
the exact weights, g_k and h would accumulate the codec's rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.rules import Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms.levels import ExitLevels
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, Weighting
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count, NotNegative, Positive
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import (
    Assignment,
    ClientUpdate,
    Device,
    ExitLoss,
    LocalTask,
    Params,
    Pool,
    Results,
    RoundContext,
    RoundPlan,
    TaskContext,
)


@dataclass(frozen=True, kw_only=True)
class DepthState(PooledState):
    """`memory` maps `<client>/<tensor name>` to the tensors of g_k. `h` has a tensor for each trained parameter."""

    memory: Params
    h: Params


@dataclass(frozen=True)
class DepthFL(ExitLevels):
    ensemble = True

    kd_weight: NotNegative = 1.0
    """Weight of the distillation between exits; 0: no distillation."""
    temperature: Positive = 1.0
    """Temperature of the distillation between exits."""
    ramp: Count = 300
    """Rounds until the distillation's weight is kd_weight. In round t < ramp: kd_weight * exp(-5 (1 - t/ramp)^2)."""
    alpha: NotNegative = 0.1
    """Regularisation weight alpha of FedDyn; 0 selects FedAvg instead of FedDyn."""
    weighting: Weighting = "uniform"
    server: Server = Average()
    """Server optimizer that is applied to the mean before FedDyn's correction by h."""

    @property
    def remembers_changes(self) -> bool:
        return self.alpha > 0

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        if self.alpha > 0 and type(self.aggregation) is not Mean:
            raise ConfigError.at(
                f"algorithm.aggregation must be mean if algorithm.alpha > 0, got {type(self.aggregation).__name__}"
            )

    def first_state(self, common: PooledState) -> DepthState:
        return DepthState(**vars(common), memory={}, h={})

    def plan(self, state: DepthState, context: RoundContext) -> RoundPlan:
        plan, assignments = super().plan(state, context), []
        for each in plan.assignments:
            memory = {name: state.memory.get(f"{each.client}/{name}") for name in each.payload}
            assignments.append(replace(each, memory={n: t for n, t in memory.items() if t is not None}))
        return replace(plan, assignments=tuple(assignments))

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(assignment.level + 1))
        progress = min(assignment.round, self.ramp) / self.ramp
        exits = ExitLoss(
            weights=(1.0,) * (level + 1),
            kd_weight=self.kd_weight * math.exp(-5 * (1 - progress) ** 2),
            temperature=self.temperature,
            teachers="all",
        )
        return self.local_task(assignment, ctx.pool[level].spec, exits=exits, proximal=self.alpha)

    def merge(self, state: DepthState, plan: RoundPlan, results: Results, server: ServerContext) -> DepthState:
        if self.alpha == 0:
            merged: DepthState = super().merge(state, plan, results, server)
            return merged
        memory = dict(state.memory)
        moved: Params = {}
        trained: Params = {}
        regions = Regions(state.params, state.layout)

        clip = self.aggregation.clip if isinstance(self.aggregation, Mean) else None

        def remembering() -> Results:
            for result in results:
                if not isinstance(result, ClientUpdate):
                    yield result
                    continue
                sent = plan.assignment_of[result.client].payload
                learned = limited(result.payload, result.spec, sent, regions, clip)
                clipped = limited(result.payload, result.spec, state.params, regions, clip)
                at = regions.of((result.spec, tuple(clipped)))
                for name, tensor in learned.items():
                    if is_statistic(name):
                        continue
                    key, whole = f"{result.client}/{name}", state.params[name]
                    change = torch.zeros_like(whole)  # Rows of classes without samples stay 0.
                    change[at[name]] = tensor - sent[name][at[name]]
                    memory[key] = memory.get(key, torch.zeros_like(change)) - self.alpha * change
                    moved[name] = moved.get(name, torch.zeros_like(change, dtype=torch.float64)) + change.double()
                    trained.setdefault(name, torch.zeros(whole.shape, dtype=torch.bool))[at[name]] = True
                yield replace(result, payload=clipped)

        unclipped = replace(self, aggregation=Mean())  # `remembering` clips the updates.
        merged = PooledAlgorithm.merge(unclipped, state, plan, remembering(), server)
        h, params = dict(state.h), dict(merged.params)
        for name, change in moved.items():
            before = h.get(name, torch.zeros_like(state.params[name]))
            h[name] = (before.double() - self.alpha / len(server.samples) * change).to(before.dtype)
            params[name] = torch.where(trained[name], params[name] - h[name] / self.alpha, params[name])
        return replace(merged, params=params, memory=memory, h=h)
