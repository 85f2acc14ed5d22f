"""What selectors have in common: how many clients a round has, and what devices can hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Codecs, Device, Pool

log = logging.getLogger("flexfleet")

LEAST = 1e-9
"""`lacks`, in points, of a device that has exactly a model's size free: to fit, more must be free."""


def round_size(fraction: float, clients: int) -> int:
    """k = max(1, f * K) (FlexFL Alg. 2 line 7)."""
    return max(1, int(fraction * clients + 1e-9))


def holds(device: Device, share: float) -> bool:
    """Whether a device can hold a model of this share of the full one when it has the most free."""
    return device.most > 100 * share


def lacks(device: Device, share: float) -> float:
    """How many points (% of the full model) a device at its maximum capacity lacks to hold a model of this share of the
    full one; above 0 exactly where it cannot hold it."""
    points = 100 * share - device.most
    return points if holds(device, share) else max(points, LEAST)


def able(devices: Iterable[Device], share: float) -> list[Device]:
    """Those that can hold a model of this share of the full one."""
    need = 100 * share
    return [device for device in devices if device.most > need]


def dispatched(pool: Pool) -> list[int]:
    """Indices of the models that the server sends, smallest first."""
    return [i for i, m in enumerate(pool) if m.dispatched]


def by_tier(pool: Pool) -> dict[str, tuple[int, Codecs | None]]:
    """By tier, the model that its devices are sent, and the codecs; empty: the selection decides."""
    return {tier: (i, codecs) for i, model in enumerate(pool) for tier, codecs in model.tiers}


def level_of(device: Device, pool: Pool) -> int:
    """The model that a device uses: its tier's, else the largest of those sent that it can hold, else the smallest."""
    tiers = by_tier(pool)
    if device.tier in tiers:
        return tiers[device.tier][0]
    smallest, *larger = dispatched(pool)
    return max((i for i in larger if holds(device, pool[i].share)), default=smallest)


def eligible(algorithm: Any, devices: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """The devices that the algorithm may ask: all of them, or, if its `eligible` is `capable`, those that can hold its
    smallest model."""
    if getattr(algorithm, "eligible", "all") != "capable":
        return tuple(devices)
    return tuple(able(devices, pool[dispatched(pool)[0]].share))


def check_eligible(algorithm: Any, fleet: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """The devices of the fleet that the algorithm may ask. Raises ConfigError if there are none."""
    if found := eligible(algorithm, fleet, pool):
        return found
    smallest = pool[dispatched(pool)[0]]
    raise ConfigError(
        f"algorithm.eligible=capable asks only devices that can hold {smallest.name}, which is "
        f"{100 * smallest.share:.4g} % of the full model, but the largest device of the fleet holds "
        f"{max(d.most for d in fleet):.4g} %. Set algorithm.eligible=all, or give a tier of fleet.tiers more memory"
    )


def check_capacity(fleet: Sequence[Device], pool: Pool) -> None:
    """For selections that ask only devices that can hold a model. Raises ConfigError if a tier has devices that can
    hold none, because these would never train. Logs a warning about models that no device can hold."""
    smallest = pool[dispatched(pool)[0]]
    if idle := too_weak(fleet, pool):
        raise ConfigError(
            f"fleet.tiers: some devices would never train, because {smallest.name}, the smallest model sent, needs "
            f"more than {100 * smallest.share:.4g} % of the full one: {_said_of(idle, fleet)}. Give these tiers more "
            "memory, send a smaller model, or set algorithm.selection={name: uniform}, with which these devices train "
            f"{smallest.name} all the same"
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
    """For selections that ask all devices. Logs a warning about tiers whose devices cannot hold the smallest model. A
    method that sends the full model alone ignores memory on purpose."""
    if len(dispatched(pool)) > 1 and (weak := too_weak(fleet, pool)):
        smallest = pool[dispatched(pool)[0]]
        log.warning(
            "fleet: devices of these tiers are asked although %s, the smallest model sent, needs more than %.4g %% of "
            "the full one: %s. Give them more memory, or send a smaller model",
            smallest.name, 100 * smallest.share, _said_of(weak, fleet),
        )  # fmt: skip


def too_weak(fleet: Sequence[Device], pool: Pool) -> list[Device]:
    """The devices that can hold no model that is sent. A tier that has a model of its own is never too weak: the
    algorithm has checked it."""
    tiers, least = by_tier(pool), pool[dispatched(pool)[0]].share
    return [d for d in fleet if d.tier not in tiers and not holds(d, least)]


def _said_of(some: Sequence[Device], fleet: Sequence[Device]) -> str:
    """The tiers of some devices, the weakest first: which of them comes first in the fleet is drawn."""
    of = {tier: [d.most for d in some if d.tier == tier] for tier in dict.fromkeys(d.tier for d in some)}
    return ", ".join(
        f"{tier} ({len(of[tier])} of {len(fleet)} devices, {max(of[tier]):.4g} %)"
        for tier in sorted(of, key=lambda tier: max(of[tier]))
    )
