"""Clients uniformly, and what each is sent by capacity, at random, or always the largest model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import able, check_capacity, dispatched, holds, tell_of_too_weak


@dataclass(frozen=True)
class Uniform:
    """k distinct clients, each with the same chance.

    `capacity` sends each the largest model it can hold, and asks only those that can hold one; `random` draws the
    model uniformly and `largest` always sends the largest, both whatever the client can hold (AdaptiveFL's +Random
    and +Greed).
    """

    __pydantic_config__ = STRICT
    name: Literal["uniform"] = "uniform"
    model: Literal["capacity", "random", "largest"] = "capacity"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        if self.model == "capacity":
            check_capacity(fleet, pool)
        else:
            tell_of_too_weak(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool, levels = context.pool, dispatched(context.pool)
        least = pool[levels[0]].share
        asked = able(context.available, least) if self.model == "capacity" else context.available
        places = rng.choice(len(asked), size=min(count, len(asked)), replace=False).tolist()
        picks: list[Pick] = []
        for device in sorted((asked[place] for place in places), key=lambda device: device.client):
            match self.model:
                case "capacity":
                    picks.append((device.client, max(i for i in levels if holds(device, pool[i].share))))
                case "largest":
                    picks.append((device.client, levels[-1]))
                case "random":
                    picks.append((device.client, int(rng.choice(levels))))
        return picks

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        return state
