"""Clients uniformly, and what each is sent by capacity, at random, or always the largest model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import check_capacity, dispatched, holds


@dataclass(frozen=True)
class Uniform:
    """k distinct clients, each with the same chance.

    `capacity` sends each the largest model it can hold, and asks only those that can hold one; `random` draws the
    model uniformly and `largest` always sends the largest, both whatever the client can hold (AdaptiveFL's +Random
    and +Greed).
    """

    __pydantic_config__: ClassVar = STRICT
    name: Literal["uniform"] = "uniform"
    model: Literal["capacity", "random", "largest"] = "capacity"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        if self.model == "capacity":
            check_capacity(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool, levels = context.pool, dispatched(context.pool)
        least = pool[levels[0]].share
        able = [d for d in context.available if self.model != "capacity" or holds(d, least)]
        chosen = rng.choice(np.asarray([d.client for d in able]), size=min(count, len(able)), replace=False)
        devices = {d.client: d for d in able}
        picks: list[Pick] = []
        for client in (int(c) for c in sorted(chosen)):
            match self.model:
                case "capacity":
                    picks.append((client, max(i for i in levels if holds(devices[client], pool[i].share))))
                case "largest":
                    picks.append((client, levels[-1]))
                case "random":
                    picks.append((client, int(rng.choice(levels))))
        return picks

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        return state
