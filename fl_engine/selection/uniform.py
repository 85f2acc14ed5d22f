"""Clients drawn uniformly: from all clients, or from those that can hold a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import able, check_capacity, dispatched, level_of, tell_of_too_weak


@dataclass(frozen=True)
class Uniform:
    """k distinct clients, drawn uniformly from all clients, whatever they can hold.

    `model` says what each is sent. `capacity`: the largest model that it can hold, or the smallest model if it can hold
    none; `random`: a model drawn uniformly; `largest`: the largest model (AdaptiveFL's +Random and +Greed).
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
    """`count` of these devices, or all if there are fewer, in client order."""
    places = rng.choice(len(devices), size=min(count, len(devices)), replace=False)
    return sorted((devices[place] for place in places), key=lambda device: device.client)
