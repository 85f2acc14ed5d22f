"""FedAvg on the full model, and methods that differ from it in one default: the papers' references.

`all_large` is FedAvg (McMahan et al., AISTATS 2017, Algorithm 1), under the name that the papers give it as a control;
`fedavg` is the same. Every client trains the full model, whatever it can hold, as in the papers: the result is what a
fleet of strong devices would reach. With `eligible: capable` only devices take part that can hold the full model at
their maximum capacity, and a device that has less memory free at the moment fails: the result is what FedAvg can do on
this fleet, and what heterogeneous methods must beat.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Adam, Average, Server
from fl_engine.algorithms import pooled, terms
from fl_engine.algorithms.pooled import PooledState, Training, needs_room
from fl_engine.algorithms.terms import Terms, local_task
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily, Selector, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import STRICT, NotNegative
from fl_engine.core.types import FULL, Device, LocalTask, ParamLayout, Params, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.selection import Selection, Uniform
from fl_engine.selection.capacity import holds


@dataclass(frozen=True)
class AllLarge(Terms):
    """FedAvg of the full model on every selected client (McMahan et al., AISTATS 2017)."""

    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    eligible: Literal["all", "capable"] = "all"
    """`all` devices, whatever they can hold, or those `capable` of the full model."""
    selection: Selection | None = None
    """null: uniform among the eligible."""
    aggregation: Aggregation = Mean()
    server: Server = Average()
    mu: NotNegative = 0.0
    """Weight of FedProx's proximal term; 0 is FedAvg."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        static_bn = terms.static_bn(self, family)
        full = pools.member(family, "full", FULL, dispatched=True, reported=True, static_bn=static_bn)
        return terms.some_narrower(self, family, (full,))

    def selector(self, pool: Pool) -> Selector:
        if self.selection is not None:
            return self.selection
        return Uniform(model="largest" if self.eligible == "all" else "capacity")

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> PooledState:
        if self.eligible == "capable" and not any(holds(d, 1.0) for d in fleet):
            raise ConfigError(
                "algorithm.eligible is 'capable', but no device of the fleet can hold the full model (the largest "
                f"holds {max(d.most for d in fleet):.1f} %): set algorithm.eligible=all, or give a tier of fleet.tiers "
                "more memory"
            )
        return pooled.init(self, params, layout, fleet, pool, server)

    plan, merge = pooled.plan, terms.merge

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable":
            needs_room(ctx, 0)
        return local_task(self, order, FULL, proximal=self.mu)


@dataclass(frozen=True)
class FedAvg(AllLarge):
    """FedAvg: every selected client trains the full model, whatever it can hold (McMahan et al., AISTATS 2017)."""


@dataclass(frozen=True)
class FedProx(AllLarge):
    """FedProx: FedAvg with a proximal term that holds clients close to the model they were sent (Li et al., MLSys
    2020)."""

    mu: NotNegative = 0.01


@dataclass(frozen=True)
class FedOpt(AllLarge):
    """FedOpt: FedAvg whose server steps with Adam, Yogi or Adagrad (Reddi et al., ICLR 2021)."""

    server: Server = Adam()
