"""The Tier Clustering Algorithm: which of a round's clients trains which branch of a network ("Enhancing Communication
Efficiency and Training Time Uniformity in Federated Learning through Multi-Branch Networks and the Oort Algorithm",
Algorithms, MDPI, January 2024, Algorithm 1).

    T_i = mu * P_i + S_i        P: computation capability, S: communication bandwidth (lines 2 to 4)
    the clients in ascending order of T, cut into as many tiers as there are branches (lines 5 to 10)

Departs from the paper: its line 7 lets j run from t to t + N/(K + 1), so that neighbouring tiers overlap and most
clients are in none. Here each client is in one tier, and tiers differ by at most one client, as its text says ("grouped
into K + 1 groups"). The paper does not give the units of P and S. Here each is min-max normalised over the clients of
the round, (v - min) / (max - min), or 0 if all are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def tiers(speed: Sequence[float], bandwidth: Sequence[float], count: int, mu: float) -> list[int]:
    """Return the tier of each client, 0 (the least capable) to `count` - 1.

    `speed` and `bandwidth` are finite, in any units, in client order; of equally capable clients the one with the lower
    number comes first. `mu` >= 0 is the weight of the speed.

    The most capable client is always in the last tier. Fewer clients than tiers are in the last one and in tiers at
    even distances below it (of ten tiers, 4 and 9 for two clients, 9 for one).
    """
    if len(speed) != len(bandwidth) or count < 1:
        raise ValueError(f"{len(speed)} speeds, {len(bandwidth)} bandwidths and {count} tiers make no tiers")
    total = mu * _normalised(speed) + _normalised(bandwidth)
    n, found = len(speed), [0] * len(speed)
    for place, client in enumerate(np.argsort(total, kind="stable")):
        found[client] = -((place + 1) * count // -n) - 1  # the rounded-up share of the clients up to this one
    return found


def _normalised(values: Sequence[float]) -> np.ndarray:
    each = np.asarray(values, dtype=np.float64)
    if each.size == 0:
        return each
    low, high = each.min(), each.max()
    return np.zeros_like(each) if low == high else np.asarray((each - low) / (high - low))
