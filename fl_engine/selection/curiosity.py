"""AdaptiveFL's selection, which learns from what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import STRICT, Count
from fl_engine.core.types import ClientUpdate, Device, Outcome, Pick, Pool, RoundContext, Tables, WorkOrder
from fl_engine.selection.capacity import dispatched, tell_of_too_weak


@dataclass(frozen=True)
class Curiosity:
    """AdaptiveFL's selection (Sec. 3.3, Alg. 1): the server knows no capacities and learns from what comes back.

    Tables, all ones at first: `curiosity` T_c[type][client], how often a client was sent and brought back a type of
    model; `resource` T_r[model][client], how well it did with each model. A model is drawn uniformly, with
    replacement; a client of those not chosen yet with probability in proportion to its reward:

        R_c = 1 / sqrt(T_c[type(m)][c])
        R_s = sum_{k in type(m)} sum_{t >= k} T_r[t][c] / (n_type * sum_k T_r[k][c])
        R   = min(0.5, R_s) * R_c                                            (`score: cs`)

    Departs from the paper:
    - n_type is the number of models of the type (1 for the largest model), as in the authors' code. With the paper's p
      the largest model's R_s could not exceed 1/p.
    - The paper has no failures. Here a failure changes T_c as if the client had brought back what it was sent, and T_r
      as if it had pruned that to less than the smallest model. Otherwise the curiosity about a client that never
      answers would stay maximal, and it would be asked most often.
    - `c` and `s` use one reward only, R_s then uncapped. A model for which no client has any reward is not drawn.
    """

    __pydantic_config__ = STRICT
    name: Literal["curiosity"] = "curiosity"
    score: Literal["cs", "c", "s"] = "cs"
    per_type: Count = 3
    """p, the number of models per type, from the smallest on; the largest model is a type of its own."""

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        tell_of_too_weak(fleet, pool)
        ones = (1.0,) * (max(d.client for d in fleet) + 1)
        models = len(pool)
        return {"curiosity": (ones,) * (self._type(models - 1, models) + 1), "resource": (ones,) * models}

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        clients = [d.client for d in context.available]
        weights = self.rewards(state)[:, clients]
        levels, chosen = dispatched(context.pool), np.zeros(len(clients), dtype=bool)
        picks: list[Pick] = []
        while len(picks) < min(count, len(clients)):
            level = int(rng.choice([i for i in levels if weights[i][~chosen].sum() > 0] or levels))
            left = np.where(chosen, 0.0, weights[level])
            if left.sum() == 0:  # no client has any reward for any model: all have the same chance
                left = np.where(chosen, 0.0, 1.0)
            place = int(rng.choice(len(clients), p=left / left.sum()))
            chosen[place] = True
            picks.append((clients[place], level))
        return sorted(picks)

    def rewards(self, tables: Tables) -> np.ndarray:
        """Return R[model][client], constant during a selection."""
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

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        """Alg. 1 lines 12-26."""
        client, sent = order.client, order.level
        failed = not isinstance(outcome, ClientUpdate)
        back = outcome.level if isinstance(outcome, ClientUpdate) and outcome.level is not None else sent
        curiosity, resource = np.asarray(state["curiosity"]), np.asarray(state["resource"])
        models = len(resource)
        for model in (sent, back):
            curiosity[self._type(model, models), client] += 1
        if back == sent and not failed:
            resource[sent:, client] += 1
            resource[-1, client] += self.per_type - 1
        else:
            least = 0 if failed else back
            resource[least, client] += self.per_type
            resource[least:, client] = np.maximum(resource[least:, client] - np.arange(models - least), 0)
        return {"curiosity": _rows(curiosity), "resource": _rows(resource)}

    def _type(self, model: int, models: int) -> int:
        """S, M, L of AdaptiveFL for p = 3 and seven models: 0, 1, 2."""
        return model // self.per_type if model < models - 1 else (models - 2) // self.per_type + 1


def _rows(table: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(v) for v in row) for row in table)
