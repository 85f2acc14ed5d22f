"""Create a fleet of devices in tiers, and simulate the devices' free memory and training time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ConfigError, nearest
from fl_engine.core.types import Device
from fl_engine.core.widths import hidden, prefix


@dataclass(frozen=True)
class Tier:
    """A class of devices. `share` is the fraction of the fleet, and `memory` is the capacity r_M in % of the full
    model's parameters. Each device's standard deviation is drawn at random from `sigma`.

    The free memory of a device is r_M - |N(0, sigma)| (FlexFL), or N(r_M, sigma) clipped to `limits` (AdaptiveFL). The
    simulated clock uses `speed` in 10^9 multiply-adds per second and `bandwidth` in 10^6 bits per second. The named
    fleets use assumed values for a Raspberry Pi 4, a Jetson Nano and a Jetson Xavier.

    Departs from the paper: Tables I and V call the values sigma^2, but with these variances a strong device would
    hardly ever be short of memory. Here the values are standard deviations, as in the authors' code.
    """

    name: str
    share: float
    memory: float
    sigma: tuple[float, ...] = (0.0,)
    limits: tuple[float, float] | None = None
    speed: float = 10.0
    bandwidth: float = 30.0
    watts: tuple[float, float] | None = None
    """Power of a device while it computes and while it transfers, in W; null: unknown, so energy is not reported."""
    width: float | None = None
    """Width ratio in (0, 1] of a sub-model that must fit into these devices. The capacity r_M is then at least the size
    of this sub-model. With null, r_M is `memory`."""


def _thirds(
    shares: Sequence[float], sigma: tuple[float, ...], names: Sequence[str] = ("weak", "medium", "strong")
) -> tuple[Tier, ...]:
    """Return FlexFL's tiers of weak, medium and strong devices (Table I)."""
    rows = zip(names, shares, (35.0, 60.0, 110.0), (2.0, 20.0, 200.0), strict=True)
    return tuple(Tier(name, share / sum(shares), memory, sigma, speed=speed) for name, share, memory, speed in rows)


def _gaussian(full: float, rows: Mapping[str, tuple[int, int, int, int]]) -> tuple[Tier, ...]:
    """Return the tiers of AdaptiveFL. A row contains the mean, standard deviation, minimum and maximum of the free
    memory. All values have the same unit as `full`, the size of the full model."""
    listed = zip(rows.items(), (0.4, 0.3, 0.3), (2.0, 20.0, 200.0), strict=True)
    return tuple(
        Tier(name, share, 100 * mean / full, (100 * sigma / full,), (100 * low / full, 100 * high / full), speed)
        for (name, (mean, sigma, low, high)), share, speed in listed
    )


def _widths(shares: Mapping[str, float]) -> tuple[Tier, ...]:
    """Return the tiers of FedRolex. Each tier is named after the largest width ratio that fits. A model of width beta
    has about the fraction beta^2 of the parameters. The factor 1.25 accounts for the first and last layer. In small
    networks this factor may be too small, so `Tier.width` increases the capacity to the size of the sub-model."""
    capacity = {"1": 1.0, "1/2": 1 / 2, "1/4": 1 / 4, "1/8": 1 / 8, "1/16": 1 / 16}
    return tuple(
        Tier(name, share, 125 * capacity[name] ** 2, speed=200.0 * capacity[name] ** 2, width=capacity[name])
        for name, share in shares.items()
    )


def _aiot(kind: str, training_mb: float, sizes: Sequence[str], speed: float) -> tuple[Tier, ...]:
    """Return tiers with equal shares, one for each memory size in a row of FedAIoT's Table 2.7. The capacity r_M is the
    memory size in % of the memory for training the row's network (Table 2.6, float32). Speeds are assumed."""
    units = {"mb": 1.0, "gb": 1024.0}
    return tuple(
        Tier(f"{kind}-{size}", 1 / len(sizes), 100 * float(size[:-2]) * units[size[-2:]] / training_mb, speed=speed)
        for size in sizes
    )


_TABLE_I = (5.0, 8.0, 10.0)

FLEETS: dict[str, tuple[Tier, ...]] = {
    # FlexFL Tables I, V and VII give the proportions of the tiers and the standard deviations.
    "4:3:3": _thirds((4, 3, 3), _TABLE_I),
    "8:1:1": _thirds((8, 1, 1), _TABLE_I),
    "1:8:1": _thirds((1, 8, 1), _TABLE_I),
    "1:1:8": _thirds((1, 1, 8), _TABLE_I),
    "conf1": _thirds((4, 3, 3), (0.0,)),
    "conf2": _thirds((4, 3, 3), _TABLE_I),
    "conf3": _thirds((4, 3, 3), (10.0, 20.0, 30.0)),
    # FlexFL's test bed (Table VIII) consists of 17 devices of the types Raspberry Pi 4B (2 GB), Jetson Nano (8 GB) and
    # Jetson Xavier AGX (32 GB). The paper does not state how many parameters fit into a device's memory, so r_M and
    # sigma are the values of Table I for weak, medium and strong devices. Speeds and bandwidths are assumptions.
    "flexfl_testbed": _thirds((4, 10, 3), _TABLE_I, ("pi-4b", "jetson-nano", "xavier-agx")),
    # AdaptiveFL (Sec. 4.1, code) gives the memory for VGG16 in million parameters, and for ResNet18 in MB of float32.
    "adaptivefl": _gaussian(33.646666, {"weak": (8, 1, 6, 11), "medium": (16, 1, 13, 19), "strong": (35, 2, 25, 40)}),
    "adaptivefl_resnet18": _gaussian(
        4 * 11.378186, {"weak": (11, 1, 9, 14), "medium": (22, 1, 19, 25), "strong": (48, 2, 42, 55)}
    ),
    # FedRolex describes these fleets in Sec. 3.3.1 and Fig. 3.7.
    "capacities": _widths(dict.fromkeys(("1", "1/2", "1/4", "1/8", "1/16"), 0.2)),
    "real_world": _widths({"1": 0.06, "1/2": 0.10, "1/4": 0.11, "1/8": 0.18, "1/16": 0.55}),
    # FedAIoT (Alam, Michigan State University 2023) lists the device of each data set in Table 2.7.
    "fedaiot_wisdm_watch": _aiot("watch", 1444, ("512mb", "1gb"), 5.0),
    "fedaiot_wisdm_phone": _aiot("phone", 1444, ("6gb",), 200.0),
    "fedaiot_uthar": _aiot("router", 1716, ("64mb", "1gb"), 1.0),
    "fedaiot_widar": _aiot("router", 1734, ("64mb", "1gb"), 1.0),
    "fedaiot_casas": _aiot("pi4", 1834, ("1gb", "8gb"), 2.0),
    "fedaiot_aep": _aiot("pi4", 1201, ("1gb", "8gb"), 2.0),
    "fedaiot_visdrone": _aiot("drone", 8369, ("1gb", "8gb"), 2.0),
    "fedaiot_epic_sounds": _aiot("headset", 2176, ("1gb", "8gb"), 20.0),
}
"""Fleets that `fleet.tiers` accepts by name."""
DEFAULT = FLEETS["4:3:3"]
"""The default fleet."""


def named(name: str) -> tuple[Tier, ...]:
    if name not in FLEETS:
        message = f"fleet.tiers must be a list of tiers or a fleet's name, got {name!r}{nearest(name, FLEETS)}"
        raise ConfigError(message, code="config.unknown", path="fleet.tiers")
    return FLEETS[name]


def fleet(
    tiers: Sequence[Tier] | str, clients: int, seed: int, family: ModelFamily | None = None, smallest: int | None = None
) -> tuple[Device, ...]:
    """Return one device per client. The number of devices per tier is rounded by the largest remainder method. The seed
    determines each client's device, so all algorithms in a comparison use the same fleet.

    `family` is the network that clients train, which is required for tiers with a `width`. `smallest` is the number of
    parameters of the smallest model that the server sends. Every device in the default fleet gets enough memory for
    this model. Without `family` and `smallest`, r_M is `memory`. Raises ConfigError for invalid tiers.
    """
    tiers = named(tiers) if isinstance(tiers, str) else tiers
    for t in tiers:
        _check(t)
    if len({t.name for t in tiers}) < len(tiers):
        raise ConfigError("the names in fleet.tiers must all be unique", path="fleet.tiers")
    if abs(sum(t.share for t in tiers) - 1) > 1e-6:
        shares = ", ".join(f"{t.name} {t.share}" for t in tiers) or "no tiers"
        raise ConfigError(f"the shares in fleet.tiers must add up to 1, got {shares}", path="fleet.tiers")
    if len({t.watts is None for t in tiers}) > 1:
        raise ConfigError("watts must be set for all tiers in fleet.tiers, or for none", path="fleet.tiers")
    tiers = tiers if family is None else holding(tiers, family, smallest)
    rng = seeds.rng(seed, "fleet")
    counts = quotas([t.share for t in tiers], clients)
    members = [tier for tier, count in zip(tiers, counts, strict=True) for _ in range(count)]
    order = rng.permutation(clients)
    by_client = {int(c): tier for c, tier in zip(order, members, strict=True)}
    return tuple(device_of(c, by_client[c], float(rng.choice(by_client[c].sigma))) for c in range(clients))


def quotas(shares: Sequence[float], clients: int) -> list[int]:
    """Return the number of clients for each share, rounded by the largest remainder method."""
    counts = [int(share * clients + 1e-9) for share in shares]
    remainders = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * clients)
    for i in remainders[: max(0, clients - sum(counts))]:
        counts[i] += 1
    # The shares may not add up to exactly 1, so correct the largest count to make the total equal to `clients`.
    counts[counts.index(max(counts))] += clients - sum(counts)
    return counts


def _check(t: Tier) -> None:
    finite = all(math.isfinite(value) for value in (t.share, t.memory, t.speed, t.bandwidth, *t.sigma))
    positive = finite and min(t.memory, t.speed, t.bandwidth) > 0 and t.share >= 0 and min(t.sigma, default=-1) >= 0
    watts = t.watts is None or (min(t.watts) >= 0 and max(t.watts) < math.inf)
    for holds, rule in (
        (t.name.strip(), "have a name"),
        (positive, "have memory, speed and bandwidth above 0, and a share and sigma of at least 0"),
        (watts, "have watts of at least 0"),
        (t.width is None or (0 < t.width <= 1 and t.limits is None), "have a width in (0, 1], without limits"),
        (t.limits is None or 0 <= t.limits[0] <= t.memory <= t.limits[1], "have limits that enclose its memory"),
    ):
        if not holds:
            raise ConfigError.at(f"fleet.tiers: each tier must {rule}, got {t}")


def holding(tiers: Sequence[Tier], family: ModelFamily, smallest: int | None = None) -> list[Tier]:
    """Increase each tier's memory so that a sub-model of the tier's `width` fits, and return the tiers. In the default
    fleet, a model with `smallest` parameters also fits into each tier."""
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
    """Return the tier, with its memory increased if a model with `params` parameters does not fit. Half a parameter is
    added, because a model must be smaller than the free memory."""
    return replace(t, memory=max(t.memory, 100 * (params + 0.5) / count_params(family)))


def device_of(client: int, tier: Tier, sigma: float = 0.0) -> Device:
    """Return a device in the tier. `sigma` is the standard deviation of the device's free memory."""
    device = Device(client, tier.name, tier.memory, sigma, tier.limits)
    return replace(device, speed=tier.speed * 1e9, bandwidth=tier.bandwidth * 1e6 / 8, watts=tier.watts)


def observe(device: Device, seed: int, round: int) -> float:
    """Return the device's free memory in a round. Without limits (FlexFL, Section IV-A1), the result is r_M - |u| with
    u ~ N(0, sigma^2), at least 0. With limits (AdaptiveFL), the result is drawn from N(r_M, sigma^2) and clipped to the
    limits."""
    u = seeds.rng(seed, "observe", round, device.client).normal(0.0, device.sigma) if device.sigma > 0 else 0.0
    if device.limits is not None:
        low, high = device.limits
        return min(max(device.memory + float(u), low), high)
    return max(0.0, device.memory - abs(float(u)))


class Took(NamedTuple):
    """Duration of an assignment on the simulated clock, in seconds."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


def simulated_seconds(device: Device, macs: float, transferred: int) -> Took:
    """Return the time to compute `macs` multiply-adds and the time to transfer `transferred` bytes (down and up)."""
    return Took(macs / device.speed, transferred / device.bandwidth)
