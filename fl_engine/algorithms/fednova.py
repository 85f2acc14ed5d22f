"""FedNova: Tackling the Objective Inconsistency Problem (Wang et al., NeurIPS 2020; arXiv:2007.07481), Section 4.

In FedAvg, a client that takes more local steps pulls the global model further towards its own optimum. FedNova divides
each client's change by |a_i|, the effective number of its local steps. The mean of these quotients is multiplied by
tau, the average of |a_i| (Eq. 8, Table 1).

Departs from the paper: the option `server` defines the server's momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fl_engine.aggregation.privacy import is_private
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.pooled import scaled_change
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.steps import Constant
from fl_engine.core.types import ClientUpdate, Device, Pool, Results, RoundPlan


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedNova: each client's change is normalised by its number of local steps (Wang et al., NeurIPS 2020)."""

    def check(self, fleet: Sequence[Device], pool: Pool, server: ServerContext) -> None:
        check_constant_sgd(self.training)
        if is_private(self):
            raise ConfigError.at(
                "algorithm.aggregation must not be private, because an update's scale depends on the steps of all "
                "clients"
            )

    def merge(self, state: Any, plan: RoundPlan, results: Results, server: ServerContext) -> Any:
        """Return the state with `w + tau * sum_i p_i (w_i - w) / |a_i|`, where `tau = sum_i p_i |a_i|`."""
        updates = [result for result in results if isinstance(result, ClientUpdate)]
        weights = [self.weight(update, state, server) for update in updates]
        distances = {update.client: distance(self.training, update.metrics["steps"]) for update in updates}
        weighted = sum(weight * distances[u.client] for weight, u in zip(weights, updates, strict=True))
        tau = weighted / sum(weights) if updates else 0.0
        scaled = (
            scaled_change(each, state, tau / distances[each.client]) if isinstance(each, ClientUpdate) else each
            for each in results
        )
        return super().merge(state, plan, scaled, server)


def check_constant_sgd(training: Training) -> None:
    """Raise ConfigError unless clients train with SGD, a momentum below 1 and a constant learning rate."""
    if training.optimizer is not None or training.momentum >= 1:
        raise ConfigError("training must use SGD with a momentum below 1", path="training.optimizer")
    if training.schedule != Constant():
        raise ConfigError.at("training.schedule must be constant within a round")


def distance(training: Training, steps: float) -> float:
    """Return `|a_i|` (Table 1), the effective number of steps: the distance that the steps cover along a constant
    gradient, divided by the learning rate. Without momentum, `|a_i|` is `steps`."""
    m = training.momentum
    return float((steps - m * (1 - m**steps) / (1 - m)) / (1 - m))
