"""The fleet: devices in tiers, their free memory, and the time of their work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ConfigError, did_you_mean
from fl_engine.core.types import Device
from fl_engine.core.widths import hidden, prefix


@dataclass(frozen=True)
class Tier:
    """A class of devices: its share of the fleet, its capacity r_M in % of the full model's parameters, and the spreads
    (`sigma`) of which each device draws one.

    A device has r_M - |N(0, sigma)| free (FlexFL), or with `limits` N(r_M, sigma) clipped to them (AdaptiveFL). `speed`
    in 10^9 multiply-adds per second and `bandwidth` in 10^6 bits per second drive the simulated clock. Those of the
    named fleets are assumed for a Raspberry Pi 4, a Jetson Nano and a Jetson Xavier, not measured.

    Departs from the paper: Tables I and V print sigma^2. As variances, a strong device would hardly ever be short of
    memory. The authors' code uses the values as standard deviations, and so does this.
    """

    name: str
    share: float
    memory: float
    sigma: tuple[float, ...] = (0.0,)
    limits: tuple[float, float] | None = None
    speed: float = 10.0
    bandwidth: float = 30.0
    width: float | None = None
    """The width ratio of a sub-model that these devices hold, in (0, 1]: r_M is at least what that sub-model needs.
    null: r_M is `memory`."""


# ------------------------------------------------------------------------------------------- named fleets
def _thirds(shares: Sequence[float], sigma: tuple[float, ...]) -> tuple[Tier, ...]:
    """Return FlexFL's weak, medium and strong devices (Table I)."""
    total = sum(shares)
    weak, medium, strong = (s / total for s in shares)
    return (
        Tier("weak", weak, 35.0, sigma, speed=2.0),
        Tier("medium", medium, 60.0, sigma, speed=20.0),
        Tier("strong", strong, 110.0, sigma, speed=200.0),
    )


def _gaussian(full: float, rows: Mapping[str, tuple[int, int, int, int]]) -> tuple[Tier, ...]:
    """Return AdaptiveFL's devices: mean, spread, minimum and maximum of free memory, in the unit of `full`, the size of
    the full model."""
    return tuple(
        Tier(name, share, 100 * mean / full, (100 * sigma / full,), (100 * low / full, 100 * high / full), speed)
        for (name, (mean, sigma, low, high)), share, speed in zip(
            rows.items(), (0.4, 0.3, 0.3), (2.0, 20.0, 200.0), strict=True
        )
    )


def _widths(shares: Mapping[str, float]) -> tuple[Tier, ...]:
    """Return FedRolex's devices, by the width of the model that they can hold. A width of beta takes about beta^2 of
    the parameters; the first and the last layer add a little, hence the margin. In small networks the devices hold what
    the width really takes."""
    capacity = {"1": 1.0, "1/2": 1 / 2, "1/4": 1 / 4, "1/8": 1 / 8, "1/16": 1 / 16}
    return tuple(
        Tier(name, share, 125 * capacity[name] ** 2, speed=200.0 * capacity[name] ** 2, width=capacity[name])
        for name, share in shares.items()
    )


def _aiot(kind: str, training_mb: float, sizes: Sequence[str], speed: float) -> tuple[Tier, ...]:
    """Return the devices of a row of FedAIoT's Table 2.7 in equal shares: one with the least memory that it names, one
    with the most. r_M is that memory in % of the training memory of the row's network (Table 2.6, float32). Speeds are
    assumed."""
    units = {"mb": 1.0, "gb": 1024.0}
    return tuple(
        Tier(f"{kind}-{size}", 1 / len(sizes), 100 * float(size[:-2]) * units[size[-2:]] / training_mb, speed=speed)
        for size in sizes
    )


_TABLE_I = (5.0, 8.0, 10.0)

FLEETS: dict[str, tuple[Tier, ...]] = {
    # FlexFL Tables I, V and VII: proportions of weak, medium and strong devices; spreads.
    "4:3:3": _thirds((4, 3, 3), _TABLE_I),
    "8:1:1": _thirds((8, 1, 1), _TABLE_I),
    "1:8:1": _thirds((1, 8, 1), _TABLE_I),
    "1:1:8": _thirds((1, 1, 8), _TABLE_I),
    "conf1": _thirds((4, 3, 3), (0.0,)),
    "conf2": _thirds((4, 3, 3), _TABLE_I),
    "conf3": _thirds((4, 3, 3), (10.0, 20.0, 30.0)),
    # FlexFL Table VIII, the 17 devices of its test bed: Raspberry Pi 4B (2 GB), Jetson Nano (8 GB) and Jetson Xavier
    # AGX (32 GB). Their kinds and numbers are printed. Assumed: r_M and the spreads, which are Table I's for weak,
    # medium and strong devices, since the paper does not say how many parameters a device can hold; the speeds, which
    # are those of the other fleets; and the bandwidth.
    "flexfl_testbed": (
        Tier("pi-4b", 4 / 17, 35.0, _TABLE_I, speed=2.0),
        Tier("jetson-nano", 10 / 17, 60.0, _TABLE_I, speed=20.0),
        Tier("xavier-agx", 3 / 17, 110.0, _TABLE_I, speed=200.0),
    ),
    # AdaptiveFL Sec. 4.1 (code): million parameters of its VGG16; for ResNet18 MB of its parameters in float32.
    "adaptivefl": _gaussian(33.646666, {"weak": (8, 1, 6, 11), "medium": (16, 1, 13, 19), "strong": (35, 2, 25, 40)}),
    "adaptivefl_resnet18": _gaussian(
        4 * 11.378186, {"weak": (11, 1, 9, 14), "medium": (22, 1, 19, 25), "strong": (48, 2, 42, 55)}
    ),
    # FedRolex Sec. 3.3.1 and Fig. 3.7.
    "capacities": _widths(dict.fromkeys(("1", "1/2", "1/4", "1/8", "1/16"), 0.2)),
    "real_world": _widths({"1": 0.06, "1/2": 0.10, "1/4": 0.11, "1/8": 0.18, "1/16": 0.55}),
    # FedAIoT (Alam, Michigan State University 2023) Table 2.7, by data set: Apple Watch 8, iPhone 14, TP-Link AX1800,
    # Raspberry Pi 4, the same on a DJI Mavic 3, and headsets.
    "fedaiot_wisdm_watch": _aiot("watch", 1444, ("512mb", "1gb"), 5.0),
    "fedaiot_wisdm_phone": _aiot("phone", 1444, ("6gb",), 200.0),
    "fedaiot_uthar": _aiot("router", 1716, ("64mb", "1gb"), 1.0),
    "fedaiot_widar": _aiot("router", 1734, ("64mb", "1gb"), 1.0),
    "fedaiot_casas": _aiot("pi4", 1834, ("1gb", "8gb"), 2.0),
    "fedaiot_aep": _aiot("pi4", 1201, ("1gb", "8gb"), 2.0),
    "fedaiot_visdrone": _aiot("drone", 8369, ("1gb", "8gb"), 2.0),
    "fedaiot_epic_sounds": _aiot("headset", 2176, ("1gb", "8gb"), 20.0),
}
"""Fleets that `fleet.tiers` can name."""
DEFAULT = FLEETS["4:3:3"]
"""The default fleet."""


def named(name: str) -> tuple[Tier, ...]:
    if name not in FLEETS:
        raise ConfigError(
            f"no fleet named {name!r}{did_you_mean(name, FLEETS)}: fleet.tiers is a list of tiers, or one of "
            f"{', '.join(FLEETS)}"
        )
    return FLEETS[name]


# ------------------------------------------------------------------------------------------------ devices
def fleet(
    tiers: Sequence[Tier] | str,
    clients: int,
    seed: int,
    family: ModelFamily | None = None,
    smallest: int | None = None,
) -> tuple[Device, ...]:
    """Return one device per client. Shares are met to the nearest device (largest remainder). The seed decides which
    client is which, so every algorithm of a comparison has the same fleet.

    `family` is the trained network, for tiers with a `width`. `smallest` is the number of parameters of the smallest
    model that is sent, which every device of the default fleet can hold. Without them, r_M is `memory`. Raises
    ConfigError for impossible tiers.
    """
    tiers = named(tiers) if isinstance(tiers, str) else tiers
    if not tiers:
        raise ConfigError("fleet.tiers is empty: give at least one tier")
    for t in tiers:
        _check(t)
    names = [t.name for t in tiers]
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"fleet.tiers: two tiers are named {again[0]!r}; names must differ")
    tiers = tiers if family is None else holding(tiers, family, smallest)
    if abs(sum(t.share for t in tiers) - 1) > 1e-6:
        shares = ", ".join(f"{t.name} {t.share}" for t in tiers)
        raise ConfigError(f"the shares of fleet.tiers must add up to 1, got {shares}")
    rng = seeds.rng(seed, "fleet")
    counts = quotas([t.share for t in tiers], clients)
    members = [tier for tier, count in zip(tiers, counts, strict=True) for _ in range(count)]
    order = rng.permutation(clients)
    by_client = {int(c): tier for c, tier in zip(order, members, strict=True)}
    return tuple(device_of(c, by_client[c], float(rng.choice(by_client[c].sigma))) for c in range(clients))


def quotas(shares: Sequence[float], clients: int) -> list[int]:
    """Return the number of clients of each share, by the largest remainder."""
    counts = [int(share * clients + 1e-9) for share in shares]
    remainders = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * clients)
    for i in remainders[: max(0, clients - sum(counts))]:
        counts[i] += 1
    # Shares that only nearly add up to 1 leave several of many clients over, or are several too many.
    counts[counts.index(max(counts))] += clients - sum(counts)
    return counts


def _check(t: Tier) -> None:
    if not t.name.strip():
        raise ConfigError(f"fleet.tiers: a tier has no name ({t})")
    finite = all(math.isfinite(value) for value in (t.share, t.memory, t.speed, t.bandwidth, *t.sigma))
    if not finite or t.share < 0 or t.memory <= 0 or not t.sigma or min(t.sigma) < 0:
        raise ConfigError(f"fleet tier {t.name!r} must have share >= 0, memory > 0 and sigma >= 0, got {t}")
    if t.speed <= 0 or t.bandwidth <= 0:
        raise ConfigError(
            f"fleet tier {t.name!r}: speed and bandwidth must be above 0, got {t.speed} and {t.bandwidth}"
        )
    if t.width is not None and (not 0 < t.width <= 1 or t.limits is not None):
        raise ConfigError(
            f"fleet tier {t.name!r}: width must be in (0, 1] and excludes limits, got {t.width} and {t.limits}"
        )
    if t.limits is not None and not 0 <= t.limits[0] <= t.memory <= t.limits[1]:
        raise ConfigError(f"fleet tier {t.name!r}: limits (low, high) must enclose memory = {t.memory}, got {t.limits}")


def holding(tiers: Sequence[Tier], family: ModelFamily, smallest: int | None = None) -> list[Tier]:
    """Return the tiers with enough memory for a sub-model of their `width`, and in the default fleet for a model of
    `smallest` parameters."""
    layout, is_default = family.layout(), tuple(tiers) == DEFAULT
    found = []
    for t in tiers:
        if t.width is not None and hidden(layout):
            t = at_least(t, count_params(family, prefix(layout, t.width)), family)
        if smallest is not None and is_default:
            t = at_least(t, smallest, family)
        found.append(t)
    return found


def at_least(t: Tier, params: int, family: ModelFamily) -> Tier:
    """Return the tier with memory for at least `params` parameters, plus half a parameter, because a device must have
    more free than a model takes."""
    return replace(t, memory=max(t.memory, 100 * (params + 0.5) / count_params(family)))


def device_of(client: int, tier: Tier, sigma: float = 0.0) -> Device:
    """Return a device of the tier. `sigma` is the spread of its free memory."""
    device = Device(client, tier.name, tier.memory, sigma, tier.limits)
    return replace(device, speed=tier.speed * 1e9, bandwidth=tier.bandwidth * 1e6 / 8)


def observe(device: Device, seed: int, round: int) -> float:
    """Return the free memory, drawn for each round: r = r_M - |u|, u ~ N(0, sigma^2), at least 0 (FlexFL Sec. IV-A1),
    or N(r_M, sigma^2) within the device's limits (AdaptiveFL)."""
    u = seeds.rng(seed, "observe", round, device.client).normal(0.0, device.sigma) if device.sigma > 0 else 0.0
    if device.limits is not None:
        low, high = device.limits
        return min(max(device.memory + float(u), low), high)
    return max(0.0, device.memory - abs(float(u)))


class Took(NamedTuple):
    """Seconds of an assignment on the simulated clock."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


def simulated_seconds(device: Device, macs: float, transferred: int) -> Took:
    """Return the time to train `macs` multiply-adds and to transfer `transferred` bytes, both ways together."""
    return Took(macs / device.speed, transferred / device.bandwidth)
