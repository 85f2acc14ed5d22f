"""Which clients take part in a round, and which pool model each is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_engine.errors import ConfigError
from fl_engine.types import Device, Pool

Pick = tuple[int, int]
"""(client, index of the pool model)"""


def round_size(fraction: float, clients: int) -> int:
    """k = max(1, f * K) (FlexFL Alg. 2 line 7)."""
    return max(1, int(fraction * clients + 1e-9))


def holds(device: Device, share: float) -> bool:
    """Whether a device can hold a model of this share of the full one at its maximum capacity."""
    return device.memory > 100 * share


def resource_table(rng: np.random.Generator, fleet: Sequence[Device], pool: Pool, k: int) -> list[Pick]:
    """FlexFL's selection: draw a level uniformly, then a device that can hold it at its maximum capacity.

    Departs from the paper, which only names a resource table, and from the authors' code, which has the class
    limits written for 17 devices and redraws everything until the devices are distinct: here a device is drawn
    uniformly among those not yet chosen whose capacity allows the level, and a level for which none is left is
    not drawn. Returns k picks in client order (fewer when fewer devices can hold anything).
    """
    levels = [i for i, m in enumerate(pool) if m.dispatched]
    if not any(holds(d, pool[levels[0]].share) for d in fleet):
        raise ConfigError(f"no device of the fleet can hold the smallest model ({100 * pool[levels[0]].share:.1f} %)")
    picks: list[Pick] = []
    chosen: set[int] = set()
    while len(picks) < k:
        free = {
            level: [d.client for d in fleet if d.client not in chosen and holds(d, pool[level].share)]
            for level in levels
        }
        open_levels = [level for level in levels if free[level]]
        if not open_levels:
            break
        level = int(rng.choice(open_levels))
        client = int(rng.choice(free[level]))
        chosen.add(client)
        picks.append((client, level))
    return sorted(picks)


def uniform(rng: np.random.Generator, clients: Sequence[int], level: int, k: int) -> list[Pick]:
    """k distinct clients, each with the same chance, all sent the same model. In client order."""
    drawn = rng.choice(np.asarray(clients), size=min(k, len(clients)), replace=False)
    return [(int(c), level) for c in sorted(drawn)]
