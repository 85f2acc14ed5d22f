"""FedPer: Federated Learning with Personalization Layers (Arivazhagan et al., 2019; arXiv:1912.00818), Algorithms 1, 2.

A client keeps the output layer of its model, and all other parameters are averaged. With `evaluate.on: clients`, each
client evaluates its own model on its held-out samples.

Departs from the paper: only the output layer is personal, and starts with the weights of the global model, not with
random weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.core.contracts import ClientContext, ModelFamily
from fl_engine.core.slicing import full_shapes
from fl_engine.core.types import HEAD, Assignment, LocalTask, Params, Pool, Start, TaskContext


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer: each client keeps the output layer, and the other layers are averaged (Arivazhagan et al., 2019)."""

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        slots = family.layout().slots
        head = {name for name, slot in slots.items() if any(axis.group == HEAD for axis in slot.axes)}
        return {name: tuple(shape) for name, shape in full_shapes(family).items() if name in head}

    def begin(self, state: Params, start: Start, assignment: Assignment, task: LocalTask, ctx: TaskContext) -> Start:
        return replace(start, params={**start.params, **state})

    def keep(self, state: Params, client: ClientContext) -> Params:
        return {name: client.trained[name] for name in self.client_state(client.family, ())}
