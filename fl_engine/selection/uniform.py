"""Selectors that draw clients uniformly from all clients, from clients that can hold a model, or by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import Options
from fl_engine.core.types import Assignment, ClientResult, Device, Pick, Pool, RoundContext, Tables
from fl_engine.selection.capacity import able, check_capacity, dispatched, holds, level_of, warn_too_weak


class LearnsNothing(Options):
    """Base class for selectors without a state."""

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
        picks: list[Pick] = []
        for device in _drawn(context.available, count, rng):
            level = level_of(device, pool) if self.model == "capacity" else levels[-1]
            picks.append((device.client, int(rng.choice(levels)) if self.model == "random" else level))
        return picks


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
        return [(device.client, level_of(device, pool)) for device in _drawn(devices, count, rng)]


def _drawn(devices: Sequence[Device], count: int, rng: np.random.Generator) -> list[Device]:
    """Draw at most `count` devices, and return them in client order."""
    places = rng.choice(len(devices), size=min(count, len(devices)), replace=False)
    return sorted((devices[place] for place in places), key=lambda device: device.client)


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
            client = free[level][int(rng.integers(len(free[level])))]
            for clients in free.values():
                if client in clients:
                    clients.remove(client)
            picks.append((client, level))
        return sorted(picks)
