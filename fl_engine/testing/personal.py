"""An algorithm whose clients keep something, for tests: each has a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fl_engine.aggregation.rules import Aggregation, Mean
from fl_engine.aggregation.server_opt import Average, Server
from fl_engine.algorithms import pooled
from fl_engine.algorithms.pooled import Training, local_task
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ClientContext, ModelFamily, ServerContext
from fl_engine.core.fields import STRICT
from fl_engine.core.slicing import full_shapes
from fl_engine.core.types import FULL, HEAD, LocalTask, Params, Pool, Prepared, Start, TaskContext, WorkOrder
from fl_engine.selection import Selection, Uniform


@dataclass(frozen=True)
class PersonalHeads:
    """FedPer: Federated Learning with Personalization Layers (Arivazhagan et al., arXiv:1912.00818, 2019, Alg. 1, 2).
    The parameters of the head stay with the client, the others are averaged.

    Departs from the paper: a client begins with the global model's head, where the paper's draws one of its own.
    """

    __pydantic_config__ = STRICT
    preparations: ClassVar[tuple[str, ...]] = ()

    training: Training = Training()
    selection: Selection = Uniform(model="largest")
    aggregation: Aggregation = Mean()
    server: Server = Average()

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        return (pools.member(family, "full", FULL, dispatched=True, reported=True),)

    selector, init, plan, merge = pooled.selector, pooled.init, pooled.plan, pooled.merge

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return local_task(self.training, order, order.spec)

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        """All parameters that have an axis of the network's outputs."""
        heads = {n for n, slot in family.layout().slots.items() if any(axis.group == HEAD for axis in slot.axes)}
        return {name: tuple(shape) for name, shape in full_shapes(family).items() if name in heads}

    def begin(self, state: Params, start: Start, order: WorkOrder, task: LocalTask, ctx: TaskContext) -> Start:
        return replace(start, params={**start.params, **state})

    def keep(self, state: Params, client: ClientContext) -> Params:
        return {name: client.trained[name] for name in self.client_state(client.family, ())}
