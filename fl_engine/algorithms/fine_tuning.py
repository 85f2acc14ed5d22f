"""The server trains the aggregate on its own data before the next round: FedX (Lai et al., section III-B),
Algorithm 1, line 13, and Eq. 5:

    theta^{t+1} = argmin L(theta, D_S) + gamma * ||theta - G||_2        G: the aggregate of the round

Departs from the paper, or chooses between two statements of it:

- Eq. 5 prints the norm without a square, while the proof (section III-D) has the gradient gamma * (theta - G), which is
  that of gamma/2 * ||theta - G||^2. `norm: squared` is the proof's; `printed` is the equation's, whose gradient
  gamma * (theta - G) / ||theta - G|| is 0 here at theta = G, where the norm has none.
- Algorithm 1 starts at G (`start: aggregate`), so the regulariser is 0 in the first step; the proof takes its single
  step from theta^{t-1}, the weights before the round (`start: previous`).
- The number of steps is not given: here it is `epochs` over the server's data.

The norm is over all weights together. Running statistics of batch norm are not weights: they start where the weights
start, and move as in any training.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from fl_engine.aggregation import privacy
from fl_engine.aggregation.rules import Aggregation
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core import seeds
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT, Count, NotNegative, Positive
from fl_engine.core.types import FULL, SGD, LocalTask, Params, RoundPlan

log = logging.getLogger("flexfleet")

S = TypeVar("S", bound=PooledState)


@dataclass(frozen=True)
class FineTuning:
    """SGD without momentum; a last batch that is not full is used too."""

    __pydantic_config__ = STRICT

    epochs: Count = 1
    """Epochs over the server's data, after every round."""
    batch_size: Count = 32
    """Samples per batch."""
    lr: Positive = 0.01
    """Learning rate of the server's SGD."""
    gamma: NotNegative = 1e-4
    """Weight of the regulariser; 0 is fine-tuning without it."""
    norm: Literal["squared", "printed"] = "squared"
    """squared: gamma/2 * ||theta - G||^2, as in FedX's proof; printed: gamma * ||theta - G||, as in its Eq. 5."""
    start: Literal["aggregate", "previous"] = "aggregate"
    """The weights that training starts from: this round's aggregate G, or those before the round."""


def check_tuning(tuning: FineTuning | None, server: ServerContext) -> None:
    """Raise ConfigError if the server is to fine-tune and holds no data."""
    if tuning is not None:
        _ = server.data


def fine_tuned(tuning: FineTuning, server: ServerContext, aggregate: Params, previous: Params, seed: int) -> Params:
    """Return the weights of the whole network after fine-tuning.

    Args:
        tuning: The options.
        server: Trains on its data.
        aggregate: G of the equation, weights of the whole network.
        previous: The weights before the round.
        seed: The order of the samples and dropout follow from it, so it must differ between rounds.

    Raises:
        ConfigError: The server has no data.
        ModelError: Training diverges.
    """
    task = LocalTask(
        FULL,
        SGD(tuning.lr),
        tuning.epochs,
        tuning.batch_size,
        drop_last=False,
        seed=seed,
        proximal=tuning.gamma,
        proximal_squared=tuning.norm == "squared",
    )
    return server.train(task, aggregate if tuning.start == "aggregate" else previous, anchor=aggregate)


def tuned(
    tuning: FineTuning | None, aggregation: Aggregation, before: S, merged: S, plan: RoundPlan, server: ServerContext
) -> S:
    """Return the state after fine-tuning the merged model.

    The merged state is returned unchanged without `tuning`, if no client trained, and if fine-tuning diverges, because
    no update may end the run.
    """
    if tuning is None or merged.params is before.params:
        return merged
    seed = seeds.derive(privacy.server_seed(aggregation, plan), "fine-tuning", plan.round)
    try:
        return replace(merged, params=fine_tuned(tuning, server, merged.params, before.params, seed))
    except ModelError as error:
        log.warning("round %d: not fine-tuned: %s", plan.round + 1, error)
        return merged
