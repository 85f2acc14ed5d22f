"""FedSGD (McMahan et al., AISTATS 2017, Section 2): in a round every selected client takes one gradient step on all its
samples, and the server averages the results by sample counts. That is one step of gradient descent on the data of the
selected clients, `w - lr * sum_k (n_k / n) grad F_k(w)`; with `training.fraction: 1` on all data.

It is `fedavg` with other local work: one epoch, one batch of all samples. `training.epochs`, `training.batch_size`,
`training.drop_last` and `training.sampler` are ignored, and in a single step SGD's `momentum` and `schedule` change
nothing; the rest of `training` counts. The paper's own experiments call it FedSGD with C the fraction of clients.

Departs from the paper: a client's samples go through the network at once, so that batch norm sees all of them. That
takes memory; `most_samples` bounds it, and a run with a larger client is refused before it trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count
from fl_engine.core.samplers import Shuffle
from fl_engine.core.types import RoundContext, RoundPlan


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """FedSGD: every selected client takes one gradient step on all its samples (McMahan et al., AISTATS 2017)."""

    local_work: ClassVar[str] = "one step on all of a client's samples in a round"
    """Shown in comparisons, because the section `training` describes other work."""

    most_samples: Count = 8192
    """Samples of a client at most. They go through the network at once, so this bounds the memory."""

    def __post_init__(self) -> None:
        work = replace(self.training, epochs=1, batch_size=self.most_samples, drop_last=False, sampler=Shuffle())
        object.__setattr__(self, "training", work)  # as the generated __init__ sets it

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        """Raises ConfigError if a client holds more samples than fit into one step, or the server does not know."""
        if not context.samples:
            raise ConfigError(
                "fedsgd puts all samples of a client into one step, and with partition.rule=local the server does not "
                "know whether they fit: choose fedavg, or another rule"
            )
        largest = max(context.samples, default=0)
        if largest > self.most_samples:
            raise ConfigError(
                f"algorithm.most_samples = {self.most_samples}, but client {context.samples.index(largest)} holds "
                f"{largest} samples, which FedSGD puts into one step: raise it, or choose fedavg"
            )
        return super().plan(state, context)
