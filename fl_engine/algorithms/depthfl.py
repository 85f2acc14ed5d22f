"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients (Kim et al., ICLR 2023).

A level is a depth, at full width, with an exit at its end and at every shallower level's. A client trains all its
exits, and each learns from every other (Sec. 3.2, Eq. 3); the weight of that rises over the first rounds. A level
answers with the mean of its exits' logits. Optimised with FedDyn (Acar et al., ICLR 2021), as in the authors' code:

    client k:  min F_k(w) - <g_k, w> + alpha/2 * ||w - w^t||^2,     g_k <- g_k - alpha * (w_k - w^t)
    server:    h <- h - alpha/K * sum_k (w_k - w^t),                w^(t+1) = mean_k w_k - h / alpha

Departs from the paper: exits are a global pooling and one linear layer, at the deepest blocks at which each level has
at most its target plus 5 points (`widths.choose_exits`; for VGG16 29.7, 50.1 and 100 %, for ResNet18 15.8, 26.2 and 100
%); a device with less free than its level needs steps down. Devices would keep g_k; here the server's state does,
one model for each client that has taken part, written at every commit: for large networks set `alpha: 0`, or commit
rarely. g_k travels with the order and counts in `bytes_down`: up to one more model for a client that takes part
again.

With a codec on the way down, w^t in g_k and h is what client k decoded: the client starts from it and is pulled to
it, and h stays the mean of all clients' g_k. A change from the server's own weights would contain the codec's
rounding, which g_k and h would add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fl_engine.aggregation.averaging import Regions, limited
from fl_engine.aggregation.rules import Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms.levels import exit_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, Weighting
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count, NotNegative, Positive
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import (
    ClientUpdate,
    Device,
    ExitLoss,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)
from fl_engine.core.widths import choose_exits, with_exits


@dataclass(frozen=True, kw_only=True)
class DepthState(PooledState):
    """`memory`: g_k by `<client>/<name>`; `h` by name, of parameters that some client has trained."""

    memory: Params
    h: Params


@dataclass(frozen=True)
class DepthFL(PooledAlgorithm):
    targets: tuple[Positive, ...] = (25.0, 50.0, 100.0)
    """Size of each level in % of the full network, which limits how deep it is."""
    exits: tuple[str, ...] | None = None
    """The block after which each level but the last ends; null: chosen by the targets."""
    kd_weight: NotNegative = 1.0
    """Weight of the distillation between exits; 0: none."""
    temperature: Positive = 1.0
    """Temperature of this distillation."""
    ramp: Count = 300
    """The weight in round t is kd_weight * exp(-5 (1 - t/ramp)^2), and kd_weight from round `ramp` on."""
    alpha: NotNegative = 0.1
    """alpha of FedDyn; 0 is FedAvg."""
    weighting: Weighting = "uniform"
    server: Server = Average()
    """The step towards the mean, before FedDyn's correction by h."""

    @property
    def remembers_changes(self) -> bool:
        return self.alpha > 0

    def _ends(self, family: ModelFamily) -> tuple[str, ...]:
        ones = (1.0,) * len(self.targets)
        return choose_exits(family, ones, self.targets) if self.exits is None else self.exits

    def network(self, family: ModelFamily) -> ModelFamily:
        return with_exits(family, self._ends(family))

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return exit_pool(self, family, (1.0,) * len(self.targets), self._ends(family), ensemble=True)

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> DepthState:
        if self.alpha > 0 and type(self.aggregation) is not Mean:
            raise ConfigError(
                f"algorithm.aggregation must be mean (which may clip) with algorithm.alpha > 0, got "
                f"{type(self.aggregation).__name__}: FedDyn adds up the clients' changes. Set algorithm.alpha=0"
            )
        return DepthState(**vars(super().init(params, layout, fleet, pool, server)), memory={}, h={})

    def plan(self, state: DepthState, context: RoundContext) -> RoundPlan:
        plan = super().plan(state, context)
        return replace(plan, orders=tuple(replace(o, memory=_memory(state, o)) for o in plan.orders))

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        level = self.largest_fitting(ctx, range(order.level + 1))
        progress = min(order.round, self.ramp) / self.ramp
        exits = ExitLoss(
            weights=(1.0,) * (level + 1),
            kd_weight=self.kd_weight * math.exp(-5 * (1 - progress) ** 2),
            temperature=self.temperature,
            teachers="all",
        )
        return self.local_task(order, ctx.pool[level].spec, exits=exits, proximal=self.alpha)

    def merge(
        self, state: DepthState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> DepthState:
        if self.alpha == 0:
            merged: DepthState = super().merge(state, plan, answers, server)
            return merged
        memory = dict(state.memory)
        moved: Params = {}
        trained: Params = {}
        regions = Regions(state.params, state.layout)

        def remembering() -> Iterator[Outcome]:
            for answer in answers:
                if isinstance(answer, ClientUpdate):
                    clip = self.aggregation.clip if isinstance(self.aggregation, Mean) else None
                    sent = plan.order_of[answer.client].payload  # at full width, so that its regions are the model's
                    learned = limited(answer.payload, answer.spec, sent, regions, clip)
                    kept = limited(answer.payload, answer.spec, state.params, regions, clip)
                    answer = replace(answer, payload=kept)
                    at = regions.of((answer.spec, tuple(kept)))
                    for name, tensor in learned.items():
                        if is_statistic(name):
                            continue
                        key, whole = f"{answer.client}/{name}", state.params[name]
                        change = torch.zeros_like(whole)  # 0 in rows of classes that the client does not hold
                        change[at[name]] = tensor - sent[name][at[name]]
                        memory[key] = memory.get(key, torch.zeros_like(change)) - self.alpha * change
                        moved[name] = moved.get(name, torch.zeros_like(change, dtype=torch.float64)) + change.double()
                        trained.setdefault(name, torch.zeros(whole.shape, dtype=torch.bool))[at[name]] = True
                yield answer

        unclipped = replace(self, aggregation=Mean())  # what is over the limit is cut off above
        merged = PooledAlgorithm.merge(unclipped, state, plan, remembering(), server)
        h, params = dict(state.h), dict(merged.params)
        for name, change in moved.items():
            before = h.get(name, torch.zeros_like(state.params[name]))
            h[name] = (before.double() - self.alpha / len(server.samples) * change).to(before.dtype)
            params[name] = torch.where(trained[name], params[name] - h[name] / self.alpha, params[name])
        return replace(merged, params=params, memory=memory, h=h)


def _memory(state: DepthState, order: WorkOrder) -> Params:
    kept = {name: state.memory.get(f"{order.client}/{name}") for name in order.payload}
    return {name: tensor for name, tensor in kept.items() if tensor is not None}
