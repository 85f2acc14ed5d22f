"""All-Large: FedAvg on the full model (McMahan et al., AISTATS 2017, Algorithm 1), the papers' reference.

With `eligible: all` every client trains the full model, whatever it can hold: what a fleet of strong devices would
reach. With `eligible: capable` only devices take part that can hold the full model at their maximum capacity, and
one that has less free at the moment fails: what FedAvg can do on this fleet, and what heterogeneous methods must beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fl_engine import pool as pools
from fl_engine import seeds
from fl_engine.algorithms.pooled import STRICT, PooledState, Training, merge_mean, plan_of
from fl_engine.errors import ClientError, ConfigError
from fl_engine.selection import holds, round_size, uniform
from fl_engine.types import (
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


@dataclass(frozen=True)
class AllLarge:
    __pydantic_config__: ClassVar = STRICT
    needs_apoz: ClassVar[bool] = False

    training: Training = Training()
    eligible: Literal["all", "capable"] = "capable"
    """`all` ignores what devices can hold; `capable` keeps to it."""

    def pool(self, family: ModelFamily, apoz: Sequence[float]) -> Pool:
        return (pools.member(family, "full", FULL, dispatched=True, reported=True),)

    def init(self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool) -> PooledState:
        if self.eligible == "capable" and not any(holds(d, 1.0) for d in fleet):
            raise ConfigError("algorithm.eligible is 'capable', but no device of the fleet can hold the full model")
        return PooledState(params, layout, tuple(fleet), pool)

    def plan(self, state: PooledState, round: int, seed: int) -> RoundPlan:
        k = round_size(self.training.fraction, len(state.fleet))
        able = [d.client for d in state.fleet if self.eligible == "all" or holds(d, 1.0)]
        return plan_of(state, uniform(seeds.rng(seed, "select", round), able, 0, k), round, seed)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable" and ctx.observed <= 100:
            raise ClientError(f"{ctx.observed:.1f} % of the full model is free now, all of it is needed")
        t = self.training
        return LocalTask(FULL, t.sgd(order.round), t.epochs, t.batch_size, t.drop_last, order.seed)

    def merge(self, state: PooledState, plan: RoundPlan, outcomes: Iterable[Outcome]) -> PooledState:
        return merge_mean(state, outcomes)
