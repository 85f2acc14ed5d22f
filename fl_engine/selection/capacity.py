"""What selectors have in common: how many clients a round has, and what devices can hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

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


def level_of(device: Device, pool: Pool) -> int | None:
    """The model that a device uses: its tier's, else the largest of those sent that it can hold; None: it can hold
    none."""
    tiers = by_tier(pool)
    if device.tier in tiers:
        return tiers[device.tier][0]
    return max((i for i in dispatched(pool) if holds(device, pool[i].share)), default=None)


def check_capacity(fleet: Sequence[Device], pool: Pool) -> None:
    """For selections that ask those devices alone that can hold a model. Tells, as a warning with the numbers, of tiers
    whose devices hold none of those sent, and of models sent that no device holds. Raises ConfigError where no device
    holds any."""
    sent = [pool[i] for i in dispatched(pool)]
    if not any(holds(d, sent[0].share) for d in fleet):
        raise ConfigError(
            f"no device of the fleet can hold {sent[0].name}, the smallest model sent ({100 * sent[0].share:.1f} % of "
            f"the full one): the strongest holds {max(d.most for d in fleet):.4g} %. Make the fleet stronger or "
            "the models smaller"
        )
    if idle := [d for d in fleet if level_of(d, pool) is None]:
        log.warning(
            "fleet: these tiers are never asked, because they hold less of the full model than the %.4g %% that %s, "
            "the smallest model sent, takes: %s. Give them more memory, or send a smaller model",
            100 * sent[0].share, sent[0].name, _said_of(idle, fleet),
        )  # fmt: skip
    most = max(d.most for d in fleet)
    unheld = [f"{m.name} ({100 * m.share:.4g} %)" for m in sent if not any(holds(d, m.share) for d in fleet)]
    if unheld:
        log.warning(
            "fleet: no device can hold %s: the strongest holds %.4g %% of the full model. They are never sent",
            ", ".join(unheld), most,
        )  # fmt: skip


def tell_of_too_weak(fleet: Sequence[Device], pool: Pool) -> None:
    """For selections that ask devices whatever they can hold. Tells, as a warning with the numbers, of tiers whose
    devices cannot hold the smallest model. A method that sends the full model alone ignores memory on purpose."""
    tiers = by_tier(pool)
    weak = [d for d in fleet if d.tier not in tiers and not holds(d, pool[0].share)]
    if weak and len(dispatched(pool)) > 1:
        log.warning(
            "fleet: these tiers hold less of the full model than the %.4g %% that %s, the smallest, takes, and are "
            "asked all the same, since the selection does not look at what devices hold: %s. Give them more memory, "
            "or let the selection go by capacity",
            100 * pool[0].share, pool[0].name, _said_of(weak, fleet),
        )  # fmt: skip


def _said_of(some: Sequence[Device], fleet: Sequence[Device]) -> str:
    """The tiers of some devices, the weakest first: which of them comes first in the fleet is drawn."""
    of = {tier: [d.most for d in some if d.tier == tier] for tier in dict.fromkeys(d.tier for d in some)}
    return ", ".join(
        f"{tier} ({len(of[tier])} of {len(fleet)} devices, {max(of[tier]):.4g} %)"
        for tier in sorted(of, key=lambda tier: max(of[tier]))
    )
