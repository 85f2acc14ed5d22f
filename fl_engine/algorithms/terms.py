"""The terms of local training, merging and scoring that algorithms of sub-models have in common. In a comparison they
should be equal, so they are the same four options of every algorithm here; defaults are those of each method's paper,
but for the `weighting` of HeteroFL and ScaleFL (by samples, as in FlexFL's and AdaptiveFL's comparisons), Federated
Dropout's (those of FedRolex's comparison), and `static_bn: kept` of FedX and its rivals (ours).

An algorithm has them by naming `Terms` as its base, which holds these fields and nothing else, and obeys them by what
stands below: `static_bn` in its `pool`, `local_task` in its `task`, `merge` or `weight_of` in its `merge`, and
`some_narrower` in its `pool` where all sub-models may have the full width.

The scaler, static batch norm and the masks are HeteroFL's additions (Diao et al., ICLR 2021, Sec. 3); weighting by
updates and by size are FedRolex' (Alam et al., NeurIPS 2022; thesis Sec. 3.3.6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from fl_engine.algorithms import pooled
from fl_engine.algorithms.pooled import PooledState, TooSmall
from fl_engine.algorithms.training import Training
from fl_engine.core import costs
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import (
    HEAD,
    ClientUpdate,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    RoundPlan,
    Scaler,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)

Weighting = Literal["examples", "uniform", "model_size", "updates", "hybrid"]
StaticBN = bool | Literal["kept"]

S = TypeVar("S", bound=PooledState)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Options of every algorithm that trains sub-models."""

    weighting: Weighting = "examples"
    """How much a client counts in the mean: by its sample count (`examples`, FedAvg), all alike (`uniform`), by the
    kernels of what it trained (`model_size`), by its local steps (`updates`), or by the product of both (`hybrid`). A
    client that reports more steps than its order and its sample count give is counted with the steps that they give.
    The aggregations median, trimmed_mean and private count all clients alike, whatever is set here."""
    static_bn: StaticBN = False
    """Before each evaluation, collect the statistics of every batch norm in one pass over the training data, for each
    level (HeteroFL), instead of taking those of the test batch or the stored ones. `kept`: only where the network
    stores some. Without batch norm it changes nothing."""
    scaler: bool = False
    """Divide what every convolution and hidden linear layer puts out, in training only, by the width ratio of the
    sub-model (HeteroFL); where layers have different ratios, each by its own. Sub-models of full width have nothing to
    divide by: where all are, it is refused, but for methods that have it by default."""
    mask_labels: bool = False
    """The logits of classes that a client does not hold are 0 in training, those of its teachers too, and the output
    layer's rows are averaged over the clients that hold the class (HeteroFL). The task needs classes."""


class OnTerms(Protocol):
    """What the functions below ask of an algorithm."""

    @property
    def training(self) -> Training: ...
    @property
    def weighting(self) -> Weighting: ...
    @property
    def static_bn(self) -> StaticBN: ...
    @property
    def scaler(self) -> bool: ...
    @property
    def mask_labels(self) -> bool: ...


class MergesOnTerms(OnTerms, pooled.PooledMethod, Protocol):
    pass


class TrainsWhatItIsSent(OnTerms, Protocol):
    @property
    def on_too_small(self) -> TooSmall: ...


# ------------------------------------------------------------------------------------------------- in the pool
def static_bn(method: OnTerms, family: ModelFamily) -> bool:
    """Whether statistics are collected for the levels of this network."""
    if method.static_bn == "kept":
        return any(is_statistic(name) for name in family.layout().slots)
    return method.static_bn


def some_narrower(method: OnTerms, family: ModelFamily, pool: Pool) -> Pool:
    """The pool. Raises ConfigError where the scaler is on and all that devices are sent has the full width."""
    groups, sent = family.layout().groups, [m for m in pool if m.dispatched]
    if method.scaler and all(family.layout().width(m.spec, group) == n for m in sent for group, n in groups.items()):
        raise ConfigError(
            f"algorithm.scaler: {', '.join(m.name for m in sent)}: all that devices train has the full width, so that "
            "there is no width ratio to divide by; set algorithm.scaler=false"
        )
    return pool


# ----------------------------------------------------------------------------------------------- on the client
def local_task(
    method: OnTerms, order: WorkOrder, spec: SubmodelSpec, scaler: Scaler = "by_layer", **more: Any
) -> LocalTask:
    """`pooled.local_task` on the method's terms. `scaler`: what outputs are divided by, where it is on: one ratio for
    all layers, or each layer's own."""
    divisor = scaler if method.scaler else 1.0
    return pooled.local_task(method.training, order, spec, scaler=divisor, mask_labels=method.mask_labels, **more)


def task(method: TrainsWhatItIsSent, order: WorkOrder, ctx: TaskContext) -> LocalTask:
    """Trains the pool model that was sent. Raises ClientError where it does not fit now (`pooled.needs_room`)."""
    pooled.needs_room(ctx, order.level, method.on_too_small)
    return local_task(method, order, ctx.pool[order.level].spec)


# ----------------------------------------------------------------------------------------------- on the server
def weight_of(method: OnTerms, layout: ParamLayout, server: ServerContext) -> Callable[[ClientUpdate], float]:
    """How much an update counts."""

    def steps(update: ClientUpdate) -> float:
        """The client's reported steps, from 1 to what its order and samples give."""
        most = costs.steps(method.training, server.samples.get(update.client, update.num_examples))
        return min(max(1.0, update.metrics["steps"]), most)

    def weight(update: ClientUpdate) -> float:
        taken = steps(update) if method.weighting in ("updates", "hybrid") else 1.0
        return counted(method.weighting, layout, update.payload, update.num_examples, taken)

    return weight


def counted(weighting: Weighting, layout: ParamLayout, payload: Params, examples: int, steps: float) -> float:
    """The weight of a client that trained `payload` on so many samples in so many steps."""
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


def expected_weights(
    method: OnTerms, layout: ParamLayout, orders: Sequence[WorkOrder], samples: Sequence[int]
) -> list[float]:
    """The weights of these orders' updates if clients train all that they are sent. `samples`: by client number."""
    held = [samples[order.client] for order in orders]
    return [
        float(counted(method.weighting, layout, order.payload, n, costs.steps(method.training, n)))
        for order, n in zip(orders, held, strict=True)
    ]


def kernels(layout: ParamLayout, params: Params) -> int:
    """Output channels over all layers, the output layer's left out; at least 1, where there is no other layer."""
    return max(1, sum(_outputs(layout, params, name) for name, tensor in params.items() if tensor.dim() > 1))


def _outputs(layout: ParamLayout, params: Params, name: str) -> int:
    """Output channels of a layer. Its bias has one number for each; of an embedding they are the last axis, since no
    sub-model cuts its words."""
    axes = layout.slots[name].axes
    if HEAD in (axes[0].group, axes[-1].group):
        return 0
    if (bias := params.get(f"{name.removesuffix('weight')}bias")) is not None:
        return bias.numel()
    return params[name].shape[0 if axes[0].group is not None else -1]


def merge(
    method: MergesOnTerms,
    state: S,
    plan: RoundPlan,
    answers: Iterable[Outcome],
    server: ServerContext,
    moving: bool = False,
) -> S:
    """`pooled.merge` by the method's weighting."""
    weight = weight_of(method, state.layout, server)
    return pooled.merge(method, state, plan, answers, server, weight, moving)
