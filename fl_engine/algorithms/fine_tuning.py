"""The server trains the aggregate on its own data before the next round: FedX (Lai et al., section III-B),
Algorithm 1, line 13, and Eq. 5:

    theta^{t+1} = argmin L(theta, D_S) + gamma * ||theta - G||_2        G: the aggregate of the round

Departs from the paper, or reads it where it says two things:

- Eq. 5 prints the norm without a square, while the proof (section III-D) has the gradient gamma * (theta - G), which is
  that of gamma/2 * ||theta - G||^2. `norm: squared` is the proof's; `printed` is the equation's, whose gradient
  gamma * (theta - G) / ||theta - G|| is 0 here at theta = G, where the norm has none.
- Algorithm 1 starts at G (`start: aggregate`), so the regulariser is 0 in the first step; the proof takes its single
  step from theta^{t-1}, the weights before the round (`start: previous`).
- The number of steps is not given: here it is `epochs` over the server's data.

The norm is over all weights together. Running statistics of batch norm are no weights: they start where the weights
start, and move as in any training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_engine.core.contracts import ServerContext
from fl_engine.core.fields import STRICT, Count, NotNegative, Positive
from fl_engine.core.types import FULL, SGD, LocalTask, Params


@dataclass(frozen=True)
class FineTuning:
    """SGD without momentum; a last batch that is not full is used too."""

    __pydantic_config__ = STRICT

    epochs: Count = 1
    """Over the server's data, after every round."""
    batch_size: Count = 32
    """Samples."""
    lr: Positive = 0.01
    """Learning rate of the server's SGD."""
    gamma: NotNegative = 1e-4
    """Weight of the regulariser; 0 is fine-tuning without it."""
    norm: Literal["squared", "printed"] = "squared"
    """squared: gamma/2 * ||theta - G||^2, as in FedX's proof; printed: gamma * ||theta - G||, as in its Eq. 5."""
    start: Literal["aggregate", "previous"] = "aggregate"
    """The weights that training starts from: this round's aggregate G, or those before the round."""


def fine_tuned(tuning: FineTuning, server: ServerContext, aggregate: Params, previous: Params, seed: int) -> Params:
    """The weights of the whole network after fine-tuning. `aggregate` is G, `previous` the weights before the round,
    both of the whole network. The order of the samples, and dropout, follow from `seed`: give another in each round.

    Raises ConfigError where the server has no data, ModelError where training diverges.
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
