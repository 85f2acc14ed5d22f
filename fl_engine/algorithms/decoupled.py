"""Decoupled: one FedAvg per level among the devices that can hold it, nothing shared between levels (the baseline of
FlexFL, AdaptiveFL, HeteroFL and ScaleFL).

Every round each level has k devices of its own. A device that has less free than its model needs fails: it cannot
prune, since the smaller model has other weights. Only one that was sent the smallest model trains it all the same,
unless `on_too_small: fail` is set.

Departs from the papers: a device serves at most one level in a round; the largest level, which the fewest can hold,
chooses first. In FlexFL's comparison a device that is short trains the level that fits instead; here the server cannot
know in time, and about one in six orders of the larger levels fails on the common fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fl_engine.aggregation.privacy import Public, check_draw
from fl_engine.algorithms.levels import prefix_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, asked, assignment, picked, stepped, wanted
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Fraction
from fl_engine.core.slicing import take
from fl_engine.core.types import (
    ClientUpdate,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pick,
    Pool,
    PoolModel,
    Prepared,
    RoundContext,
    RoundPlan,
    TaskContext,
    WorkOrder,
)
from fl_engine.selection.capacity import level_of


@dataclass(frozen=True, kw_only=True)
class DecoupledState(PooledState):
    """`params` is the largest level's model; `levels` the others', as `<level>/<name>`, shapes of the level."""

    levels: Params

    @property
    def published(self) -> Params:
        return {**self.params, **self.levels}


@dataclass(frozen=True)
class Decoupled(PooledAlgorithm):
    widths: tuple[Fraction, ...] = (0.5, 0.71, 1.0)
    """Width ratio of each level, ascending to 1; these make about 25, 50 and 100 % of the parameters."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return prefix_pool(self, family, self.widths)

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> DecoupledState:
        """All levels start from slices of one initial model. Raises ConfigError for secret selection."""
        check_draw(self.aggregation, "decoupled draws its clients level by level")
        common = super().init(params, layout, fleet, pool, server)
        levels = {f"{m.name}/{n}": t.clone() for m in pool[:-1] for n, t in take(params, layout, m.spec).items()}
        return DecoupledState(**vars(common), levels=levels)

    def plan(self, state: DecoupledState, context: RoundContext) -> RoundPlan:
        picks: list[Pick] = []
        enough = 0
        for level in reversed(range(len(state.pool))):
            rng = seeds.rng(context.seed, f"select level {level}", context.round)
            busy = {client for client, _ in picks}
            free = tuple(d for d in context.available if d.client not in busy and level_of(d, state.pool) >= level)
            alone = tuple(replace(m, dispatched=i == level) for i, m in enumerate(state.pool))
            now = replace(context, available=free, pool=alone)
            found = picked(self.selection, state, now, asked(self.training, context), rng)
            enough += wanted(self.training, context, len(found))
            picks += found
        own = [_own(state, m) for m in state.pool]
        orders = (assignment(context, c, level, state.pool[level].spec, own[level]) for c, level in sorted(picks))
        return RoundPlan(context.round, tuple(orders), enough)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return self.whole(order, ctx, scaler=self.widths[order.level])

    def merge(
        self, state: DecoupledState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> DecoupledState:
        """One aggregate per level, of its own weights: prefixes, which the full layout can address."""
        tables = state.tables
        old = {m.name: _own(state, m) for m in state.pool}
        aggregates = {
            m.name: self.aggregation.start(old[m.name], state.layout, _public(plan, level, m))
            for level, m in enumerate(state.pool)
        }
        for answer in answers:
            order = plan.order_of[answer.client]
            if isinstance(answer, ClientUpdate):
                aggregate = aggregates[state.pool[order.level].name]
                aggregate.add(answer.payload, answer.spec, self.weight(answer, state, server))
            tables = self.selection.learn(tables, order, answer, answer.elapsed)
        levels: Params = {}
        moments: Params = {}
        for model in state.pool:
            name = model.name
            moved, own = stepped(self.server, _with_prefix(state.moments, name), old[name], aggregates[name])
            levels |= {f"{name}/{n}": t for n, t in own.items()}
            moments |= {f"{name}/{n}": t for n, t in moved.items()}
        largest = state.pool[-1].name
        return replace(
            state,
            params=_with_prefix(levels, largest),
            levels={n: t for n, t in levels.items() if not n.startswith(f"{largest}/")},
            tables=tables,
            moments=moments,
        )


def _public(plan: RoundPlan, level: int, model: PoolModel) -> Public:
    """The level's part of the round."""
    orders = tuple(order for order in plan.orders if order.level == level)
    return Public.of(replace(plan, orders=orders), (model,), part=model.name)


def _with_prefix(tensors: Params, level: str) -> Params:
    prefix = f"{level}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _own(state: DecoupledState, model: PoolModel) -> Params:
    """The level's weights."""
    return state.params if model == state.pool[-1] else _with_prefix(state.levels, model.name)
