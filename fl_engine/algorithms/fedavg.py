"""FedAvg on the full model, and methods that differ from it in one default: the papers' references.

`all_large` and `fedavg` are FedAvg (McMahan et al., AISTATS 2017, Algorithm 1): every client trains the full model,
whatever it can hold, as a fleet of strong devices would. With `eligible: capable` only devices take part that can hold
the full model at their maximum capacity, and a device that has less free at the moment fails. This is what FedAvg
reaches on the fleet, and what heterogeneous methods must beat.

`fedprox` is FedProx: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020), Algorithm 2: clients
minimise `F_k(w) + mu/2 * ||w - w^t||^2`, and mu holds them close to the model they were sent. Departs from the paper:
all clients run the same number of epochs. Its tolerance of partial work (gamma-inexact solutions) lies in accepting
whatever a client returns, which every algorithm here does. Its sampling by data size with a plain mean is here, as in
most code, uniform sampling with a mean weighted by data size.

`fedopt` is FedOpt: Adaptive Federated Optimization (Reddi et al., ICLR 2021), Algorithms 1 and 2: the server takes the
clients' mean change for a gradient and steps with Adam, Yogi or Adagrad; the rules are in
`fl_engine/aggregation/server_opt.py`, and every other algorithm takes them as its `server` too. Departs from the paper:
it has the mean over clients weighted by sample counts, as its experiments do; its experiments' client learning-rate
decay is `training.lr_decay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Adam, Average, Server
from fl_engine.algorithms import pooled, terms
from fl_engine.algorithms.pooled import needs_room
from fl_engine.algorithms.terms import Terms, local_task
from fl_engine.algorithms.training import Training
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily, Selector, ServerContext
from fl_engine.core.fields import STRICT, NotNegative
from fl_engine.core.types import FULL, LocalTask, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.selection import Selection, Uniform


@dataclass(frozen=True)
class FedAvg(Terms):
    """FedAvg: every selected client trains the full model, whatever it can hold (McMahan et al., AISTATS 2017)."""

    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    eligible: Literal["all", "capable"] = "all"
    """Which devices take part. `all`: every device, whatever it can hold; `capable`: those that can hold the model."""
    selection: Selection | None = None
    """null: a uniform draw from the devices that take part."""
    aggregation: Aggregation = Mean()
    server: Server = Average()
    mu: NotNegative = 0.0
    """Weight of FedProx's proximal term; 0 is FedAvg."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        static_bn = terms.static_bn(self, family)
        full = pools.member(family, "full", FULL, dispatched=True, reported=True, static_bn=static_bn)
        return terms.some_narrower(self, family, (full,))

    def selector(self, pool: Pool) -> Selector:
        return self.selection or Uniform(model="largest")

    init, plan, merge = pooled.init, pooled.plan, terms.merge

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable":
            needs_room(ctx, 0)
        return local_task(self, order, FULL, proximal=self.mu)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx: FedAvg with a proximal term that holds clients close to the model they were sent (Li et al., MLSys
    2020)."""

    mu: NotNegative = 0.01


@dataclass(frozen=True)
class FedOpt(FedAvg):
    """FedOpt: FedAvg whose server steps with Adam, Yogi or Adagrad (Reddi et al., ICLR 2021)."""

    server: Server = Adam()
