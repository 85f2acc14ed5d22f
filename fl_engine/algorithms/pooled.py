"""What algorithms share whose server keeps one global model and a fixed pool of its sub-models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import ConfigDict, Field

from fl_engine import seeds
from fl_engine.averaging import Mean
from fl_engine.selection import Pick
from fl_engine.slicing import take
from fl_engine.state import constant
from fl_engine.types import SGD, ClientUpdate, Device, Outcome, ParamLayout, Params, Pool, RoundPlan, WorkOrder

STRICT = ConfigDict(extra="forbid", strict=True)
"""For `__pydantic_config__` of dataclasses that are built from a configuration."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


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
    drop_last: bool = True

    def sgd(self, round: int) -> SGD:
        return SGD(self.lr * self.lr_decay**round, self.momentum, self.weight_decay)


@dataclass(frozen=True)
class PooledState:
    """`params`: the global model, shapes as in the layout. The rest never changes in a run."""

    params: Params
    layout: ParamLayout = constant()
    fleet: tuple[Device, ...] = constant()
    pool: Pool = constant()


def order_for(state: PooledState, pick: Pick, round: int, seed: int) -> WorkOrder:
    """Sends the picked client the current weights of the picked pool model; the hint is the model's name."""
    client, level = pick
    model = state.pool[level]
    return WorkOrder(
        round=round,
        client=client,
        spec=model.spec,
        payload=take(state.params, state.layout, model.spec),
        seed=seeds.derive(seed, "client", round, client),
        hints={"model": model.name},
    )


def plan_of(state: PooledState, picks: Sequence[Pick], round: int, seed: int) -> RoundPlan:
    return RoundPlan(round, tuple(order_for(state, pick, round, seed) for pick in picks))


def merge_mean(state: PooledState, outcomes: Iterable[Outcome]) -> PooledState:
    """Per-element mean weighted by sample counts (FlexFL Sec. III-E). Failures count for nothing."""
    mean = Mean(state.params, state.layout)
    for outcome in outcomes:
        if isinstance(outcome, ClientUpdate):
            mean.add(outcome.payload, outcome.spec, outcome.num_examples)
    return replace(state, params=mean.result())
