"""All-Large: FedAvg on the full model (McMahan et al., AISTATS 2017, Algorithm 1), the papers' reference.

With `eligible: all` every client trains the full model, whatever it can hold: what a fleet of strong devices would
reach. With `eligible: capable` only devices take part that can hold the full model at their maximum capacity, and
one that has less free at the moment fails: what FedAvg can do on this fleet, and what heterogeneous methods must beat.
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
from fl_engine.core.fields import STRICT
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
class AllLarge:
    __pydantic_config__: ClassVar = STRICT
    needs_apoz: ClassVar[bool] = False

    training: Training = Training()
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
        return local_task(self.training, order, FULL)

    def merge(self, state: PooledState, plan: RoundPlan, outcomes: Iterable[Outcome]) -> PooledState:
        return merge_mean(
            state, plan, outcomes, selector(self.selection, self.eligible), self.server, aggregation=self.aggregation
        )
