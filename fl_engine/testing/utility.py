"""A selection that asks its clients for a figure of its own, for tests: those with the largest utility take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_engine.core.contracts import (
    ClientContext,
    ClientMetric,
)
from fl_engine.core.fields import STRICT
from fl_engine.core.types import ClientUpdate, Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import dispatched

MOST = 1e6


def utility(client: ClientContext) -> float:
    """|B| sqrt(mean loss^2) over a client's samples B, its statistical utility (Oort, Lai et al., OSDI 2021, Sec. 4.2);
    at most MOST."""
    return min(MOST, len(client.losses) * float(client.losses.double().square().mean().sqrt()))


@dataclass(frozen=True)
class LargestUtility:
    """Asks the clients whose last utility was the largest; those not asked yet come first, equal ones in random order,
    and those that failed last. Each is sent the largest model. Table `utility`: a number per client."""

    __pydantic_config__ = STRICT

    def client_metrics(self) -> tuple[ClientMetric, ...]:
        return (ClientMetric("utility", 0.0, MOST, utility),)

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        return {"utility": ((MOST,) * len(fleet),)}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        clients = rng.permutation([device.client for device in context.available])
        order = np.argsort(-np.asarray(state["utility"][0])[clients], kind="stable")
        return [(int(client), dispatched(context.pool)[-1]) for client in sorted(clients[order[:count]])]

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        known = list(state["utility"][0])
        known[order.client] = outcome.metrics["utility"] if isinstance(outcome, ClientUpdate) else 0.0
        return {"utility": (tuple(known),)}
