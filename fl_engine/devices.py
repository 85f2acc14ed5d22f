"""The fleet: devices in tiers, and what a device has free at a given moment (FlexFL Tables I and V)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_engine import seeds
from fl_engine.errors import ConfigError
from fl_engine.types import Device


@dataclass(frozen=True)
class Tier:
    """A class of devices: its share of the fleet, its capacity r_M in % of the full model's parameters, and the
    spreads of which each device draws one, once.

    Departs from the paper: Tables I and V print sigma^2. As variances, a strong device would hardly ever be short
    of memory; the authors' code uses the values as standard deviations, and so do we.
    """

    name: str
    share: float
    memory: float
    sigma: tuple[float, ...] = (0.0,)


def fleet(tiers: Sequence[Tier], clients: int, seed: int) -> tuple[Device, ...]:
    """One device per client. Shares are met to the nearest device (largest remainder); which client is which is
    drawn from the seed, so every algorithm of a comparison meets the same fleet."""
    if not tiers:
        raise ConfigError("fleet.tiers is empty: give at least one tier")
    for t in tiers:
        finite = all(math.isfinite(value) for value in (t.share, t.memory, *t.sigma))
        if not finite or t.share < 0 or t.memory <= 0 or not t.sigma or min(t.sigma) < 0:
            raise ConfigError(f"fleet tier {t.name!r}: share >= 0, memory > 0 and sigma >= 0 are expected, got {t}")
    if abs(sum(t.share for t in tiers) - 1) > 1e-6:
        shares = ", ".join(f"{t.name} {t.share}" for t in tiers)
        raise ConfigError(f"the shares of fleet.tiers must add up to 1, got {shares}")
    counts = [int(t.share * clients + 1e-9) for t in tiers]
    remainders = sorted(range(len(tiers)), key=lambda i: counts[i] - tiers[i].share * clients)
    for i in remainders[: clients - sum(counts)]:
        counts[i] += 1
    rng = seeds.rng(seed, "fleet")
    members = [tier for tier, count in zip(tiers, counts, strict=True) for _ in range(count)]
    order = rng.permutation(clients)
    by_client = {int(c): tier for c, tier in zip(order, members, strict=True)}
    return tuple(
        Device(c, by_client[c].name, by_client[c].memory, float(rng.choice(by_client[c].sigma)))
        for c in range(clients)
    )


def observe(device: Device, seed: int, round: int) -> float:
    """Free resources r = r_M - |u|, u ~ N(0, sigma^2), at least 0, redrawn for each dispatch (Sec. IV-A1)."""
    u = seeds.rng(seed, "observe", round, device.client).normal(0.0, device.sigma) if device.sigma > 0 else 0.0
    return max(0.0, device.memory - abs(float(u)))
