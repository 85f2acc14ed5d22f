"""Base class of algorithms in which the server sends sub-models of one global model to the clients.

`PooledAlgorithm` is FedAvg on a pool of sub-models. Other algorithms override some of these methods:

- `pool` returns the sub-models that the server may send.
- `check` raises an error if the options do not fit the fleet or the server.
- `first_state` returns a state with additional fields.
- `submodel` returns the sub-model that a client receives in a round, by default the pool model of the assigned level.
- `task` returns the client's training task, by default for the largest pool model that fits into the free memory.
- `weight` returns the weight of an update in the mean, by default according to the option `weighting`.
- `plan` returns the assignments of a round.
- `merge` returns the state with the new global model.

`submodel` and `task` must be pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from fl_engine.aggregation import Aggregation
from fl_engine.aggregation.privacy import Public, check_start
from fl_engine.aggregation.rules import Aggregate, DropsUpdates, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms.training import Training
from fl_engine.core import costs, seeds
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily, Selector, ServerContext, ServerOptimizer
from fl_engine.core.errors import ClientError, ConfigError, ModelError
from fl_engine.core.fields import Options
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.state import constant
from fl_engine.core.types import (
    FULL,
    HEAD,
    Assignment,
    ClientUpdate,
    Codecs,
    Device,
    LocalTask,
    ParamLayout,
    Params,
    Pick,
    Pool,
    PoolModel,
    Prepared,
    Results,
    RoundContext,
    RoundPlan,
    Scaler,
    SubmodelSpec,
    Tables,
    TaskContext,
)
from fl_engine.selection import ByCapacity, Selection
from fl_engine.selection.capacity import check_eligible, dispatched, eligible, round_size

Weighting = Literal["examples", "uniform", "model_size", "updates", "hybrid"]
StaticBN = bool | Literal["kept"]


@dataclass(frozen=True, kw_only=True)
class PooledState:
    """`params` is the global model. `tables` contains the values that the selection learned. `moments` is the state of
    the server's optimizer. `layout` and `pool` are constant during a run."""

    params: Params
    tables: Tables
    moments: Params
    layout: ParamLayout = constant()
    pool: Pool = constant()


@dataclass(frozen=True)
class PooledAlgorithm(Options):
    """FedAvg on a pool of sub-models, with the options that all algorithms share.

    The default options of each method are from its paper, with three exceptions. HeteroFL and ScaleFL weight updates by
    samples, as in FlexFL's and AdaptiveFL's comparisons. Federated Dropout uses the options in FedRolex's comparison.
    FedX and the methods in FedX's comparison use `static_bn: kept`, which is flexfleet's choice.

    The scaler, static batch norm and the label masks are from HeteroFL (Diao et al., ICLR 2021, Sec. 3). The weightings
    by updates and by size are from FedRolex (Alam et al., NeurIPS 2022; thesis Sec. 3.3.6).
    """

    preparations: ClassVar[tuple[str, ...]] = ()
    moving: ClassVar[bool] = False
    """True if pool models determine only the sizes of sub-models, and the channels change in every round."""
    draw_matters: ClassVar[str] = ""
    """Reason why a selected client influences other clients' assignments, or an empty string. If there is a reason,
    secret selection is rejected, because replacing a client may change a private sum by more than 2 * clip."""

    training: Training = Training()
    weighting: Weighting = "examples"
    """Weight of a client in the mean. examples: its number of samples (FedAvg); uniform: 1; model_size: its number of
    trained kernels; updates: its number of local steps; hybrid: kernels times steps. Other aggregations ignore it."""
    static_bn: StaticBN = False
    """Before each evaluation, collect the batch norm statistics of each level in one pass over the training data
    (HeteroFL). false: use statistics of the test batch or stored statistics. `kept`: collect only if the network stores
    statistics."""
    scaler: bool = False
    """In training, divide the outputs of every convolution and hidden linear layer by the sub-model's width ratio, or
    by the layer's ratio if layers differ (HeteroFL). The scaler is not allowed if all sub-models have full width."""
    mask_labels: bool = False
    """In training, set the logits of classes without samples on the client to 0, in the model and in its teachers. Each
    row of the output layer is averaged over the clients with samples of its class (HeteroFL). Tasks without classes
    ignore the option."""
    on_too_small: Literal["train", "fail"] = "train"
    """A device with less free memory than the smallest model needs can `train` this model nevertheless, or `fail`."""
    selection: Selection = ByCapacity()
    aggregation: Aggregation = Mean()
    server: Server = Average()

    # ------------------------------------------------------------------------------------ before the rounds
    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return the sub-models in ascending order of size, by default only the full model."""
        return (self.member(family, "full", FULL),)

    def member(
        self, family: ModelFamily, name: str, spec: SubmodelSpec, sent: bool = True, reported: bool = True, **more: Any
    ) -> PoolModel:
        """Return a pool model. Clients may receive the model if `sent` is true, and the server evaluates it if
        `reported` is true. `more` contains further fields of `PoolModel`."""
        static_bn = self.static_bn
        if static_bn == "kept":
            static_bn = any(is_statistic(name) for name in family.layout().slots)
        return pools.member(family, name, spec, dispatched=sent, reported=reported, static_bn=static_bn, **more)

    def selector(self, pool: Pool) -> Selector:
        return self.selection

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> Any:
        """Return the state before the first round.

        Raises:
            ConfigError: No device of the fleet can be selected, the scaler is on although all sub-models have full
                width, or the aggregation does not support the network, the selection or client states.
        """
        self.check(fleet, pool, server)
        selection = self.selector(pool)
        check_start(self, selection, layout, pool)
        if isinstance(self.aggregation, DropsUpdates):
            self.aggregation.check(self, server)
        sent = [m for m in pool if m.dispatched]
        full = all(layout.width(m.spec, group) == n for m in sent for group, n in layout.groups.items())
        if self.scaler and not type(self).scaler and full:  # Do not reject a scaler that is on by default.
            raise ConfigError.at("algorithm.scaler must be false, because all sub-models have full width")
        tables = selection.init(check_eligible(self, fleet, pool), pool)
        return self.first_state(PooledState(params=params, tables=tables, moments={}, layout=layout, pool=pool))

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        """Raise ConfigError if the options do not fit the fleet or the server."""

    def first_state(self, common: PooledState) -> Any:
        """Return the state before the first round. `common` contains the fields that all algorithms share."""
        return common

    # ------------------------------------------------------------------------------------ the server plans
    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        """Select clients and assign a sub-model to each selected client."""
        return self.assign(state, context, self.select(state, context))

    def select(self, state: Any, context: RoundContext, purpose: str = "select") -> list[Pick]:
        """Select clients, and return their pairs (client, level). Each `purpose` has a separate random stream.

        Clients in `context.without` are drawn like all others, and replaced afterwards. Therefore the selection is the
        same with and without these clients until one of them is drawn. Keyed draws then select as if these clients
        were not available.
        """
        allowed = replace(context, available=eligible(self, context.available, state.pool))
        count = round_size(self.training.fraction * context.over_provision, len(context.fleet))
        count = count if context.slots is None else min(count, context.slots)
        rng = seeds.rng(context.seed, purpose, context.round)
        selector = self.selector(state.pool)
        picks = selector.pick(state.tables, allowed, count, rng)
        kept = [pick for pick in picks if pick[0] not in context.without]
        if len(kept) < len(picks):
            if getattr(selector, "draws", None) == "keyed":  # equal numbers replace only the clients to leave out
                kept, rng = [], seeds.rng(context.seed, purpose, context.round)
            drawn = {client for client, _ in kept} | context.without
            rest = replace(allowed, available=tuple(d for d in allowed.available if d.client not in drawn))
            if rest.available:
                kept = sorted(kept + selector.pick(state.tables, rest, len(picks) - len(kept), rng))
        return kept

    def check_samples(self, context: RoundContext) -> None:
        """Raise ConfigError if the server does not know the clients' sample counts."""
        if not context.samples:
            raise ConfigError.at(
                f"partition.rule must not be local, because {type(self).__name__} requires the clients' sample counts"
            )

    def enough(self, context: RoundContext, picks: Sequence[Pick]) -> int:
        """Return the maximum number of updates that the round merges."""
        return min(len(picks), round_size(self.training.fraction, len(context.fleet)))

    def submodel(self, state: Any, context: RoundContext, client: int, level: int) -> SubmodelSpec:
        """Return the client's sub-model, which has the size of pool model `level`."""
        spec: SubmodelSpec = state.pool[level].spec
        return spec

    def assign(self, state: Any, context: RoundContext, picks: Sequence[Pick]) -> RoundPlan:
        """Return a plan in which each selected client receives a sub-model."""
        cut: dict[SubmodelSpec, Params] = {}  # Clients with the same sub-model share its tensors.
        assignments = []
        for client, level in picks:
            spec = self.submodel(state, context, client, level)
            if spec not in cut:
                cut[spec] = take(state.params, state.layout, spec)
            seed = seeds.derive(context.seed, "client", context.round, client)
            assignments.append(Assignment(context.round, client, spec, cut[spec], seed, level))
        return RoundPlan(context.round, tuple(assignments), self.enough(context, picks))

    # ------------------------------------------------------------------------------------ the client trains
    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        """Return a task for the largest pool model that fits into memory and does not exceed the received model."""
        level = self.largest_fitting(ctx, range(assignment.level + 1))
        return self.local_task(assignment, ctx.pool[level].spec)

    def local_task(
        self, assignment: Assignment, spec: SubmodelSpec, scaler: Scaler = "by_layer", **more: Any
    ) -> LocalTask:
        """Return a task that trains `spec`, a part of the received sub-model, with the options of `training`. If the
        option `scaler` is on, layer outputs are divided by the argument `scaler`. `more` sets other `LocalTask`
        fields."""
        t = self.training
        return LocalTask(
            spec=spec,
            optimizer=t.optimizer_in(assignment.round),
            epochs=t.epochs,
            batch_size=t.batch_size,
            drop_last=t.drop_last,
            seed=assignment.seed,
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
        """Return the largest level in `levels` (ascending) whose pool model needs less than the free memory.

        If no model fits, return the smallest level, or raise ClientError if `on_too_small` is `fail`. With
        `thresholds`, a model fits if the free memory in % of the full model is at least the model's threshold.
        """
        candidates = list(levels)
        needs = [100 * m.share for m in ctx.pool] if thresholds is None else thresholds
        for level in reversed(candidates):
            if ctx.observed > needs[level] or (thresholds is not None and ctx.observed == needs[level]):
                return level
        if self.on_too_small == "fail":
            raise too_small(ctx.observed, needs[candidates[0]])
        return candidates[0]

    def whole(self, assignment: Assignment, ctx: TaskContext, **more: Any) -> LocalTask:
        """Return a task that trains the whole received model, for methods that cannot prune on the device.

        Raises ClientError if the model does not fit into the free memory. With `on_too_small: train`, the smallest
        model is trained regardless of the free memory.
        """
        if assignment.level != dispatched(ctx.pool)[0] or self.on_too_small == "fail":
            check_fits(ctx, assignment.level)
        return self.local_task(assignment, assignment.spec, **more)

    # ------------------------------------------------------------------------------------ the server merges
    def weight(self, update: ClientUpdate, state: Any, server: ServerContext) -> float:
        """Return the weight of an update in the mean according to the option `weighting`."""
        steps = 1.0
        if self.weighting in ("updates", "hybrid"):  # Limit the steps, because a client may report too many.
            most = costs.steps(self.training, server.samples.get(update.client, update.num_examples))
            steps = min(max(1.0, update.metrics["steps"]), most)
        return weight_of(self.weighting, state.layout, update.payload, update.num_examples, steps)

    def reference(self, server: ServerContext, round: int, spec: SubmodelSpec, params: Params, most: int) -> Params:
        """Return `params`, the weights of `spec`, after the training of a client on at most `most` samples of the
        server. Raises Diverged if training diverges."""
        seed = seeds.derive(0, "reference", round)
        task = self.local_task(Assignment(round, -1, spec, {}, seed, 0), spec)
        return server.train_on_sample(task, params, most)

    def merge(self, state: Any, plan: RoundPlan, results: Results, server: ServerContext) -> Any:
        """Aggregate the updates, apply the server's optimizer and return the new state. The selection learns from
        updates and failures. By default, each parameter is averaged over the clients that trained it.

        Raises ModelError if a weight is not positive and finite, or if an update does not match its sub-model.
        """
        reference = partial(self.reference, server, plan.round)
        public = Public.of(plan, state.pool, moving=self.moving, reference=reference)
        aggregate = self.aggregation.start(state.params, state.layout, public)
        selection, tables = self.selector(state.pool), state.tables
        for result in results:
            if isinstance(result, ClientUpdate):
                try:
                    aggregate.add(result.payload, result.spec, self.weight(result, state, server))
                except (ConfigError, ModelError) as error:
                    where = f"{type(self).__name__}.merge, round {plan.round + 1}, client {result.client}"
                    raise ModelError(f"{where}: {error}", code=error.code) from error
            tables = selection.learn(tables, plan.assignment_of[result.client], result, result.elapsed)
        moments, params = stepped(self.server, state.moments, state.params, aggregate)
        return replace(state, params=params, moments=moments, tables=tables)


# ------------------------------------------------------------------------------------------------ functions
def weight_of(weighting: Weighting, layout: ParamLayout, payload: Params, examples: int, steps: float) -> float:
    """Return the weight of a client that trained `payload` on `examples` samples in `steps` steps."""
    size = kernels(layout, payload) if weighting in ("model_size", "hybrid") else 1
    return {"examples": examples, "uniform": 1.0, "model_size": size, "updates": steps, "hybrid": size * steps}[
        weighting
    ]


def kernels(layout: ParamLayout, params: Params) -> int:
    """Return the total number of output channels of all layers except the output layer; at least 1.

    The bias of a layer has one entry for each output channel. For an embedding, the output channels are on the last
    axis, because sub-models never cut the vocabulary.
    """
    total = 0
    for name, tensor in params.items():
        if tensor.dim() < 2:
            continue
        axes, bias = layout.slots[name].axes, params.get(f"{name.removesuffix('weight')}bias")
        if HEAD not in (axes[0].group, axes[-1].group):
            channels = tensor.shape[0 if axes[0].group is not None else -1]
            total += channels if bias is None else bias.numel()
    return max(1, total)


def scaled_change(update: ClientUpdate, state: Any, factor: float) -> ClientUpdate:
    """Return the update with its weight change multiplied by `factor`. Running statistics do not change."""
    old = take(state.params, state.layout, update.spec)
    payload = {
        name: tensor if is_statistic(name) else old[name] + factor * (tensor - old[name])
        for name, tensor in update.payload.items()
    }
    return replace(update, payload=payload)


def with_codecs(plan: RoundPlan, codecs: Iterable[Codecs | None]) -> RoundPlan:
    """Return a copy of the plan in which assignment i uses `codecs[i]`."""
    pairs = zip(plan.assignments, codecs, strict=True)
    return replace(plan, assignments=tuple(replace(assignment, codecs=each) for assignment, each in pairs))


def stepped(server: ServerOptimizer, moments: Params, old: Params, aggregate: Aggregate) -> tuple[Params, Params]:
    """Return the moments and weights after the server optimizer's step, or unchanged if there are no updates."""
    if aggregate.empty:
        return moments, old
    if type(server) is Average:  # Skip `aggregate.trained()`, which is slow and not needed here.
        return moments, aggregate.result()
    return server.step(moments, old, aggregate.result(), aggregate.trained())


def check_fits(ctx: TaskContext, level: int) -> None:
    """Raise ClientError if pool model `level` does not fit into the free memory."""
    need = 100 * ctx.pool[level].share
    if ctx.observed <= need:
        raise too_small(ctx.observed, need)


def too_small(free: float, need: float) -> ClientError:
    return ClientError(f"the device has memory for {free:.6g} % of the model, but more than {need:.6g} % is required")
