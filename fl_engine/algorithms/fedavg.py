"""FedAvg on the full model (McMahan et al., AISTATS 2017, Algorithm 1), and two methods that change one option of it.

Every client trains the full model, whatever it can hold, as a fleet of strong devices would. With `eligible: capable`
only devices take part that can hold the full model at their maximum capacity, and a device that has less free at the
moment fails. This is what FedAvg reaches on the fleet, and what heterogeneous methods must beat.

`fedprox` is FedAvg with `mu: 0.01`: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020),
Algorithm 2. Clients minimise `F_k(w) + mu/2 * ||w - w^t||^2`, and mu holds them close to the model they were sent.
Departs from the paper: all clients run the same number of epochs. The paper's partial work (gamma-inexact solutions)
needs no code, because every algorithm accepts whatever a client returns. Its sampling by data size with a plain mean is
here, as in most code, uniform sampling with a mean weighted by data size.

`fedopt` is FedAvg with `server: {name: adam}`: Adaptive Federated Optimization (Reddi et al., ICLR 2021), Algorithms 1
and 2. The server takes the clients' mean change for a gradient and steps with Adam, Yogi or Adagrad. The rules are in
`fl_engine/aggregation/server_opt.py`, and every other algorithm takes them as its `server` too. Departs from the paper:
the mean over clients is weighted by sample counts, as in its experiments; the client learning-rate decay of its
experiments is `training.lr_decay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_engine.algorithms.pooled import PooledAlgorithm, check_fits
from fl_engine.core.fields import NotNegative
from fl_engine.core.types import FULL, LocalTask, TaskContext, WorkOrder
from fl_engine.selection import Selection, Uniform


@dataclass(frozen=True)
class FedAvg(PooledAlgorithm):
    """FedAvg: every selected client trains the full model, whatever it can hold (McMahan et al., AISTATS 2017)."""

    eligible: Literal["all", "capable"] = "all"
    """Which devices take part. `all`: every device, whatever it can hold; `capable`: those that can hold the model."""
    selection: Selection = Uniform(model="largest")
    mu: NotNegative = 0.0
    """Weight of FedProx's proximal term; 0 is FedAvg."""

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable" or self.on_too_small == "fail":
            check_fits(ctx, order.level)
        return self.local_task(order, FULL, proximal=self.mu)
