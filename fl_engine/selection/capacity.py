"""What selectors have in common: how many clients a round has, and what devices can hold."""

from __future__ import annotations

from collections.abc import Sequence

from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Codecs, Device, Pool


def round_size(fraction: float, clients: int) -> int:
    """k = max(1, f * K) (FlexFL Alg. 2 line 7)."""
    return max(1, int(fraction * clients + 1e-9))


def holds(device: Device, share: float) -> bool:
    """Whether a device can hold a model of this share of the full one when it has the most free."""
    return device.most > 100 * share


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


def someone_holds(fleet: Sequence[Device], pool: Pool, level: int) -> None:
    if not any(holds(d, pool[level].share) for d in fleet):
        size = 100 * pool[level].share
        raise ConfigError(
            f"no device of the fleet can hold {pool[level].name}, the smallest model sent ({size:.1f} % of the full "
            "one): make the fleet stronger or the models smaller"
        )
