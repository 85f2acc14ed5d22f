"""Which clients take part in a round, and which pool model each is sent.

A selector is a frozen dataclass with `init`, `pick` and `learn` (see `types.Selector`); any algorithm takes any of
them. What a selector learns from the models that come back lies in tables, in the algorithm's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import STRICT, Count
from fl_engine.core.types import Device, Pick, Pool, Tables


def round_size(fraction: float, clients: int) -> int:
    """k = max(1, f * K) (FlexFL Alg. 2 line 7)."""
    return max(1, int(fraction * clients + 1e-9))


def holds(device: Device, share: float) -> bool:
    """Whether a device can hold a model of this share of the full one when it has the most free."""
    return device.most > 100 * share


def dispatched(pool: Pool) -> list[int]:
    """Indices of the models that the server sends, smallest first."""
    return [i for i, m in enumerate(pool) if m.dispatched]


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
            _someone_holds(fleet, pool, dispatched(pool)[0])
        return {}

    def pick(
        self, tables: Tables, fleet: Sequence[Device], pool: Pool, rng: np.random.Generator, k: int
    ) -> list[Pick]:
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


@dataclass(frozen=True)
class ResourceTable:
    """FlexFL's selection: draw a level uniformly, then a device that can hold it at its maximum capacity.

    Departs from the paper, which only names a resource table, and from the authors' code, which has the class
    limits written for 17 devices and redraws everything until the devices are distinct: here a device is drawn
    uniformly among those not yet chosen whose capacity allows the level, and a level for which none is left is
    not drawn. Fewer than k picks when fewer devices can hold anything.
    """

    __pydantic_config__: ClassVar = STRICT
    name: Literal["resource_table"] = "resource_table"

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        _someone_holds(fleet, pool, dispatched(pool)[0])
        return {}

    def pick(
        self, tables: Tables, fleet: Sequence[Device], pool: Pool, rng: np.random.Generator, k: int
    ) -> list[Pick]:
        levels = dispatched(pool)
        free = {level: [d.client for d in fleet if holds(d, pool[level].share)] for level in levels}
        picks: list[Pick] = []
        while len(picks) < k:
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

    def learn(self, tables: Tables, sent: int, back: int, client: int) -> Tables:
        return tables


@dataclass(frozen=True)
class Curiosity:
    """AdaptiveFL's selection (Sec. 3.3, Alg. 1): the server knows no capacities and learns from what comes back.

    Tables, all ones at first: `curiosity` T_c[type][client], how often a client was sent and brought back a type of
    model; `resource` T_r[model][client], how well it did with each model. A model is drawn uniformly, with
    replacement; a client of those not chosen yet with probability in proportion to its reward:

        R_c = 1 / sqrt(T_c[type(m)][c])
        R_s = sum_{k in type(m)} sum_{t >= k} T_r[t][c] / (n_type * sum_k T_r[k][c])
        R   = min(0.5, R_s) * R_c                                            (`score: cs`)

    Departs from the paper: n_type is the number of models of the type (1 for the largest model), as in the authors'
    code; with the paper's p the largest model's R_s could not exceed 1/p. `c` and `s` use one reward alone, R_s then
    uncapped. A model for which no client has any reward is not drawn.
    """

    __pydantic_config__: ClassVar = STRICT
    name: Literal["curiosity"] = "curiosity"
    score: Literal["cs", "c", "s"] = "cs"
    per_type: Count = 3
    """p, how many models of the pool make a type, from the smallest on; the largest model is a type of its own."""

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        ones = (1.0,) * (max(d.client for d in fleet) + 1)
        models = len(pool)
        return {"curiosity": (ones,) * (self._type(models - 1, models) + 1), "resource": (ones,) * models}

    def pick(
        self, tables: Tables, fleet: Sequence[Device], pool: Pool, rng: np.random.Generator, k: int
    ) -> list[Pick]:
        clients = [d.client for d in fleet]
        weights = self.rewards(tables)[:, clients]
        levels, chosen = dispatched(pool), np.zeros(len(fleet), dtype=bool)
        picks: list[Pick] = []
        while len(picks) < min(k, len(fleet)):
            level = int(rng.choice([i for i in levels if weights[i][~chosen].sum() > 0] or levels))
            left = np.where(chosen, 0.0, weights[level])
            if left.sum() == 0:  # nobody has any reward for anything: all alike
                left = np.where(chosen, 0.0, 1.0)
            place = int(rng.choice(len(fleet), p=left / left.sum()))
            chosen[place] = True
            picks.append((clients[place], level))
        return sorted(picks)

    def rewards(self, tables: Tables) -> np.ndarray:
        """R[model][client], frozen for a whole selection."""
        curiosity, resource = np.asarray(tables["curiosity"]), np.asarray(tables["resource"])
        models = len(resource)
        types = np.asarray([self._type(i, models) for i in range(models)])
        from_here_up = resource[::-1].cumsum(axis=0)[::-1]
        success = np.stack([from_here_up[types == t].mean(axis=0) for t in types]) / resource.sum(axis=0)
        novelty = 1 / np.sqrt(curiosity[types])
        match self.score:
            case "cs":
                return np.asarray(np.minimum(0.5, success) * novelty)
            case "c":
                return np.asarray(novelty)
            case "s":
                return np.asarray(success)

    def learn(self, tables: Tables, sent: int, back: int, client: int) -> Tables:
        """Alg. 1 lines 12-26."""
        curiosity, resource = np.asarray(tables["curiosity"]), np.asarray(tables["resource"])
        models = len(resource)
        for model in (sent, back):
            curiosity[self._type(model, models), client] += 1
        if back == sent:
            resource[sent:, client] += 1
            resource[-1, client] += self.per_type - 1
        else:
            resource[back, client] += self.per_type
            resource[back:, client] = np.maximum(resource[back:, client] - np.arange(models - back), 0)
        return {"curiosity": _rows(curiosity), "resource": _rows(resource)}

    def _type(self, model: int, models: int) -> int:
        """S, M, L of AdaptiveFL for p = 3 and seven models: 0, 1, 2."""
        return model // self.per_type if model < models - 1 else (models - 2) // self.per_type + 1


Selection = Annotated[Uniform | ResourceTable | Curiosity, Field(discriminator="name")]
"""For an algorithm's field: chosen by name in a configuration."""


def _rows(table: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(v) for v in row) for row in table)


def _someone_holds(fleet: Sequence[Device], pool: Pool, level: int) -> None:
    if not any(holds(d, pool[level].share) for d in fleet):
        size = 100 * pool[level].share
        raise ConfigError(
            f"no device of the fleet can hold {pool[level].name}, the smallest model sent ({size:.1f} % of the full "
            "one): make the fleet stronger or the models smaller"
        )
