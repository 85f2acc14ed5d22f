"""The Tier Clustering Algorithm: which of a round's clients trains which branch of a network ("Enhancing Communication
Efficiency and Training Time Uniformity in Federated Learning through Multi-Branch Networks and the Oort Algorithm",
Algorithms, MDPI, January 2024, Algorithm 1).

    T_i = mu * P_i + S_i        P: computation capability, S: communication bandwidth (lines 2 to 4)
    the clients in ascending order of T, cut into as many tiers as there are branches (lines 5 to 10)

Departs from the paper: its line 7 lets j run from t to t + N/(K + 1), so that neighbouring tiers overlap and most
clients are in none; here each client is in one tier, and tiers differ by at most one client, as its text says ("grouped
into K + 1 groups"). It does not say in which units P and S are added; here each is min-max normalised over the clients
of the round, (v - min) / (max - min), so that mu compares like with like. Where all have the same, that is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def tiers(speed: Sequence[float], bandwidth: Sequence[float], count: int, mu: float) -> list[int]:
    """The tier of each client, 0 (the least capable) to `count` - 1. `speed` and `bandwidth` are finite, in any units,
    and of the same clients, in ascending order of their numbers: of equally capable ones, the one with the lower number
    comes first. `mu`: weight of the speed, at least 0; with 0 the bandwidth decides alone, with 1e6 in effect the
    speed.

    The most capable client is always in the last tier. So fewer clients than tiers are in the last one and in tiers at
    even distances below it (of ten tiers, 4 and 9 for two clients, 9 for one), and the tiers between stay empty.
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
