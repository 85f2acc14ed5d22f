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
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import full_shapes
from fl_engine.core.types import HEAD, Assignment, LocalTask, Params, Pool, Start, TaskContext


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer: each client keeps the output layer, and the other layers are averaged (Arivazhagan et al., 2019)."""

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        layout, sizes = family.layout(), full_shapes(family)
        head = [name for name, slot in layout.slots.items() if any(axis.group == HEAD for axis in slot.axes)]
        if not head:  # The axes of an untraced network are not known, so its output layer must be the last layer.
            last = list(layout.slots)[-1].rpartition(".")[0]
            head = [name for name in layout.slots if name.rpartition(".")[0] == last]
            if any(sizes[name][:1] != (layout.groups[HEAD],) for name in head):
                raise ModelError(
                    f"{type(self).__name__} requires a network whose last layer is the output layer, got {last}"
                )
        return {name: tuple(sizes[name]) for name in head}

    def begin(self, state: Params, start: Start, assignment: Assignment, task: LocalTask, ctx: TaskContext) -> Start:
        return replace(start, params={**start.params, **state})

    def keep(self, state: Params, client: ClientContext) -> Params:
        return {name: client.trained[name] for name in self.client_state(client.family, ())}
