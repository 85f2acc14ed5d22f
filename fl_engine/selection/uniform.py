"""Clients drawn uniformly: from all clients, from those that can hold a model, or for a level drawn first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import able, check_capacity, dispatched, holds, level_of, tell_of_too_weak


@dataclass(frozen=True)
class Uniform:
    """k distinct clients, drawn uniformly from all.

    `model` says what each is sent: `capacity` the largest model that it can hold, or the smallest model; `random` a
    model drawn uniformly; `largest` the largest model (AdaptiveFL's +Random and +Greed).
    """

    __pydantic_config__ = STRICT
    name: Literal["uniform"] = "uniform"
    model: Literal["capacity", "random", "largest"] = "capacity"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        tell_of_too_weak(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool, levels = context.pool, dispatched(context.pool)
        picks: list[Pick] = []
        for device in _drawn(context.available, count, rng):
            match self.model:
                case "capacity":
                    picks.append((device.client, level_of(device, pool)))
                case "largest":
                    picks.append((device.client, levels[-1]))
                case "random":
                    picks.append((device.client, int(rng.choice(levels))))
        return picks

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        return state


@dataclass(frozen=True)
class ByCapacity:
    """k distinct clients, drawn uniformly from those that can hold a model; each is sent the largest that it can hold.

    A fleet with a tier that can hold no model is refused before the first round.
    """

    __pydantic_config__ = STRICT
    name: Literal["by_capacity"] = "by_capacity"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        check_capacity(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool = context.pool
        devices = able(context.available, pool[dispatched(pool)[0]].share)
        return [(device.client, level_of(device, pool)) for device in _drawn(devices, count, rng)]

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        return state


def _drawn(devices: Sequence[Device], count: int, rng: np.random.Generator) -> list[Device]:
    """Return `count` of these devices, or all if there are fewer, in client order."""
    places = rng.choice(len(devices), size=min(count, len(devices)), replace=False)
    return sorted((devices[place] for place in places), key=lambda device: device.client)


@dataclass(frozen=True)
class ResourceTable:
    """FlexFL's selection: draw a level uniformly, then a device that can hold it at its maximum capacity.

    Departs from the paper, which only names a resource table, and from the authors' code, which is written for 17
    devices and redraws everything until the devices are distinct. Here a device is drawn uniformly among those not yet
    chosen that can hold the level, and a level without such a device is not drawn. There are fewer than k picks if
    fewer devices can hold anything.
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
