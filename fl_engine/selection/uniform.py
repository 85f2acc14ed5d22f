"""Selectors that draw clients uniformly from all clients, from clients that can hold a model, or by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.types import Assignment, ClientResult, Device, Pick, Pool, RoundContext, Tables
from fl_engine.selection.capacity import Draws, able, check_capacity, dispatched, holds, level_of, warn_too_weak


@dataclass(frozen=True)
class LearnsNothing(Draws):
    """Base class for selectors without a state."""

    def devices(
        self, context: RoundContext, devices: Sequence[Device], count: int, rng: np.random.Generator
    ) -> list[Device]:
        """Draw at most `count` devices uniformly, and return them in client order."""
        places = self.drawn(context, [device.client for device in devices], count, rng)
        return [devices[place] for place in sorted(places)]

    def learn(self, state: Tables, assignment: Assignment, result: ClientResult, seconds: float) -> Tables:
        return state


@dataclass(frozen=True)
class Uniform(LearnsNothing):
    """Draw k distinct clients uniformly from all clients.

    `model` determines the model that a client receives. `capacity`: the largest model that fits, or the smallest model
    if none fits. `random`: a random model (AdaptiveFL's +Random). `largest`: the largest model (AdaptiveFL's +Greed).
    """

    name: Literal["uniform"] = "uniform"
    model: Literal["capacity", "random", "largest"] = "capacity"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        warn_too_weak(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool, levels = context.pool, dispatched(context.pool)
        devices = self.devices(context, context.available, count, rng)
        if self.model == "capacity":
            return [(device.client, level_of(device, pool)) for device in devices]
        if self.model == "largest":
            return [(device.client, levels[-1]) for device in devices]
        if self.draws == "keyed":
            drawn = rng.choice(levels, size=context.fleet[-1].client + 1)
            return [(device.client, int(drawn[device.client])) for device in devices]
        return [(device.client, int(rng.choice(levels))) for device in devices]


@dataclass(frozen=True)
class ByCapacity(LearnsNothing):
    """Draw k distinct clients uniformly from all clients that can hold a model.

    Each client gets the largest model that fits. The fleet is rejected if one of its tiers cannot hold any model.
    """

    name: Literal["by_capacity"] = "by_capacity"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        check_capacity(fleet, pool)
        return {}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool = context.pool
        devices = able(context.available, pool[dispatched(pool)[0]].share)
        return [(device.client, level_of(device, pool)) for device in self.devices(context, devices, count, rng)]


@dataclass(frozen=True)
class ResourceTable(ByCapacity):
    """FlexFL's selection: draw a level uniformly, then draw a device whose maximum memory can hold this level.

    Departs from the paper, which only mentions a resource table. The authors' code is written for 17 devices and draws
    all devices again until no device occurs twice. Here each device is drawn uniformly from the devices that can hold
    the level and are not selected yet. A level is not drawn if no such device is left. If fewer than k devices can hold
    a model, fewer than k devices are selected.
    """

    name: Literal["resource_table"] = "resource_table"  # type: ignore[assignment]

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        pool, levels = context.pool, dispatched(context.pool)
        free = {level: [d.client for d in context.available if holds(d, pool[level].share)] for level in levels}
        picks: list[Pick] = []
        while len(picks) < count:
            open_levels = [level for level in levels if free[level]]
            if not open_levels:
                break
            level = int(rng.choice(open_levels))
            keyed = self.draws == "keyed"
            place = np.argmin(self.arrivals(context, free[level], rng)) if keyed else rng.integers(len(free[level]))
            client = free[level][int(place)]
            for clients in free.values():
                if client in clients:
                    clients.remove(client)
            picks.append((client, level))
        return sorted(picks)
