"""Fine-tuning of the merged model on the server's data before the next round: FedX (Lai et al., arXiv:2504.12849,
section III-B; Algorithm 1, line 13; Eq. 5).

    theta^{t+1} = argmin L(theta, D_S) + gamma * ||theta - G||_2        G: the aggregate of the round

Departs from the paper, or follows one of two contradictory statements in the paper:

- Eq. 5 contains the norm without a square, but the gradient of this norm is not defined at theta = G. Here, as in the
  proof (section III-D), the term is gamma/2 * ||theta - G||^2 with the gradient gamma * (theta - G).
- Training starts at G, as in Algorithm 1, so the regulariser is 0 in the first step. In the proof, training consists of
  a single step that starts at theta^{t-1}, the weights before the round.
- The paper does not state the number of steps. Here the server trains for `epochs` epochs over its data.

The norm is computed over all weights together. Running statistics of batch norm are not part of the norm.

Theorem 1 (section III-D) requires the learning rate Q / (G sqrt(t)) in step t. Q bounds the L2 norm of the weights. G
is the Lipschitz constant of the loss and bounds the norm of its gradient. Both are unknown for a neural network, so
`lr` replaces Q / G. The proof has one step per round, so t is the number of the round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fl_engine.aggregation import privacy
from fl_engine.algorithms.pooled import PooledAlgorithm, StaticBN
from fl_engine.core import seeds
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ModelError
from fl_engine.core.fields import Count, NotNegative, Options, Positive
from fl_engine.core.types import (
    FULL,
    SGD,
    Assignment,
    Device,
    LocalTask,
    Pool,
    Results,
    RoundPlan,
    SubmodelSpec,
    TaskContext,
)
from fl_engine.preparation.supernet import sandwich

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class FineTuning(Options):
    """Options of the server's training, which uses SGD without momentum. The last batch of an epoch may be smaller."""

    epochs: Count = 1
    """Number of epochs over the server's data after every round."""
    batch_size: Count = 32
    """Samples per batch."""
    lr: Positive = 0.01
    """Learning rate of the server's SGD."""
    lr_schedule: Literal["constant", "inverse_sqrt"] = "constant"
    """constant: `lr` in all rounds; inverse_sqrt: `lr` / sqrt(t) in round t = 1, 2, ... (Theorem 1)."""
    gamma: NotNegative = 1e-4
    """Weight of the regulariser; 0: no regulariser."""
    sub_networks: bool = False
    """True: each step also trains the smallest and a random sub-network, as in the first training. If the server has
    other classes than the devices, the sub-networks forget the devices' classes."""

    def task(self, seed: int, round: int = 0, smaller: Sequence[SubmodelSpec] = ()) -> LocalTask:
        """Return a task that trains the whole network, and the sub-networks `smaller` if `sub_networks` is set.

        Args:
            seed: Determines the sample order, the dropout masks and the random sub-networks.
            round: Number of the round, counted from 0.
            smaller: Sub-networks in ascending order of size.
        """
        lr = self.lr / math.sqrt(round + 1) if self.lr_schedule == "inverse_sqrt" else self.lr
        task = LocalTask(FULL, SGD(lr), self.epochs, self.batch_size, drop_last=False, seed=seed, proximal=self.gamma)
        return sandwich(task, smaller) if self.sub_networks else task


@dataclass(frozen=True)
class FineTuned(PooledAlgorithm):
    """Base class of FedX and of the methods in FedX's comparison. Devices train the received sub-network. Then the
    server may train the whole network."""

    bucket: Count | None = 512
    """Number of consecutive elements with a common norm in QSGD; null: one norm per tensor."""
    fine_tuning: FineTuning | None = None
    """Options of the server's training after each merge; null: no training. FedX's comparison uses {gamma: 0}."""
    static_bn: StaticBN = "kept"

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        """Raise ConfigError if `fine_tuning` is set but the server does not have data."""
        if self.fine_tuning is not None:
            _ = server.data

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        return self.whole(assignment, ctx)

    def merge(self, state: Any, plan: RoundPlan, results: Results, server: ServerContext) -> Any:
        return self.tuned(state, self.aggregated(state, plan, results, server), plan, server)

    def aggregated(self, state: Any, plan: RoundPlan, results: Results, server: ServerContext) -> Any:
        """Return the state after the merge, before the server's fine-tuning."""
        return super().merge(state, plan, results, server)

    def tuned(self, before: Any, merged: Any, plan: RoundPlan, server: ServerContext) -> Any:
        """Return the state after fine-tuning the merged model. Return `merged` if `fine_tuning` is None, if no client
        trained or if fine-tuning diverges."""
        if self.fine_tuning is None or merged.params is before.params:
            return merged
        seed = seeds.derive(privacy.server_seed(self.aggregation, plan), "fine-tuning", plan.round)
        smaller = [model.spec for model in before.pool if model.spec != FULL]
        try:
            task = self.fine_tuning.task(seed, plan.round, smaller)
            return replace(merged, params=server.train(task, merged.params))
        except ModelError as error:
            log.warning("round %d: the model was not fine-tuned: %s", plan.round + 1, error)
            return merged
