"""AdaptiveFL's selection, which learns the capacities of clients from their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fl_engine.core.fields import Count
from fl_engine.core.types import Assignment, ClientResult, ClientUpdate, Device, Pick, Pool, RoundContext, Tables
from fl_engine.selection.capacity import Draws, dispatched, rows_of, warn_too_weak


@dataclass(frozen=True)
class Curiosity(Draws):
    """AdaptiveFL's selection (Sec. 3.3, Alg. 1). The server learns the clients' capacities from results.

    Two tables are initialised with ones. `T_c[type][client]` (`curiosity`) counts how often a client received or
    returned a model of each type. `T_r[model][client]` (`resource`) scores the client's success with each model. For
    each pick, a model m is drawn uniformly. Then a client c that is not selected yet is drawn with probability
    proportional to R:

        R_c = 1 / sqrt(T_c[type(m)][c])
        R_s = sum_{k in type(m)} sum_{t >= k} T_r[t][c] / (n_type * sum_k T_r[k][c])
        R   = min(0.5, R_s) * R_c                                            (`score: cs`).

    Departs from the paper:
    - n_type is the number of models of the type (1 for the largest model), as in the authors' code. With the paper's p
      instead of n_type, the largest model's R_s could not exceed 1/p.
    - The paper has no failures. Here a failure changes T_c as if the client had returned the received model. The
      failure changes T_r as if the client had pruned the received model below the smallest model. Without this rule, a
      client that never succeeds would keep the maximum curiosity, and would be selected most often.
    - `score: c` uses only R_c. `score: s` uses only R_s without the limit of 0.5. A model with zero reward for all
      clients is not drawn.
    """

    name: Literal["curiosity"] = "curiosity"
    score: Literal["cs", "c", "s"] = "cs"
    per_type: Count = 3
    """Number p of models per type. Types group the models from the smallest; the largest has its own type."""

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        warn_too_weak(fleet, pool)
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
            if left.sum() == 0:  # All rewards are zero, so draw a client uniformly.
                left = np.where(chosen, 0.0, 1.0)
            if self.draws == "keyed":
                index = int(np.argmax(left / self.arrivals(context, clients, rng)))
            else:
                index = int(rng.choice(len(clients), p=left / left.sum()))
            chosen[index] = True
            picks.append((clients[index], level))
        return sorted(picks)

    def rewards(self, tables: Tables) -> np.ndarray:
        """Return the rewards `R[model][client]`."""
        curiosity, resource = np.asarray(tables["curiosity"]), np.asarray(tables["resource"])
        models = len(resource)
        types = np.asarray([self._type(i, models) for i in range(models)])
        from_here_up = resource[::-1].cumsum(axis=0)[::-1]
        success = np.stack([from_here_up[types == t].mean(axis=0) for t in types]) / resource.sum(axis=0)
        novelty = 1 / np.sqrt(curiosity[types])
        return np.asarray({"cs": np.minimum(0.5, success) * novelty, "c": novelty, "s": success}[self.score])

    def learn(self, state: Tables, assignment: Assignment, result: ClientResult, seconds: float) -> Tables:
        """Update the tables (Alg. 1 lines 12-26)."""
        client, sent = assignment.client, assignment.level
        failed = not isinstance(result, ClientUpdate)
        back = result.level if isinstance(result, ClientUpdate) and result.level is not None else sent
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
        return {"curiosity": rows_of(curiosity), "resource": rows_of(resource)}

    def _type(self, model: int, models: int) -> int:
        """Return the type of a model. With p = 3 and seven models, types 0, 1 and 2 are AdaptiveFL's S, M and L."""
        return model // self.per_type if model < models - 1 else (models - 2) // self.per_type + 1
