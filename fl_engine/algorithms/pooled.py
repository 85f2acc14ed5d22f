"""The base class of algorithms whose server keeps one global model and sends sub-models of it.

`PooledAlgorithm` is FedAvg on a pool of sub-models. An algorithm overrides what differs:

- `pool`      the sub-models that the server may send
- `submodel`  the sub-model that a client is sent in a round: by default the pool model that its level names
- `task`      what a client trains of it: by default the largest pool model that fits into its free memory
- `weight`    how much an update counts in the mean: by default as the option `weighting` says
- `merge`     the new global model

`init` and `plan` may be extended too, for a state or assignments of its own. `submodel` and `task` are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from fl_engine.aggregation.privacy import Public, check_model, check_selection, check_state
from fl_engine.aggregation.rules import Aggregate, Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms.training import Training
from fl_engine.core import costs, seeds
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily, Selector, ServerContext, ServerOptimizer
from fl_engine.core.errors import ClientError, ConfigError, ModelError, kind_of
from fl_engine.core.fields import STRICT
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.state import constant
from fl_engine.core.types import (
    FULL,
    HEAD,
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
    Scaler,
    SubmodelSpec,
    Tables,
    TaskContext,
    WorkOrder,
)
from fl_engine.selection import ByCapacity, Selection
from fl_engine.selection.capacity import check_eligible, dispatched, eligible, round_size

Weighting = Literal["examples", "uniform", "model_size", "updates", "hybrid"]
TooSmall = Literal["train", "fail"]
StaticBN = bool | Literal["kept"]


@dataclass(frozen=True, kw_only=True)
class PooledState:
    """`params`: the global model, shapes as in the layout. `tables`: what the selection has learned. `moments`: of the
    server's optimizer. `layout` and `pool` never change in a run."""

    params: Params
    tables: Tables
    moments: Params
    layout: ParamLayout = constant()
    pool: Pool = constant()


@dataclass(frozen=True)
class PooledAlgorithm:
    """FedAvg on a pool of sub-models, with the options that all algorithms share.

    Default values are those of each method's paper, with three exceptions: `weighting` of HeteroFL and ScaleFL (by
    samples, as in the comparisons of FlexFL and AdaptiveFL), the options of Federated Dropout (as in FedRolex'
    comparison), and `static_bn: kept` of FedX and its rivals (ours).

    The scaler, static batch norm and the masks come from HeteroFL (Diao et al., ICLR 2021, Sec. 3). Weighting by
    updates and by size come from FedRolex (Alam et al., NeurIPS 2022; thesis Sec. 3.3.6).
    """

    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()
    moving: ClassVar[bool] = False
    """Pool models give the sizes of sub-models only: their place in the network changes from round to round."""

    training: Training = Training()
    weighting: Weighting = "examples"
    """How much a client counts in the mean: by its sample count (`examples`, FedAvg), all alike (`uniform`), by the
    kernels of what it trained (`model_size`), by its local steps (`updates`), or by the product of both (`hybrid`).
    Reported steps count up to the number that the assignment and the sample count allow. The aggregations median,
    trimmed_mean and private count all clients alike, whatever is set here."""
    static_bn: StaticBN = False
    """Before each evaluation, collect the statistics of every batch norm in one pass over the training data, for each
    level (HeteroFL), instead of taking those of the test batch or the stored ones. `kept`: only if the network
    stores statistics. No effect without batch norm."""
    scaler: bool = False
    """Divide the outputs of every convolution and hidden linear layer, in training only, by the width ratio of the
    sub-model (HeteroFL). If layers have different ratios, each is divided by its own. Refused if all sub-models have
    full width, because there is nothing to divide by; methods that have it by default then run without."""
    mask_labels: bool = False
    """The logits of classes that a client does not hold are 0 in training, those of its teachers too, and the output
    layer's rows are averaged over the clients that hold the class (HeteroFL). The task needs classes."""
    on_too_small: TooSmall = "train"
    """What a device does if it has less free memory than the smallest model that it could train needs: `train` that
    model all the same, or `fail`."""
    selection: Selection = ByCapacity()
    aggregation: Aggregation = Mean()
    server: Server = Average()

    # ------------------------------------------------------------------------------------ before the rounds
    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return the sub-models, smallest first. Here: the full model alone."""
        return (self.member(family, "full", FULL),)

    def member(
        self, family: ModelFamily, name: str, spec: SubmodelSpec, sent: bool = True, reported: bool = True, **more: Any
    ) -> PoolModel:
        """Return a pool model. `sent`: the server may send it; `reported`: it is evaluated; `more`: other fields."""
        static_bn = self.static_bn
        if static_bn == "kept":
            static_bn = any(is_statistic(name) for name in family.layout().slots)
        return pools.member(family, name, spec, dispatched=sent, reported=reported, static_bn=static_bn, **more)

    def selector(self, pool: Pool) -> Selector:
        return self.selection

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> PooledState:
        """Return the state before the first round.

        Raises:
            ConfigError: No device of the fleet may be asked, all sub-models have full width and the scaler is on, or
                the aggregation does not support the network, the selection or client states.
        """
        selection = self.selector(pool)
        check_model(self.aggregation, layout, pool)
        check_selection(self.aggregation, selection)
        check_state(self.aggregation, self)
        if self.scaler and not type(self).scaler:  # a method that has it by default runs without ratios too
            check_widths_differ(layout, pool)
        devices = check_eligible(self, fleet, pool)
        return PooledState(params=params, tables=selection.init(devices, pool), moments={}, layout=layout, pool=pool)

    # ------------------------------------------------------------------------------------ the server plans
    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        """Select clients, and send each its sub-model."""
        return self.assign(state, context, self.select(state, context))

    def select(self, state: Any, context: RoundContext) -> list[Pick]:
        """Return (client, level) of the clients that the selection picks."""
        allowed = replace(context, available=eligible(self, context.available, state.pool))
        rng = seeds.rng(context.seed, "select", context.round)
        return picked(self.selector(state.pool), state, allowed, asked(self.training, context), rng)

    def submodel(self, state: Any, context: RoundContext, client: int, level: int) -> SubmodelSpec:
        """Return the sub-model that the client is sent, of the size of pool model `level`."""
        spec: SubmodelSpec = state.pool[level].spec
        return spec

    def assign(self, state: Any, context: RoundContext, picks: Sequence[Pick]) -> RoundPlan:
        """Return the plan in which each picked client is sent its sub-model."""
        cut: dict[SubmodelSpec, Params] = {}  # clients with equal sub-models share the tensors
        orders = []
        for client, level in picks:
            spec = self.submodel(state, context, client, level)
            if spec not in cut:
                cut[spec] = take(state.params, state.layout, spec)
            orders.append(assignment(context, client, level, spec, cut[spec]))
        return RoundPlan(context.round, tuple(orders), wanted(self.training, context, len(picks)))

    # ------------------------------------------------------------------------------------ the client trains
    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        """Train the largest pool model within the received one that fits into the free memory."""
        level = self.largest_fitting(ctx, range(order.level + 1))
        return self.local_task(order, ctx.pool[level].spec)

    def local_task(self, order: WorkOrder, spec: SubmodelSpec, scaler: Scaler = "by_layer", **more: Any) -> LocalTask:
        """Return the task to train `spec` with the options of `training` in this round.

        Args:
            order: The client's assignment.
            spec: The sub-model to train, a part of the one received.
            scaler: The divisor of outputs if the option `scaler` is on: one ratio for all layers, or each layer's own.
            more: Other fields of `LocalTask`.
        """
        t = self.training
        return LocalTask(
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
            scaler=scaler if self.scaler else 1.0,
            mask_labels=self.mask_labels,
            **more,
        )

    def largest_fitting(
        self, ctx: TaskContext, levels: Iterable[int], thresholds: Sequence[float] | None = None
    ) -> int:
        """Return the largest of the pool models `levels` (ascending) that needs less than the free memory.

        If none fits, return the smallest, or raise ClientError with `on_too_small: fail`. `thresholds`: for each pool
        model, the free memory in % of the full model from which on it counts as fitting, whatever its size.
        """
        candidates = list(levels)
        needs = [100 * m.share for m in ctx.pool] if thresholds is None else thresholds
        for level in reversed(candidates):
            if ctx.observed > needs[level] or (thresholds is not None and ctx.observed == needs[level]):
                return level
        if self.on_too_small == "fail":
            raise too_small(ctx.observed, needs[candidates[0]])
        return candidates[0]

    def whole(self, order: WorkOrder, ctx: TaskContext, **more: Any) -> LocalTask:
        """Train all that was received: for methods that cannot prune on the device. `more`: as in `local_task`.

        Raises ClientError if it does not fit into the free memory, except that the smallest model is trained all the
        same with `on_too_small: train`.
        """
        if order.level != dispatched(ctx.pool)[0] or self.on_too_small == "fail":
            check_fits(ctx, order.level)
        return self.local_task(order, order.spec, **more)

    # ------------------------------------------------------------------------------------ the server merges
    def weight(self, update: ClientUpdate, state: Any, server: ServerContext) -> float:
        """Return how much an update counts in the mean, by the option `weighting`."""
        steps = 1.0
        if self.weighting in ("updates", "hybrid"):  # reported, so at most what the assignment allows
            most = costs.steps(self.training, server.samples.get(update.client, update.num_examples))
            steps = min(max(1.0, update.metrics["steps"]), most)
        return counted(self.weighting, state.layout, update.payload, update.num_examples, steps)

    def merge(self, state: Any, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext) -> Any:
        """Return the state after the round: the aggregation of the updates (by default the mean of each element over
        the clients that trained it), then the server's step. The selection learns from updates and failures.

        Raises ModelError if a weight is not positive and finite, or an update does not fit its sub-model.
        """
        public = Public.of(plan, state.pool, moving=self.moving)
        aggregate = self.aggregation.start(state.params, state.layout, public)
        selection, tables = self.selector(state.pool), state.tables
        for answer in answers:
            if isinstance(answer, ClientUpdate):
                try:
                    aggregate.add(answer.payload, answer.spec, self.weight(answer, state, server))
                except ModelError as error:
                    where = f"{type(self).__name__}.merge, round {plan.round + 1}, client {answer.client}"
                    raise ModelError(f"{where}: {error}") from error
            tables = selection.learn(tables, plan.order_of[answer.client], answer, answer.elapsed)
        moments, params = stepped(self.server, state.moments, state.params, aggregate)
        return replace(state, params=params, moments=moments, tables=tables)


# ---------------------------------------------------------------------------------------- weights of updates
def counted(weighting: Weighting, layout: ParamLayout, payload: Params, examples: int, steps: float) -> float:
    """Return the weight of a client that trained `payload` on so many samples in so many steps."""
    match weighting:
        case "examples":
            return examples
        case "uniform":
            return 1.0
        case "model_size":
            return kernels(layout, payload)
        case "updates":
            return steps
        case "hybrid":
            return kernels(layout, payload) * steps


def kernels(layout: ParamLayout, params: Params) -> int:
    """Return the output channels of all layers but the output layer; at least 1."""
    return max(1, sum(_outputs(layout, params, name) for name, tensor in params.items() if tensor.dim() > 1))


def _outputs(layout: ParamLayout, params: Params, name: str) -> int:
    """Return the output channels of a layer: the length of its bias. The outputs of an embedding are its last axis,
    because no sub-model cuts its words."""
    axes = layout.slots[name].axes
    if HEAD in (axes[0].group, axes[-1].group):
        return 0
    if (bias := params.get(f"{name.removesuffix('weight')}bias")) is not None:
        return bias.numel()
    return params[name].shape[0 if axes[0].group is not None else -1]


# ------------------------------------------------------------------------------------------------ functions
def check_widths_differ(layout: ParamLayout, pool: Pool) -> None:
    """Raise ConfigError if all sub-models that are sent have full width."""
    sent = [m for m in pool if m.dispatched]
    if all(layout.width(m.spec, group) == n for m in sent for group, n in layout.groups.items()):
        raise ConfigError(
            f"algorithm.scaler divides by width ratios, but {', '.join(m.name for m in sent)} have full width: set "
            "algorithm.scaler=false"
        )


def picked(
    selector: Selector, state: PooledState, context: RoundContext, count: int, rng: np.random.Generator
) -> list[Pick]:
    """Return what the selection picks. Raises ModelError unless that is a list of clients with levels of the pool."""
    picks, gave = selector.pick(state.tables, context, count, rng), f"{type(selector).__name__}.pick gave"
    if not isinstance(picks, Sequence):
        raise ModelError(f"{gave} {kind_of(picks)}, where a list of (client, level) is expected")
    for pick in picks:
        if not (isinstance(pick, tuple) and len(pick) == 2 and pick[1] in range(len(state.pool))):
            raise ModelError(
                f"{gave} {pick!r}, where (client, level) is expected, the level of 0 to {len(state.pool) - 1}"
            )
    return list(picks)


def asked(training: Training, context: RoundContext) -> int:
    """Return how many clients are asked in the round."""
    count = round_size(training.fraction * context.over_provision, len(context.fleet))
    return count if context.slots is None else min(count, context.slots)


def wanted(training: Training, context: RoundContext, picked: int) -> int:
    """Return how many updates of the `picked` clients are merged."""
    return min(picked, round_size(training.fraction, len(context.fleet)))


def assignment(context: RoundContext, client: int, level: int, spec: SubmodelSpec, payload: Params) -> WorkOrder:
    """Return the assignment that sends the client `payload`, the weights of `spec`."""
    seed = seeds.derive(context.seed, "client", context.round, client)
    return WorkOrder(context.round, client, spec, payload, seed, level)


def stepped(server: ServerOptimizer, moments: Params, old: Params, aggregate: Aggregate) -> tuple[Params, Params]:
    """Return (moments, params) after the server's step towards the aggregate; unchanged if no update arrived."""
    if aggregate.empty:
        return moments, old
    if type(server) is Average:  # needs no mask of trained elements, which costs time
        return moments, aggregate.result()
    return server.step(moments, old, aggregate.result(), aggregate.trained())


def check_fits(ctx: TaskContext, level: int) -> None:
    """Raise ClientError unless pool model `level` fits into the free memory."""
    need = 100 * ctx.pool[level].share
    if ctx.observed <= need:
        raise too_small(ctx.observed, need)


def too_small(free: float, need: float) -> ClientError:
    return ClientError(f"it has memory for {free:.6g} % of the model and needs more than {need:.6g} %")
