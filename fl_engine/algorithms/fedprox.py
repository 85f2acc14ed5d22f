"""FedProx: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020), Algorithm 2.

FedAvg whose clients minimise `F_k(w) + mu/2 * ||w - w^t||^2`: mu holds them close to the model they were sent.

Departs from the paper: all clients run the same number of epochs. Its tolerance of partial work (gamma-inexact
solutions) lies in accepting whatever a client returns, which every algorithm here does. Its sampling by data size
with a plain mean is here, as in most code, uniform sampling with a mean weighted by data size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms.full_model import Eligible, check_eligible, full_pool, selector
from fl_engine.algorithms.pooled import (
    PooledState,
    Training,
    local_task,
    merge_mean,
    needs_room,
    plan_pool,
    start,
)
from fl_engine.core.fields import STRICT, NotNegative
from fl_engine.core.types import (
    FULL,
    Device,
    LocalTask,
    ModelFamily,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    RoundPlan,
    TaskContext,
    WorkOrder,
)
from fl_engine.selection import Selection


@dataclass(frozen=True)
class FedProx:
    __pydantic_config__: ClassVar = STRICT
    needs_apoz: ClassVar[bool] = False

    training: Training = Training()
    mu: NotNegative = 0.01
    """Weight of the proximal term; 0 is FedAvg."""
    eligible: Eligible = "capable"
    """`all` ignores what devices can hold; `capable` keeps to it."""
    selection: Selection | None = None
    """null: uniform among the eligible."""
    aggregation: Aggregation = Mean()
    server: Server = Average()

    def pool(self, family: ModelFamily, apoz: Sequence[float]) -> Pool:
        return full_pool(family)

    def init(self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool) -> PooledState:
        check_eligible(self.eligible, fleet)
        return start(params, layout, fleet, pool, selector(self.selection, self.eligible), self.aggregation)

    def plan(self, state: PooledState, round: int, seed: int) -> RoundPlan:
        return plan_pool(state, selector(self.selection, self.eligible), self.training, round, seed)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable":
            needs_room(ctx, 0)
        return local_task(self.training, order, FULL, proximal=self.mu)

    def merge(self, state: PooledState, plan: RoundPlan, outcomes: Iterable[Outcome]) -> PooledState:
        return merge_mean(
            state, plan, outcomes, selector(self.selection, self.eligible), self.server, aggregation=self.aggregation
        )
