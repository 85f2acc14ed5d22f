"""What selectors share: draws of clients, the number of clients in a round, and models that fit into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Options
from fl_engine.core.types import Codecs, Device, Pool, RoundContext

log = logging.getLogger("flexfleet")

Rows = tuple[tuple[float, ...], ...]
"""A table of `types.Tables`."""
Clients = Sequence[int] | np.ndarray


def rows_of(table: np.ndarray) -> Rows:
    return tuple(tuple(row) for row in table.tolist())


@dataclass(frozen=True)
class Draws(Options):
    """Base class for selectors, with the option that all selectors share."""

    name: str = ""
    draws: Literal["position", "keyed"] = "position"
    """`position`: draw from the list of available clients. If a client is missing, all other draws may change. `keyed`:
    each client's random number depends only on the seed, the round and the client, so other draws hardly change."""

    def arrivals(self, context: RoundContext, clients: Clients, rng: np.random.Generator) -> Any:
        """Return an exponentially distributed number for each client (N,). The k smallest numbers divided by weights
        are k weighted draws without replacement."""
        if self.draws == "position":
            return rng.exponential(size=len(clients))
        return rng.exponential(size=context.fleet[-1].client + 1)[np.asarray(clients, dtype=int)]

    def drawn(self, context: RoundContext, clients: Clients, count: int, rng: np.random.Generator) -> Any:
        """Draw at most `count` clients uniformly, and return their indices in `clients`."""
        if self.draws == "position":
            return rng.choice(len(clients), size=min(count, len(clients)), replace=False)
        return np.argsort(self.arrivals(context, clients, rng))[:count]


def round_size(fraction: float, clients: int) -> int:
    """Return the number of clients in a round, k = max(1, f * K) (FlexFL Alg. 2 line 7)."""
    return max(1, int(fraction * clients + 1e-9))


def holds(device: Device, share: float) -> bool:
    """Return whether a model of `share` times the full model's size fits into the device's maximum memory."""
    return device.most > 100 * share


def able(devices: Iterable[Device], share: float) -> list[Device]:
    """Return the devices whose maximum memory can hold a model of `share` times the full model's size."""
    return [device for device in devices if holds(device, share)]


def dispatched(pool: Pool) -> list[int]:
    """Return the indices of the models that the server may send, in ascending order of size."""
    return [i for i, m in enumerate(pool) if m.dispatched]


def by_tier(pool: Pool) -> dict[str, tuple[int, Codecs | None]]:
    """Map each tier with an assigned model to the index of the model and the codecs of the tier."""
    return {tier: (i, codecs) for i, model in enumerate(pool) for tier, codecs in model.tiers}


def level_of(device: Device, pool: Pool) -> int:
    """Return the level of the device's tier. If the tier has no assigned level, return the largest level that fits, or
    the smallest level if no level fits."""
    tiers = by_tier(pool)
    if device.tier in tiers:
        return tiers[device.tier][0]
    smallest, *larger = dispatched(pool)
    return max((i for i in larger if holds(device, pool[i].share)), default=smallest)


def eligible(algorithm: Any, devices: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """Return the devices that the algorithm may select. With `eligible=capable`, only devices that can hold the
    smallest model are eligible."""
    if getattr(algorithm, "eligible", "all") != "capable":
        return tuple(devices)
    return tuple(able(devices, pool[dispatched(pool)[0]].share))


def check_eligible(algorithm: Any, fleet: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """Return the eligible devices. Raises ConfigError if no device is eligible."""
    if found := eligible(algorithm, fleet, pool):
        return found
    raise ConfigError.at(f"algorithm.eligible must be all, because {_too_weak(fleet, pool)}")


def check_capacity(fleet: Sequence[Device], pool: Pool) -> None:
    """Raise ConfigError if a tier cannot hold any model and would never be selected. Log a warning about models that no
    device can hold."""
    if weak := _too_weak(fleet, pool):
        raise ConfigError.at(
            f"fleet.tiers: {weak}, so the devices of these tiers would never train. Increase the tiers' memory, or set "
            "algorithm.selection={name: uniform}"
        )
    most = max(d.most for d in fleet)
    models = [pool[i] for i in dispatched(pool)]
    if unheld := [f"{m.name} ({100 * m.share:.4g} %)" for m in models if not any(holds(d, m.share) for d in fleet)]:
        message = "fleet: %s are never sent, because the largest capacity is %.4g %% of the full model"
        log.warning(message, ", ".join(unheld), most)


def warn_too_weak(fleet: Sequence[Device], pool: Pool) -> None:
    """Log a warning if a tier cannot hold the smallest model. Selectors that draw from all devices call this function.
    Algorithms that send only the full model ignore memory on purpose, so no warning is logged for them."""
    if len(dispatched(pool)) > 1 and (weak := _too_weak(fleet, pool)):
        log.warning(
            "fleet: %s. Devices of these tiers are still selected. Increase the tiers' memory, or send a smaller model",
            weak,
        )


def _too_weak(fleet: Sequence[Device], pool: Pool) -> str:
    """Return a description of the devices that cannot hold any sent model; empty if there are none. Tiers with an
    assigned model are not checked."""
    tiers, smallest = by_tier(pool), pool[dispatched(pool)[0]]
    weak: dict[str, list[float]] = {}
    for d in fleet:
        if d.tier not in tiers and not holds(d, smallest.share):
            weak.setdefault(d.tier, []).append(d.most)
    if not weak:
        return ""
    each = [f"{t} ({len(own)} of {len(fleet)} devices, at most {max(own):.4g} %)" for t, own in weak.items()]
    need = f"requires memory for more than {100 * smallest.share:.4g} % of the full model"
    return f"the tiers {', '.join(each)} do not have memory for {smallest.name}, the smallest model, which {need}"


def tiers(speed: Sequence[float], bandwidth: Sequence[float], count: int, mu: float) -> list[int]:
    """Return the tier of each client, from 0 (the least capable clients) to `count` - 1.

    This is the Tier Clustering Algorithm, which selects the branch that a client trains ("Enhancing Communication
    Efficiency and Training Time Uniformity in Federated Learning through Multi-Branch Networks and the Oort Algorithm",
    Algorithms, MDPI, January 2024, Algorithm 1):

        T_i = mu * P_i + S_i        P: computation capability, S: communication bandwidth (lines 2 to 4)
        sort the clients by ascending T, and cut them into as many tiers as there are branches (lines 5 to 10).

    Departs from the paper: in line 7 of Algorithm 1, j runs from t to t + N/(K + 1), so neighbouring tiers overlap and
    most clients do not get a tier. Here each client gets one tier, and tier sizes differ by at most one client, as in
    the paper's text ("grouped into K + 1 groups"). The paper does not define the units of P and S. Here P and S are
    min-max normalised over the clients of the round, or 0 if all values are equal.

    If there are fewer clients than tiers, the clients' tiers are evenly spaced and include the last tier.

    Args:
        speed: Finite speed of each client in any unit. Clients with equal T_i keep their order.
        bandwidth: Finite bandwidth of each client in any unit.
        count: Number of tiers.
        mu: Weight of the speed; at least 0.
    """
    total = mu * _normalised(speed) + _normalised(bandwidth)
    n, tier_of = len(speed), [0] * len(speed)
    for rank, client in enumerate(np.argsort(total, kind="stable"), 1):
        tier_of[client] = -(rank * count // -n) - 1  # this is ceil(rank * count / n) - 1
    return tier_of


def _normalised(values: Sequence[float]) -> np.ndarray:
    each = np.asarray(values, dtype=np.float64)
    low, high = each.min(initial=math.inf), each.max(initial=-math.inf)
    return np.asarray((each - low) / (high - low)) if low < high else np.zeros_like(each)
