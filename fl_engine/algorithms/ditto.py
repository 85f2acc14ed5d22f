"""Ditto: Fair and Robust Federated Learning Through Personalization (Li et al., ICML 2021; arXiv:2012.04221).

Algorithm 1: in addition to the global model w, each client trains a model v of its own, which minimises
`F_k(v) + lam/2 * ||v - w||^2`. The global model is trained with FedAvg. With `evaluate.on: clients`, each client
evaluates its own model on its held-out samples.

Departs from the paper: w and v are trained for the same number of epochs, and v starts as the first global model that
the client receives. The simulated clock and the multiply-adds include only the training of w, although a client trains
two models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.core.contracts import ClientContext, ModelFamily
from fl_engine.core.fields import Positive
from fl_engine.core.slicing import full_shapes, is_statistic
from fl_engine.core.types import Assignment, LocalTask, Params, Pool, Start, TaskContext
from fl_engine.training.local import TrainingJob, train

PERSONAL = "personal/"
"""Prefix for the tensor names of a client's own model in the client's state."""


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Ditto: each client also trains a model of its own, close to the global model (Li et al., ICML 2021)."""

    lam: Positive = 0.1
    """lambda: weight of the term that pulls a client's own model towards the global model."""

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        return {PERSONAL + name: tuple(shape) for name, shape in full_shapes(family).items()}

    def begin(self, state: Params, start: Start, assignment: Assignment, task: LocalTask, ctx: TaskContext) -> Start:
        return start

    def keep(self, state: Params, client: ClientContext) -> Params:
        """Train the client's own model v, starting from v_0. `proximal` adds lam * (v - v_0) to the gradient. Adding
        the constant `attraction` turns this term into lam * (v - w^t)."""
        received = client.received
        start = self.personal(state, received) if state else received
        attraction = {
            name: self.lam * (tensor - start[name]) for name, tensor in received.items() if not is_statistic(name)
        }
        job = TrainingJob(replace(client.task, proximal=self.lam), start, client.x, client.y, attraction)
        trained = train(client.family, client.goal, [job])[0]
        return {PERSONAL + name: tensor for name, tensor in trained.params.items()}

    def personal(self, state: Params, params: Params) -> Params:
        return {name: state[PERSONAL + name] for name in params}
