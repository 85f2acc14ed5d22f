"""q-FFL: Fair Resource Allocation in Federated Learning (Li et al., ICLR 2020; arXiv:1905.10497).

Algorithm 2 (q-FedAvg): the objective `sum_k p_k / (q + 1) * F_k(w)^(q+1)` gives clients with a higher loss a larger
weight, so that the accuracy is more uniform across clients. Each client reports `F_k(w)`, its loss before training.

Departs from the paper: the option `selection` defines how clients are sampled, and `weighting` defines `p_k`. A
Byzantine client can report a false loss of up to `LARGEST_LOSS`, so q-FFL requires honest clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.pooled import scaled_change
from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.contracts import ClientContext, ClientMetric, ServerContext
from fl_engine.core.fields import NotNegative
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientUpdate, Results, RoundPlan

SMALLEST_LOSS = 1e-10
"""Minimum loss, as in the authors' code, because a loss of 0 would give a client the weight 0."""


@dataclass(frozen=True)
class QFFL(FedAvg):
    """q-FFL: clients with a higher loss get a larger weight (Li et al., ICLR 2020)."""

    q: NotNegative = 0.1
    """Exponent of the losses; 0 gives FedAvg. The more local steps clients take, the smaller q must be."""

    def client_metrics(self) -> Sequence[ClientMetric]:
        return (ClientMetric("loss_before", 0.0, LARGEST_LOSS, _loss_before),)

    def weight(self, update: ClientUpdate, state: Any, server: ServerContext) -> float:
        """Return `p_k * F_k^q`."""
        return super().weight(update, state, server) * float(_loss_of(update) ** self.q)

    def merge(self, state: Any, plan: RoundPlan, results: Results, server: ServerContext) -> Any:
        """Return the state with the weights `w - sum_k Delta_k / sum_k h_k`. With the weights `p_k * F_k^q`, the
        weighted mean of the updates would subtract `sum_k Delta_k / (L * sum_k p_k * F_k^q)` from w. Therefore each
        change is multiplied by `L * sum_k p_k * F_k^q / sum_k h_k`."""
        lipschitz = 1 / self.training.optimizer_in(plan.round).lr
        numerator = denominator = 0.0
        for update in results:
            if isinstance(update, ClientUpdate):
                weight, loss = self.weight(update, state, server), _loss_of(update)
                gradient = lipschitz * _change_norm(update, state)
                numerator += lipschitz * weight
                denominator += weight * (self.q / loss * gradient**2 + lipschitz)
        factor = numerator / denominator if denominator else 1.0
        scaled = (scaled_change(each, state, factor) if isinstance(each, ClientUpdate) else each for each in results)
        return super().merge(state, plan, scaled, server)


def _loss_before(client: ClientContext) -> float:
    return min(LARGEST_LOSS, max(0.0, float(client.losses.double().mean())))


def _loss_of(update: ClientUpdate) -> float:
    return max(SMALLEST_LOSS, update.metrics["loss_before"])


def _change_norm(update: ClientUpdate, state: Any) -> float:
    old = take(state.params, state.layout, update.spec)
    changes = [t.double() - old[name] for name, t in update.payload.items() if not is_statistic(name)]
    return float(torch.stack([change.norm() for change in changes]).norm())
