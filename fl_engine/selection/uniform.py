"""Clients uniformly, and what each is sent by capacity, at random, or always the largest model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device, Pick, Pool, Tables
from fl_engine.selection.capacity import dispatched, holds, someone_holds


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
            someone_holds(fleet, pool, dispatched(pool)[0])
        return {}

    def pick(self, tables: Tables, fleet: Sequence[Device], pool: Pool, rng: np.random.Generator, k: int) -> list[Pick]:
        levels = dispatched(pool)
        least = pool[levels[0]].share
        able = [d for d in fleet if holds(d, least)] if self.model == "capacity" else fleet
        chosen = rng.choice(np.asarray([d.client for d in able]), size=min(k, len(able)), replace=False)
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

    def learn(self, tables: Tables, sent: int, back: int, client: int) -> Tables:
        return tables
