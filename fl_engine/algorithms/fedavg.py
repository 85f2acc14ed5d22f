"""FedAvg on the full model (McMahan et al., AISTATS 2017, Algorithm 1; arXiv:1602.05629), and its close variants.

By default, every selected client trains the full model, even if the model exceeds the device's memory. With `eligible:
capable`, only devices that can hold the full model at their maximum capacity are selected. A selected device fails if
its free memory in the round is too small for the model. Heterogeneous methods should be more accurate than FedAvg with
`eligible: capable`.

`fedprox` is FedAvg with `mu: 0.01`: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020;
arXiv:1812.06127), Algorithm 2. Clients minimise `F_k(w) + mu/2 * ||w - w^t||^2`. Departs from the paper: all clients
train for the same number of epochs. In the paper, clients may do less work (gamma-inexact solutions), and every
algorithm of flexfleet accepts updates of such clients. The paper samples clients by data size and computes a plain
mean. Here, as in most implementations, clients are sampled uniformly, and the mean is weighted by data size.

`fedopt` is FedAvg with `server: {name: adam}`: Adaptive Federated Optimization (Reddi et al., ICLR 2021;
arXiv:2003.00295), Algorithms 1 and 2. The server uses the clients' mean change as a gradient and takes a step with
Adam, Yogi or Adagrad. `fl_engine/aggregation/server_opt.py` contains the update rules. All other algorithms also have
the option `server`. Departs from Algorithm 2 of the paper: the mean over clients is weighted by sample counts, as in
the paper's experiments. These experiments decay the clients' learning rate, which `training.lr_decay` reproduces.

`fedsgd` is FedAvg in which each client trains for one epoch with a single batch of all its samples (McMahan et al.,
Section 2). A round is one gradient step on the data of the selected clients, `w - lr * sum_k (n_k / n) grad F_k(w)`.
`training.epochs`, `training.batch_size`, `training.drop_last` and `training.sampler` are ignored. `training.momentum`
and `training.schedule` have no effect on a single step. Departs from the paper: all samples of a client are one batch
for the network, so that batch norm uses all samples. Because a large batch needs much memory, a run fails before
training if a client has more than `most_samples` samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fl_engine.algorithms.pooled import PooledAlgorithm, PooledState, check_fits
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count, NotNegative
from fl_engine.core.steps import Shuffle
from fl_engine.core.types import FULL, Assignment, LocalTask, RoundContext, RoundPlan, TaskContext
from fl_engine.selection import Selection, Uniform


@dataclass(frozen=True)
class FedAvg(PooledAlgorithm):
    """FedAvg: every selected client trains the full model (McMahan et al., AISTATS 2017)."""

    eligible: Literal["all", "capable"] = "all"
    """Devices that can be selected. all: every device; capable: only devices whose memory can hold the model."""
    selection: Selection = Uniform(model="largest")
    mu: NotNegative = 0.0
    """Weight of FedProx's proximal term; 0 disables the term."""

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable" or self.on_too_small == "fail":
            check_fits(ctx, assignment.level)
        return self.local_task(assignment, FULL, proximal=self.mu)


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """FedSGD: every selected client takes one gradient step on all its samples (McMahan et al., AISTATS 2017)."""

    local_work: ClassVar[str] = "one step on all of a client's samples in a round"
    """Description of the local training for reports, because most options of the section `training` are ignored."""

    most_samples: Count = 8192
    """Maximum number of samples per client. The maximum limits the memory that one batch of all samples needs."""

    def __post_init__(self) -> None:
        work = replace(self.training, epochs=1, batch_size=self.most_samples, drop_last=False, sampler=Shuffle())
        object.__setattr__(self, "training", work)  # the dataclass is frozen

    def plan(self, state: PooledState, context: RoundContext) -> RoundPlan:
        self.check_samples(context)
        largest = max(context.samples)
        if largest > self.most_samples:
            raise ConfigError.at(
                f"algorithm.most_samples must be at least {largest}, the number of samples of the largest client, got "
                f"{self.most_samples}"
            )
        return super().plan(state, context)
