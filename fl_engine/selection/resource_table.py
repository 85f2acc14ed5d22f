"""FlexFL's selection: a level first, then a device that can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import check_capacity, dispatched, holds


@dataclass(frozen=True)
class ResourceTable:
    """FlexFL's selection: draw a level uniformly, then a device that can hold it at its maximum capacity.

    Departs from the paper, which only names a resource table, and from the authors' code, which has the class
    limits written for 17 devices and redraws everything until the devices are distinct: here a device is drawn
    uniformly among those not yet chosen whose capacity allows the level, and a level for which none is left is
    not drawn. Fewer than k picks when fewer devices can hold anything.
    """

    __pydantic_config__ = STRICT
    name: Literal["resource_table"] = "resource_table"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        check_capacity(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool, levels = context.pool, dispatched(context.pool)
        free = {level: [d.client for d in context.available if holds(d, pool[level].share)] for level in levels}
        picks: list[Pick] = []
        while len(picks) < count:
            open_levels = [level for level in levels if free[level]]
            if not open_levels:
                break
            level = int(rng.choice(open_levels))
            client = free[level][int(rng.integers(len(free[level])))]
            for clients in free.values():
                if client in clients:
                    clients.remove(client)
            picks.append((client, level))
        return sorted(picks)

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        return state
