"""FedOpt: Adaptive Federated Optimization (Reddi et al., ICLR 2021), Algorithms 1 and 2.

FedAvg whose server takes the clients' mean change for a gradient and steps with Adam, Yogi or Adagrad; the rules
are in `fl_engine/aggregation/server_opt.py`, and every other algorithm takes them as its `server` too.

Departs from the paper: it has the mean over clients weighted by sample counts, as its experiments do; its
experiments' client learning-rate decay is `training.lr_decay`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Adam, Server
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
class FedOpt:
    __pydantic_config__: ClassVar = STRICT
    needs_apoz: ClassVar[bool] = False

    training: Training = Training()
    aggregation: Aggregation = Mean()
    server: Server = Adam()
    eligible: Eligible = "capable"
    """`all` ignores what devices can hold; `capable` keeps to it."""
    selection: Selection | None = None
    """null: uniform among the eligible."""

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
