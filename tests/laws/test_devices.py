"""The fleet has the shares it should have, and a device has free what FlexFL's Sec. IV-A1 says."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.costs import count_params
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Device
from fl_engine.core.widths import prefix
from fl_engine.fleet.devices import FLEETS, Tier, fleet, observe, simulated_seconds
from fl_engine.models.chains import SmallCNN
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import PreResNet18
from fl_engine.selection.capacity import holds

law = settings(max_examples=60)


@law
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 300), st.integers(0, 99))
def test_every_tier_gets_its_quota_rounded_down_or_up(parts: list[int], clients: int, seed: int) -> None:
    tiers = tuple(Tier(f"t{i}", part / sum(parts), 50.0) for i, part in enumerate(parts))
    placed = Counter(device.tier for device in fleet(tiers, clients, seed))
    found = [placed[tier.name] for tier in tiers]
    quotas = [Fraction(part * clients, sum(parts)) for part in parts]
    assert sum(found) == clients
    for count, quota in zip(found, quotas, strict=True):
        assert math.floor(quota) <= count <= math.ceil(quota)
    # Whoever was rounded up had no smaller a remainder than whoever was rounded down.
    up = [q - math.floor(q) for c, q in zip(found, quotas, strict=True) if c > q]
    down = [q - math.floor(q) for c, q in zip(found, quotas, strict=True) if c < q]
    assert not up or not down or min(up) >= max(down)


@pytest.mark.parametrize("sigma", [5.0, 8.0, 10.0])
def test_missing_memory_is_half_normal(sigma: float) -> None:
    """|u|, u ~ N(0, sigma^2): mean sigma sqrt(2/pi), mean square sigma^2, one half below 0.6745 sigma."""
    device = Device(4, "strong", 110.0, sigma)
    missing = 110.0 - np.array([observe(device, 1, round) for round in range(6000)])
    assert missing.mean() == pytest.approx(sigma * math.sqrt(2 / math.pi), rel=0.04)
    assert (missing**2).mean() == pytest.approx(sigma**2, rel=0.06)
    assert (missing < 0.6745 * sigma).mean() == pytest.approx(0.5, abs=0.025)
    assert (missing > 2 * sigma).mean() == pytest.approx(0.0455, abs=0.012)


@pytest.mark.parametrize(
    "tiers",
    [
        (),
        (Tier("a", 0.5, 35.0), Tier("b", 0.4, 60.0)),
        (Tier("a", 1.0, 0.0),),
        (Tier("a", 1.0, 35.0, ()),),
        (Tier("a", 0.5, 35.0), Tier("b", 0.2, 60.0), Tier("a", 0.3, 110.0)),
        (Tier("a", 1.0, 35.0, width=1.5),),
        (Tier("a", 1.0, 35.0, watts=(5.0, -1.0)),),
        (Tier("a", 0.5, 35.0, watts=(5.0, 1.0)), Tier("b", 0.5, 60.0)),
    ],
)
def test_impossible_fleet_is_refused(tiers: tuple[Tier, ...]) -> None:
    with pytest.raises(ConfigError, match="tier"):
        fleet(tiers, 10, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("4:3:3", {"weak": 40, "medium": 30, "strong": 30}),
        ("8:1:1", {"weak": 80, "medium": 10, "strong": 10}),
        ("1:8:1", {"weak": 10, "medium": 80, "strong": 10}),
        ("1:1:8", {"weak": 10, "medium": 10, "strong": 80}),
        ("capacities", {"1": 20, "1/2": 20, "1/4": 20, "1/8": 20, "1/16": 20}),
        ("flexfl_testbed", {"pi-4b": 23, "jetson-nano": 59, "xavier-agx": 18}),
        # FedRolex Fig. 3.7.
        ("real_world", {"1": 6, "1/2": 10, "1/4": 11, "1/8": 18, "1/16": 55}),
    ],
)
def test_named_fleets_have_their_proportions(name: str, expected: dict[str, int]) -> None:
    assert Counter(d.tier for d in fleet(name, 100, 7)) == expected
    assert fleet(name, 100, 7) == fleet(FLEETS[name], 100, 7)


@pytest.mark.parametrize(
    ("family", "grown"),
    [
        # 1/16 of the digits' network is .586 % of it, 125 / 16^2 is .488; 1/8 and wider fit as they are.
        (SmallCNN((1, 8, 8), 10), {"1/16"}),
        (MobileNetV2((3, 32, 32), 10), {"1/8", "1/16"}),
        (PreResNet18((3, 32, 32), 10), set()),
    ],
    ids=["small_cnn", "mobilenetv2", "preresnet18"],
)
def test_capacity_devices_hold_exactly_their_width(family: Any, grown: set[str]) -> None:
    assert fleet("real_world", 100, 0) == fleet(FLEETS["real_world"], 100, 0)
    found = {d.tier: d for d in fleet("real_world", 100, 0, family)}
    before = {d.tier: d for d in fleet("real_world", 100, 0)}
    assert {name for name, device in found.items() if device != before[name]} == grown
    shares = [count_params(family, prefix(family.layout(), 2.0**-i)) / count_params(family) for i in range(6)]
    for i, name in enumerate(("1", "1/2", "1/4", "1/8", "1/16")):
        assert holds(found[name], shares[i]), "a device has more free than its model needs"
        assert i == 0 or not holds(found[name], shares[i - 1]), "and not enough for the next one"
        assert observe(found[name], 0, 5) > 100 * shares[i]


@pytest.mark.parametrize(
    ("name", "full", "limits"),
    [
        # Million parameters of VGG16; MB of ResNet18's parameters in float32.
        ("adaptivefl", 33.646666, {"weak": (8, 1, 6, 11), "medium": (16, 1, 13, 19), "strong": (35, 2, 25, 40)}),
        (
            "adaptivefl_resnet18",
            45.512744,
            {"weak": (11, 1, 9, 14), "medium": (22, 1, 19, 25), "strong": (48, 2, 42, 55)},
        ),
    ],
)
def test_adaptivefls_devices_stay_within_their_limits(name: str, full: float, limits: dict[str, Any]) -> None:
    """N(mean, sigma), clipped."""
    for device in fleet(name, 10, 0):
        mean, sigma, low, high = limits[device.tier]
        seen = np.asarray([observe(device, 0, r) for r in range(3000)]) * full / 100
        assert low - 1e-9 <= seen.min() and seen.max() <= high + 1e-9
        assert seen.mean() == pytest.approx(mean, abs=0.15)
        assert seen.std() == pytest.approx(sigma, abs=0.1)
        assert device.most == pytest.approx(100 * high / full)


def test_the_simulated_clock_by_hand() -> None:
    """2 * 10^9 multiply-adds per second and 8 * 10^6 bits per second: 3 s for 6 * 10^9, 2.5 s for 2.5 MB."""
    (device,) = fleet((Tier("t", 1.0, 50.0, speed=2.0, bandwidth=8.0),), 1, 0)
    took = simulated_seconds(device, 6e9, 2_500_000)
    assert took == pytest.approx((3, 2.5)) and took.total == pytest.approx(5.5)
    with pytest.raises(ConfigError, match="speed"):
        fleet((Tier("t", 1.0, 50.0, speed=0.0),), 3, 0)
