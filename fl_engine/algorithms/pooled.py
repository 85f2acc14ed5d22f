"""What algorithms share whose server keeps one global model and a pool of its sub-models: functions, no base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from fl_engine.aggregation.privacy import Public, check_model, check_selection
from fl_engine.aggregation.rules import Aggregate, Aggregation, Mean
from fl_engine.aggregation.server_opt import Average
from fl_engine.core import pool as pools
from fl_engine.core import seeds
from fl_engine.core.errors import ClientError, PoolError
from fl_engine.core.fields import Count, Fraction, NotNegative, Positive
from fl_engine.core.slicing import index_of, take
from fl_engine.core.state import constant
from fl_engine.core.types import (
    FULL,
    SGD,
    ClientUpdate,
    Device,
    LocalTask,
    ModelFamily,
    Outcome,
    ParamLayout,
    Params,
    Pick,
    Pool,
    RoundPlan,
    Selector,
    ServerOptimizer,
    SubmodelSpec,
    Tables,
    TaskContext,
    WorkOrder,
)
from fl_engine.core.widths import Rounding, early_exit, prefix
from fl_engine.selection.capacity import round_size

TooSmall = Literal["train", "fail"]
Weighting = Literal["examples", "uniform"]
"""How much a client's update counts: by its sample count (FedAvg), or all alike."""


S = TypeVar("S", bound="PooledState")


@dataclass(frozen=True)
class Training:
    """Local training, the same for every algorithm of a comparison. Defaults: FlexFL Sec. IV, and its code for
    weight decay, learning-rate decay and the dropped last batch."""

    fraction: Fraction = 0.1
    """Share of all clients selected per round (f)."""
    epochs: Count = 5
    batch_size: Count = 50
    lr: Positive = 0.01
    momentum: NotNegative = 0.5
    weight_decay: NotNegative = 1e-4
    lr_decay: Positive = 0.998
    """The learning rate of round r is lr * lr_decay^r."""
    lr_steps: tuple[Count, ...] = ()
    """Rounds at which the learning rate is divided by ten (FedRolex Table 3.7)."""
    clip_norm: Positive | None = None
    """Largest norm of a step's gradient (HeteroFL's code: 1); null: no limit."""
    drop_last: bool = True

    def sgd(self, round: int) -> SGD:
        rate = self.lr * self.lr_decay**round / 10 ** sum(round >= step for step in self.lr_steps)
        return SGD(rate, self.momentum, self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class PooledState:
    """`params`: the global model, shapes as in the layout. `tables`: what the selector has learned. `moments`: of the
    server's optimiser. The rest never changes in a run."""

    params: Params
    tables: Tables
    moments: Params
    layout: ParamLayout = constant()
    fleet: tuple[Device, ...] = constant()
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

    With `full_only` the full model alone is reported, and is there, not sent, also when all widths are below 1.
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
    """A model per level: everything up to its exit, at its width; the last level is the whole network."""
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
def start(
    params: Params,
    layout: ParamLayout,
    fleet: Sequence[Device],
    pool: Pool,
    selection: Selector,
    aggregation: Aggregation = Mean(),  # noqa: B008 - immutable
) -> PooledState:
    """Raises ConfigError where the aggregation does not go with the network or the selection."""
    check_model(aggregation, layout, pool)
    check_selection(aggregation, selection)
    tables = selection.init(fleet, pool)
    return PooledState(params=params, tables=tables, moments={}, layout=layout, fleet=tuple(fleet), pool=pool)


def cutter(state: PooledState) -> Callable[[SubmodelSpec], Params]:
    """`take` from the global model; clients of one round share what they are sent."""
    cut: dict[SubmodelSpec, Params] = {}

    def of(spec: SubmodelSpec) -> Params:
        if spec not in cut:
            cut[spec] = take(state.params, state.layout, spec)
        return cut[spec]

    return of


def order_for(
    state: PooledState, pick: Pick, round: int, seed: int, payload: Params, spec: SubmodelSpec | None = None
) -> WorkOrder:
    """Sends the picked client the picked pool model, or `spec` instead, a sub-model of its size, with the weights
    `payload`; the hint is the pool model's name."""
    client, level = pick
    model = state.pool[level]
    spec = model.spec if spec is None else spec
    return WorkOrder(
        round=round,
        client=client,
        spec=spec,
        payload=payload,
        seed=seeds.derive(seed, "client", round, client),
        hints={"model": model.name},
    )


def select(state: PooledState, selection: Selector, training: Training, round: int, seed: int) -> list[Pick]:
    k = round_size(training.fraction, len(state.fleet))
    return selection.pick(state.tables, state.fleet, state.pool, seeds.rng(seed, "select", round), k)


def plan_pool(state: PooledState, selection: Selector, training: Training, round: int, seed: int) -> RoundPlan:
    """Each selected client gets its pool model."""
    picks = select(state, selection, training, round, seed)
    cut = cutter(state)
    orders = (order_for(state, pick, round, seed, cut(state.pool[pick[1]].spec)) for pick in picks)
    return RoundPlan(round, tuple(orders))


def by_examples(update: ClientUpdate) -> float:
    return update.num_examples


def weight_of(weighting: Weighting) -> Callable[[ClientUpdate], float]:
    return by_examples if weighting == "examples" else lambda update: 1.0


def merge_mean(
    state: S,
    plan: RoundPlan,
    outcomes: Iterable[Outcome],
    selection: Selector,
    server: ServerOptimizer = Average(),  # noqa: B008 - immutable
    weight: Callable[[ClientUpdate], float] = by_examples,
    aggregation: Aggregation = Mean(),  # noqa: B008 - immutable
    moving: bool = False,
) -> S:
    """What the aggregation makes of the updates - the per-element weighted mean over the clients that hold the element
    (FlexFL Sec. III-E) - then the server's step, and what the selector learns. Failures count for nothing.

    `moving`: a pool model says how large a sub-model is, but not where in the network it lies.
    """
    aggregate = aggregation.start(state.params, state.layout, Public.of(plan, state.pool, moving=moving))
    tables = state.tables
    orders = {order.client: order for order in plan.orders}
    for outcome in outcomes:
        if isinstance(outcome, ClientUpdate):
            aggregate.add(outcome.payload, outcome.spec, weight(outcome))
            tables = learned(selection, tables, state.layout, state.pool, orders[outcome.client], outcome)
    moments, params = stepped(server, state.moments, state.params, aggregate)
    return replace(state, params=params, moments=moments, tables=tables)


def stepped(server: ServerOptimizer, moments: Params, old: Params, aggregate: Aggregate) -> tuple[Params, Params]:
    """(moments, params) after the server's step towards the aggregate; as they were where no update arrived."""
    if aggregate.empty:
        return moments, old
    if isinstance(server, Average):  # without asking which elements were trained
        return moments, aggregate.result()
    return server.step(moments, old, aggregate.result(), aggregate.trained())


def learned(
    selection: Selector, tables: Tables, layout: ParamLayout, pool: Pool, order: WorkOrder, update: ClientUpdate
) -> Tables:
    """The selector's tables after a client brought back a pool model, or another sub-model of its size."""
    sent = next(i for i, m in enumerate(pool) if m.name == order.hints["model"])
    back = index_of(pool, layout, update.spec)
    return selection.learn(tables, sent, sent if back is None else back, update.client)


# ------------------------------------------------------------------------------------------------ on the client
def local_task(training: Training, order: WorkOrder, spec: SubmodelSpec, **more: Any) -> LocalTask:
    t = training
    return LocalTask(
        spec=spec,
        optimizer=t.sgd(order.round),
        epochs=t.epochs,
        batch_size=t.batch_size,
        drop_last=t.drop_last,
        seed=order.seed,
        clip_norm=t.clip_norm,
        **more,
    )


def received(order: WorkOrder, ctx: TaskContext) -> int:
    """Index of the pool model that was sent."""
    return next(i for i, m in enumerate(ctx.pool) if m.name == order.hints["model"])


def largest_fitting(order: WorkOrder, ctx: TaskContext, among: Iterable[int], on_too_small: TooSmall) -> int:
    """Of the pool models `among` (ascending, all within what was received) the largest that needs less than what is
    free now; where none does, the smallest all the same, or a ClientError."""
    candidates = list(among)
    for i in reversed(candidates):
        if ctx.observed > 100 * ctx.pool[i].share:
            return i
    if on_too_small == "train":
        return candidates[0]
    need = 100 * ctx.pool[candidates[0]].share
    raise ClientError(f"{ctx.observed:.1f} % of the full model is free, the smallest needs {need:.1f} %")


def needs_room(ctx: TaskContext, index: int, on_too_small: TooSmall = "fail") -> None:
    """For methods that cannot prune on the device: raises ClientError where the model sent does not fit now. With
    `train`, the smallest model is trained all the same, as in methods that can."""
    need = 100 * ctx.pool[index].share
    if ctx.observed <= need and not (index == 0 and on_too_small == "train"):
        raise ClientError(f"{ctx.observed:.1f} % of the full model is free now, the model sent needs {need:.1f} %")
