"""Functions that selectors share: the number of clients in a round, and which models devices can hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Codecs, Device, Pool

log = logging.getLogger("flexfleet")

LEAST = 1e-9
"""The value of `lacks` for a device that has exactly a model's size free: more must be free."""


def round_size(fraction: float, clients: int) -> int:
    """Return k = max(1, f * K) (FlexFL Alg. 2 line 7)."""
    return max(1, int(fraction * clients + 1e-9))


def holds(device: Device, share: float) -> bool:
    """Return whether a device at its maximum capacity can hold a model of this share of the full one."""
    return device.most > 100 * share


def lacks(device: Device, share: float) -> float:
    """Return how many points (% of the full model) a device at its maximum capacity lacks to hold a model of this
    share; above 0 exactly if it cannot hold it."""
    points = 100 * share - device.most
    return points if holds(device, share) else max(points, LEAST)


def able(devices: Iterable[Device], share: float) -> list[Device]:
    """Return the devices that can hold a model of this share of the full one."""
    need = 100 * share
    return [device for device in devices if device.most > need]


def dispatched(pool: Pool) -> list[int]:
    """Return the indices of the models that the server sends, smallest first."""
    return [i for i, m in enumerate(pool) if m.dispatched]


def by_tier(pool: Pool) -> dict[str, tuple[int, Codecs | None]]:
    """Map each tier that has a model of its own to the model and the codecs; empty: the selection decides."""
    return {tier: (i, codecs) for i, model in enumerate(pool) for tier, codecs in model.tiers}


def level_of(device: Device, pool: Pool) -> int:
    """Return the model of a device: its tier's, else the largest sent that it can hold, else the smallest."""
    tiers = by_tier(pool)
    if device.tier in tiers:
        return tiers[device.tier][0]
    smallest, *larger = dispatched(pool)
    return max((i for i in larger if holds(device, pool[i].share)), default=smallest)


def eligible(algorithm: Any, devices: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """Return the devices that the algorithm may ask: all, or with `eligible=capable` those that can hold its smallest
    model."""
    if getattr(algorithm, "eligible", "all") != "capable":
        return tuple(devices)
    return tuple(able(devices, pool[dispatched(pool)[0]].share))


def check_eligible(algorithm: Any, fleet: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """Return the devices that the algorithm may ask. Raises ConfigError if there are none."""
    if found := eligible(algorithm, fleet, pool):
        return found
    smallest = pool[dispatched(pool)[0]]
    raise ConfigError(
        f"algorithm.eligible=capable needs devices that can hold {smallest.name} ({100 * smallest.share:.4g} % of the "
        f"full model), and the largest holds {max(d.most for d in fleet):.4g} %. Set algorithm.eligible=all"
    )


def check_capacity(fleet: Sequence[Device], pool: Pool) -> None:
    """Check a fleet for selections that ask only devices that can hold a model. Raises ConfigError if a tier would
    never train. Logs a warning about models that no device can hold."""
    smallest = pool[dispatched(pool)[0]]
    if idle := too_weak(fleet, pool):
        raise ConfigError(
            f"fleet.tiers: these devices would never train: {_said_of(idle, fleet)}. {smallest.name}, the smallest "
            f"model sent, needs more than {100 * smallest.share:.4g} %. Give these tiers more memory, or set "
            "algorithm.selection={name: uniform}"
        )
    most = max(d.most for d in fleet)
    sent = [pool[i] for i in dispatched(pool)]
    unheld = [f"{m.name} ({100 * m.share:.4g} %)" for m in sent if not any(holds(d, m.share) for d in fleet)]
    if unheld:
        log.warning(
            "fleet: no device can hold %s: the strongest holds %.4g %% of the full model. They are never sent",
            ", ".join(unheld), most,
        )  # fmt: skip


def tell_of_too_weak(fleet: Sequence[Device], pool: Pool) -> None:
    """Log a warning about tiers that cannot hold the smallest model, for selections that ask all devices. A method that
    sends only the full model ignores memory on purpose."""
    if len(dispatched(pool)) > 1 and (weak := too_weak(fleet, pool)):
        smallest = pool[dispatched(pool)[0]]
        log.warning(
            "fleet: devices of these tiers are asked although %s, the smallest model sent, needs more than %.4g %% of "
            "the full one: %s. Give them more memory, or send a smaller model",
            smallest.name, 100 * smallest.share, _said_of(weak, fleet),
        )  # fmt: skip


def too_weak(fleet: Sequence[Device], pool: Pool) -> list[Device]:
    """Return the devices that can hold no model that is sent, except those of tiers with a model of their own."""
    tiers, least = by_tier(pool), pool[dispatched(pool)[0]].share
    return [d for d in fleet if d.tier not in tiers and not holds(d, least)]


def _said_of(some: Sequence[Device], fleet: Sequence[Device]) -> str:
    """Return a text about the tiers of some devices, the weakest first."""
    of = {tier: [d.most for d in some if d.tier == tier] for tier in dict.fromkeys(d.tier for d in some)}
    return ", ".join(
        f"{tier} ({len(of[tier])} of {len(fleet)} devices, {max(of[tier]):.4g} %)"
        for tier in sorted(of, key=lambda tier: max(of[tier]))
    )
