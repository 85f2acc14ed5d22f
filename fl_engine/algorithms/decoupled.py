"""Decoupled: FedAvg trains a separate model for each level, on the devices whose memory can hold this model. FlexFL,
AdaptiveFL, HeteroFL and ScaleFL use Decoupled as a baseline.

In every round, k devices are selected for each level. A device fails if the received model does not fit into its free
memory. A smaller level has different weights, so it cannot be pruned from the received model. The smallest model is
trained regardless of the free memory, unless `on_too_small: fail` is set.

Departs from the papers: a device trains at most one level in a round. Devices for the largest level are selected first,
because the fewest devices have enough memory for it. In FlexFL's comparison a device with too little memory trains a
smaller level that fits. Here the server does not know the free memory at selection, so about one in six assignments of
the larger levels fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from fl_engine.aggregation.privacy import Public
from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, stepped
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction
from fl_engine.core.slicing import take, under
from fl_engine.core.types import (
    Assignment,
    ClientUpdate,
    LocalTask,
    Params,
    Pick,
    Pool,
    PoolModel,
    Prepared,
    Results,
    RoundContext,
    RoundPlan,
    TaskContext,
)
from fl_engine.selection.capacity import level_of


@dataclass(frozen=True, kw_only=True)
class DecoupledState(PooledState):
    """`params` is the model of the largest level. `levels` maps `<level>/<tensor name>` to the tensors of all smaller
    levels."""

    levels: Params

    @property
    def published(self) -> Params:
        return {**self.params, **self.levels}


@dataclass(frozen=True)
class Decoupled(PooledAlgorithm):
    draw_matters: ClassVar[str] = "decoupled draws its clients level by level"

    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """Ascending width ratios that end with 1. The defaults give about 25, 50 and 100 % of the parameters."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return prefix_pool(self, family, self.widths)

    def first_state(self, common: PooledState) -> DecoupledState:
        levels = {m.name: take(common.params, common.layout, m.spec) for m in common.pool[:-1]}
        own = {f"{level}/{name}": t.clone() for level, params in levels.items() for name, t in params.items()}
        return DecoupledState(**vars(common), levels=own)

    def plan(self, state: DecoupledState, context: RoundContext) -> RoundPlan:
        picks: list[Pick] = []
        enough = 0
        for level in reversed(range(len(state.pool))):
            busy = {client for client, _ in picks}
            free = tuple(d for d in context.available if d.client not in busy and level_of(d, state.pool) >= level)
            alone = tuple(replace(m, dispatched=i == level) for i, m in enumerate(state.pool))
            now = replace(context, available=free, pool=alone)
            found = self.select(state, now, f"select level {level}")
            enough += self.enough(context, found)
            picks += found
        own = [_own(state, m) for m in state.pool]
        sent = self.assign(state, context, sorted(picks)).assignments
        return RoundPlan(context.round, tuple(replace(each, payload=own[each.level]) for each in sent), enough)

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        return self.whole(assignment, ctx, scaler=self.widths[assignment.level])

    def merge(self, state: DecoupledState, plan: RoundPlan, results: Results, server: ServerContext) -> DecoupledState:
        """Merge each level separately. The full model's layout is valid for every level, because levels are prefixes of
        the full model."""
        tables = state.tables
        old = {m.name: _own(state, m) for m in state.pool}
        aggregates = {}
        for level, m in enumerate(state.pool):
            part = replace(plan, assignments=tuple(each for each in plan.assignments if each.level == level))
            public = Public.of(part, (m,), part=m.name, reference=partial(self.reference, server, plan.round))
            aggregates[m.name] = self.aggregation.start(old[m.name], state.layout, public)
        for result in results:
            assignment = plan.assignment_of[result.client]
            if isinstance(result, ClientUpdate):
                aggregate = aggregates[state.pool[assignment.level].name]
                aggregate.add(result.payload, result.spec, self.weight(result, state, server))
            tables = self.selection.learn(tables, assignment, result, result.elapsed)
        levels: Params = {}
        moments: Params = {}
        for model in state.pool:
            name = model.name
            moved, own = stepped(self.server, under(state.moments, f"{name}/"), old[name], aggregates[name])
            moments |= {f"{name}/{n}": t for n, t in moved.items()}
            if model != state.pool[-1]:
                levels |= {f"{name}/{n}": t for n, t in own.items()}
        return replace(state, params=own, levels=levels, tables=tables, moments=moments)


def _own(state: DecoupledState, model: PoolModel) -> Params:
    return state.params if model == state.pool[-1] else under(state.levels, f"{model.name}/")
