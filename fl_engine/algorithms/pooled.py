"""Functions (no base class) for algorithms whose server keeps one global model and a pool of its sub-models.

An algorithm that has the fields of `PooledMethod` takes over what it needs by assigning it in its class:

    selector, init, plan, merge = pooled.selector, pooled.init, pooled.plan, pooled.merge
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from fl_engine.aggregation.privacy import Public, check_model, check_selection, check_state
from fl_engine.aggregation.rules import Aggregate, Aggregation
from fl_engine.aggregation.server_opt import Average
from fl_engine.algorithms.training import Training
from fl_engine.core import pool as pools
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily, Selector, ServerContext, ServerOptimizer
from fl_engine.core.errors import ClientError, ModelError, PoolError, kind_of
from fl_engine.core.slicing import take
from fl_engine.core.state import constant
from fl_engine.core.types import (
    FULL,
    ClientUpdate,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pick,
    Pool,
    RoundContext,
    RoundPlan,
    SubmodelSpec,
    Tables,
    TaskContext,
    WorkOrder,
    changed,
)
from fl_engine.core.widths import Rounding, early_exit, prefix
from fl_engine.selection.capacity import check_eligible, dispatched, eligible, round_size

TooSmall = Literal["train", "fail"]

S = TypeVar("S", bound="PooledState")


@dataclass(frozen=True, kw_only=True)
class PooledState:
    """`params`: the global model, shapes as in the layout. `tables`: what the selector has learned. `moments`: of the
    server's optimizer. The rest never changes in a run."""

    params: Params
    tables: Tables
    moments: Params
    layout: ParamLayout = constant()
    pool: Pool = constant()


# ------------------------------------------------------------------------------------------------ pools
def check_widths(widths: Sequence[float], *, ends_in_one: bool) -> None:
    """Raises PoolError unless these are ascending width ratios (that end in 1)."""
    if not widths or list(widths) != sorted(set(widths)) or (ends_in_one and widths[-1] != 1):
        end = ", the last one 1" if ends_in_one else ""
        raise PoolError(f"algorithm.widths: different ratios in ascending order{end} are expected, got {list(widths)}")


def prefix_pool(
    family: ModelFamily,
    widths: Sequence[float],
    rounding: Rounding,
    *,
    full_only: bool = False,
    static_bn: bool = False,
) -> Pool:
    """A model per width ratio, of the first channels of every layer, named `0.5x` and so on.

    With `full_only` the full model alone is reported, and is there, not sent, also when all widths are below 1. Raises
    PoolError for widths that do not ascend, to 1 without `full_only`, and for two models of one size.
    """
    check_widths(widths, ends_in_one=not full_only)
    layout = family.layout()
    models = [
        pools.member(
            family,
            f"{width:g}x",
            prefix(layout, width, rounding),
            dispatched=True,
            reported=width == 1 or not full_only,
            static_bn=static_bn,
        )
        for width in widths
    ]
    if widths[-1] < 1:
        models.append(pools.member(family, "1x", FULL, dispatched=False, reported=True, static_bn=static_bn))
    return pools.ascending(tuple(models))


def exit_pool(family: ModelFamily, widths: Sequence[float], ends: Sequence[str], **more: Any) -> Pool:
    """A model per level, named `level1`, `level2` and so on: everything up to its exit, at its width; the last level is
    the whole network. `ends`: the block behind which each level but the last exits; `more`: further fields of
    PoolModel. Raises PoolError for widths that descend or do not end in 1, and where exits are too many or too few."""
    if len(ends) != len(widths) - 1 or widths[-1] != 1:
        raise PoolError(
            f"an early exit for each level but the last, whose width is 1, is expected: got widths {list(widths)}, "
            f"exits {list(ends)}"
        )
    if list(widths) != sorted(widths):
        raise PoolError(f"algorithm.widths: a level is no wider than the next, got {list(widths)}")
    specs = [early_exit(family, w, end) for w, end in zip(widths, (*ends, None), strict=True)]
    models = [
        pools.member(family, f"level{i}", spec, dispatched=True, reported=True, **more)
        for i, spec in enumerate(specs, 1)
    ]
    return pools.ascending(tuple(models))


# ------------------------------------------------------------------------------------------------ on the server
class PooledMethod(Protocol):
    """What the functions below ask of an algorithm."""

    @property
    def training(self) -> Training: ...
    @property
    def aggregation(self) -> Aggregation: ...
    @property
    def server(self) -> ServerOptimizer: ...
    def selector(self, pool: Pool) -> Selector: ...


class Selects(Protocol):
    @property
    def selection(self) -> Selector: ...


def selector(method: Selects, pool: Pool) -> Selector:
    """The configured selection."""
    return method.selection


def init(
    method: PooledMethod,
    params: Params,
    layout: ParamLayout,
    fleet: Sequence[Device],
    pool: Pool,
    server: ServerContext,
) -> PooledState:
    """Return the state before the first round. Raises ConfigError if the algorithm may ask no device of the fleet, or
    if the aggregation does not go with the network, the selection or what clients keep."""
    selection = method.selector(pool)
    check_model(method.aggregation, layout, pool)
    check_selection(method.aggregation, selection)
    check_state(method.aggregation, method)
    asked = check_eligible(method, fleet, pool)
    return PooledState(params=params, tables=selection.init(asked, pool), moments={}, layout=layout, pool=pool)


def plan(method: PooledMethod, state: PooledState, context: RoundContext) -> RoundPlan:
    """Each selected client gets its pool model."""
    return plan_of(method, state, context, select(method, state, context))


def plan_of(method: PooledMethod, state: PooledState, context: RoundContext, picks: Sequence[Pick]) -> RoundPlan:
    """Each of these clients gets its pool model."""
    cut = cutter(state)
    orders = (order_for(state, pick, context, cut(state.pool[pick[1]].spec)) for pick in picks)
    return RoundPlan(context.round, tuple(orders), wanted(method.training, context, len(picks)))


def cutter(state: PooledState) -> Callable[[SubmodelSpec], Params]:
    """`take` from the global model; clients of one round share what they are sent."""
    cut: dict[SubmodelSpec, Params] = {}

    def of(spec: SubmodelSpec) -> Params:
        if spec not in cut:
            cut[spec] = take(state.params, state.layout, spec)
        return cut[spec]

    return of


def order_for(
    state: PooledState, pick: Pick, context: RoundContext, payload: Params, spec: SubmodelSpec | None = None
) -> WorkOrder:
    """The order that sends the picked client the picked pool model, or `spec` instead, a sub-model of its size, with
    the weights `payload`."""
    client, level = pick
    return WorkOrder(
        round=context.round,
        client=client,
        spec=state.pool[level].spec if spec is None else spec,
        payload=payload,
        seed=seeds.derive(context.seed, "client", context.round, client),
        level=level,
    )


def select(method: PooledMethod, state: PooledState, context: RoundContext) -> list[Pick]:
    """(client, level) of the clients that the method's selection picks for this round, among those that the method may
    ask. Raises ModelError as `picked` does."""
    count = asked(method.training, context)
    context = replace(context, available=eligible(method, context.available, state.pool))
    rng = seeds.rng(context.seed, "select", context.round)
    return picked(method.selector(state.pool), state, context, count, rng)


def picked(
    selector: Selector, state: PooledState, context: RoundContext, count: int, rng: np.random.Generator
) -> list[Pick]:
    """What the selection picks. Raises ModelError for what is no list of clients with levels of the pool."""
    picks, gave = selector.pick(state.tables, context, count, rng), f"{type(selector).__name__}.pick gave"
    if not isinstance(picks, Sequence):
        raise ModelError(f"{gave} {kind_of(picks)}, where a list of (client, level) is expected")
    for pick in picks:
        if not (isinstance(pick, tuple) and len(pick) == 2 and pick[1] in range(len(state.pool))):
            raise ModelError(
                f"{gave} {pick!r}, where (client, level) is expected, the level of 0 to {len(state.pool) - 1}"
            )
    return picks


def asked(training: Training, context: RoundContext) -> int:
    """How many clients are asked."""
    count = round_size(training.fraction * context.over_provision, len(context.fleet))
    return count if context.slots is None else min(count, context.slots)


def wanted(training: Training, context: RoundContext, picked: int) -> int:
    """How many updates are merged of so many clients that were asked."""
    return min(picked, round_size(training.fraction, len(context.fleet)))


def by_examples(update: ClientUpdate) -> float:
    """An update counts by its client's samples."""
    return update.num_examples


def merge(
    method: PooledMethod,
    state: S,
    plan: RoundPlan,
    answers: Iterable[Outcome],
    server: ServerContext,
    weight: Callable[[ClientUpdate], float] = by_examples,
    moving: bool = False,
) -> S:
    """What the aggregation makes of the updates - the per-element weighted mean over the clients that hold the element
    (FlexFL Sec. III-E) - then the server's step, and what the selector learns. Failures reach the selector alone.

    `weight`: of an update. `moving`: pool models say how large sub-models are, not where in the network they lie.

    Raises ModelError, naming round and client, for a weight that is not positive and finite, or an update that does not
    fit its sub-model.
    """
    public = Public.of(plan, state.pool, moving=moving)
    aggregate = method.aggregation.start(state.params, state.layout, public)
    selection, tables = method.selector(state.pool), state.tables
    for answer in answers:
        if isinstance(answer, ClientUpdate):
            counts = weight(answer)
            try:
                aggregate.add(answer.payload, answer.spec, counts)
            except ModelError as error:
                where = f"{type(method).__name__}.merge, round {plan.round + 1}, client {answer.client}"
                raise ModelError(f"{where}: {error}") from error
        tables = learned(selection, tables, plan, answer)
    moments, params = stepped(method.server, state.moments, state.params, aggregate)
    return replace(state, params=params, moments=moments, tables=tables)


def learned(selection: Selector, tables: Tables, plan: RoundPlan, answer: Outcome) -> Tables:
    """The selector's tables after this answer."""
    return selection.learn(tables, plan.order_of[answer.client], answer, answer.elapsed)


def stepped(server: ServerOptimizer, moments: Params, old: Params, aggregate: Aggregate) -> tuple[Params, Params]:
    """(moments, params) after the server's step towards the aggregate; as they were where no update arrived."""
    if aggregate.empty:
        return moments, old
    if type(server) is Average:  # without asking which elements were trained
        return moments, aggregate.result()
    return server.step(moments, old, aggregate.result(), aggregate.trained())


# ------------------------------------------------------------------------------------------------ on the client
def local_task(training: Training, order: WorkOrder, spec: SubmodelSpec, **more: Any) -> LocalTask:
    """The task of this order on the sub-model `spec`, with the options that `training` has in the order's round;
    `more`: further fields of LocalTask."""
    global _before
    what, t = (training, order.round, spec, more), training
    before = _before
    if before is None or before[0] != what:
        task = LocalTask(
            spec=spec,
            optimizer=t.optimizer_in(order.round),
            epochs=t.epochs,
            batch_size=t.batch_size,
            drop_last=t.drop_last,
            seed=order.seed,
            clip_norm=t.clip_norm,
            sampler=t.sampler,
            augment=t.augment,
            schedule=t.schedule,
            objective=t.objective,
            **more,
        )
        before = _before = what, task
    return changed(before[1], seed=order.seed)


_before: tuple[object, LocalTask] | None = None
"""What the last task was made of, and the task: in many rounds clients differ in their seeds alone."""


def largest_fitting(
    ctx: TaskContext,
    among: Iterable[int],
    on_too_small: TooSmall,
    thresholds: Sequence[float] | None = None,
) -> int:
    """Of the pool models `among` (ascending, all within what was received) the largest that needs less than what is
    free now; where none does, the smallest all the same, or a ClientError. With `thresholds`, in % of the full model,
    one for each pool model, a model fits from its threshold on, whatever its size."""
    candidates = list(among)
    needs = [100 * m.share for m in ctx.pool] if thresholds is None else thresholds
    for i in reversed(candidates):
        if ctx.observed > needs[i] or (thresholds is not None and ctx.observed == needs[i]):
            return i
    if on_too_small == "train":
        return candidates[0]
    need = needs[candidates[0]]
    free, needed = _told_apart(ctx.observed, need)
    raise ClientError(f"{free} % of the full model is free, the smallest needs {needed} %")


def needs_room(ctx: TaskContext, index: int, on_too_small: TooSmall = "fail") -> None:
    """For methods that cannot prune on the device: raises ClientError if the model sent does not fit now. With `train`,
    the smallest model that is sent to anybody is trained all the same, as in methods that can."""
    need = 100 * ctx.pool[index].share
    if ctx.observed <= need and not (index == dispatched(ctx.pool)[0] and on_too_small == "train"):
        free, needed = _told_apart(ctx.observed, need)
        raise ClientError(f"{free} % of the full model is free now, the model sent needs {needed} %")


def _told_apart(free: float, needed: float) -> tuple[str, str]:
    """Both with one decimal, or with as many more, up to six, as tell them apart. Where they are equal, more than that
    is needed."""
    pairs = ((f"{free:.{digits}f}", f"{needed:.{digits}f}") for digits in range(1, 7))
    return next((pair for pair in pairs if pair[0] != pair[1]), (f"{free:.1f}", f"more than {needed:.1f}"))
