"""The fleet has the shares it should have, and a device has free what FlexFL's Sec. IV-A1 says."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.devices import Tier, fleet, observe
from fl_engine.errors import ConfigError
from fl_engine.types import Device

law = settings(max_examples=60, deadline=None)

TABLE_1 = (
    Tier("weak", 0.4, 35.0, (5.0, 8.0, 10.0)),
    Tier("medium", 0.3, 60.0, (5.0, 8.0, 10.0)),
    Tier("strong", 0.3, 110.0, (5.0, 8.0, 10.0)),
)


def counts(tiers: tuple[Tier, ...], clients: int, seed: int = 0) -> dict[str, int]:
    found = Counter(d.tier for d in fleet(tiers, clients, seed))
    return {t.name: found[t.name] for t in tiers}


# --------------------------------------------------------------------------------------------------- tiers
@pytest.mark.parametrize("clients", [10, 20, 50, 100, 200, 500])
def test_table_1_is_met_exactly(clients: int) -> None:
    expected = {"weak": 4 * clients // 10, "medium": 3 * clients // 10, "strong": 3 * clients // 10}
    assert counts(TABLE_1, clients) == expected


@pytest.mark.parametrize(
    ("shares", "clients", "expected"),
    [
        # 17: quotas 6.8, 5.1, 5.1; the one left goes to 6.8.
        ((0.4, 0.3, 0.3), 17, (7, 5, 5)),
        # 3: 1.2, 0.9, 0.9.
        ((0.4, 0.3, 0.3), 3, (1, 1, 1)),
        # 2: 0.8, 0.6, 0.6; both left over go to the first two.
        ((0.4, 0.3, 0.3), 2, (1, 1, 0)),
        ((0.4, 0.3, 0.3), 1, (1, 0, 0)),
        # 10: 5.5, 1.2, 3.3.
        ((0.55, 0.12, 0.33), 10, (6, 1, 3)),
        ((0.1, 0.2, 0.7), 10, (1, 2, 7)),
        ((1.0, 0.0), 5, (5, 0)),
    ],
)
def test_largest_remainders_by_hand(shares: tuple[float, ...], clients: int, expected: tuple[int, ...]) -> None:
    tiers = tuple(Tier(f"t{i}", share, 50.0) for i, share in enumerate(shares))
    assert tuple(counts(tiers, clients).values()) == expected


@law
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 300), st.integers(0, 99))
def test_every_tier_gets_its_quota_rounded_down_or_up(parts: list[int], clients: int, seed: int) -> None:
    tiers = tuple(Tier(f"t{i}", part / sum(parts), 50.0) for i, part in enumerate(parts))
    found = counts(tiers, clients, seed)
    quotas = [Fraction(part * clients, sum(parts)) for part in parts]
    assert sum(found.values()) == clients
    for count, quota in zip(found.values(), quotas, strict=True):
        assert math.floor(quota) <= count <= math.ceil(quota)
    # Whoever was rounded up had no smaller a remainder than whoever was rounded down.
    up = [q - math.floor(q) for c, q in zip(found.values(), quotas, strict=True) if c > q]
    down = [q - math.floor(q) for c, q in zip(found.values(), quotas, strict=True) if c < q]
    assert not up or not down or min(up) >= max(down)


def test_every_client_is_one_device_of_its_tier() -> None:
    members = fleet(TABLE_1, 100, 1)
    assert [d.client for d in members] == list(range(100))
    memory = {t.name: t.memory for t in TABLE_1}
    assert all(d.memory == memory[d.tier] for d in members)


def test_the_seed_says_who_is_strong() -> None:
    assert fleet(TABLE_1, 100, 1) == fleet(TABLE_1, 100, 1)
    assert fleet(TABLE_1, 100, 1) != fleet(TABLE_1, 100, 2)
    first_half = [Counter(d.tier for d in fleet(TABLE_1, 100, s)[:50])["weak"] for s in range(20)]
    assert 15 < sum(first_half) / 20 < 25, "the weak ones are spread over the client numbers"


def test_sigma_is_drawn_once_per_device_from_the_list() -> None:
    members = fleet(TABLE_1, 600, 5)
    for tier in TABLE_1:
        drawn = Counter(d.sigma for d in members if d.tier == tier.name)
        assert set(drawn) == {5.0, 8.0, 10.0}
        assert max(drawn.values()) < 1.6 * min(drawn.values())
    device = members[0]
    assert {fleet(TABLE_1, 600, 5)[0].sigma for _ in range(3)} == {device.sigma}


def test_sigma_of_table_5() -> None:
    conf1 = tuple(Tier(t.name, t.share, t.memory) for t in TABLE_1)
    assert {d.sigma for d in fleet(conf1, 50, 0)} == {0.0}
    conf3 = tuple(Tier(t.name, t.share, t.memory, (10.0, 20.0, 30.0)) for t in TABLE_1)
    assert {d.sigma for d in fleet(conf3, 50, 0)} == {10.0, 20.0, 30.0}


# ------------------------------------------------------------------------------------------------- observe
@law
@given(
    st.floats(0.1, 200), st.floats(0, 100), st.integers(0, 2**31), st.integers(0, 2000), st.integers(0, 500)
)
def test_free_is_between_nothing_and_all(memory: float, sigma: float, seed: int, round: int, client: int) -> None:
    device = Device(client, "any", memory, sigma)
    free = observe(device, seed, round)
    assert 0 <= free <= memory
    assert observe(device, seed, round) == free


def test_a_steady_device_has_everything_free() -> None:
    device = Device(3, "weak", 35.0, 0.0)
    assert {observe(device, seed, round) for seed in range(3) for round in range(20)} == {35.0}


@pytest.mark.parametrize("sigma", [5.0, 8.0, 10.0])
def test_what_is_missing_is_half_normal(sigma: float) -> None:
    """|u|, u ~ N(0, sigma^2): mean sigma sqrt(2/pi), mean square sigma^2, one half below 0.6745 sigma."""
    device = Device(4, "strong", 110.0, sigma)
    missing = 110.0 - np.array([observe(device, 1, round) for round in range(6000)])
    assert missing.mean() == pytest.approx(sigma * math.sqrt(2 / math.pi), rel=0.04)
    assert (missing**2).mean() == pytest.approx(sigma**2, rel=0.06)
    assert (missing < 0.6745 * sigma).mean() == pytest.approx(0.5, abs=0.025)
    assert (missing > 2 * sigma).mean() == pytest.approx(0.0455, abs=0.012)


def test_the_sheet_how_often_a_strong_device_is_short() -> None:
    """The values as sigma: r <= 100 for 19 % of the strong devices' dispatches; as variances, for 0.07 %."""
    members = [Device(c, "strong", 110.0, (5.0, 8.0, 10.0)[c % 3]) for c in range(60)]
    short = np.mean([observe(d, 2, round) <= 100 for d in members for round in range(80)])
    assert short == pytest.approx(0.19, abs=0.02)


def test_a_weak_device_is_never_below_nothing() -> None:
    device = Device(0, "weak", 5.0, 50.0)
    free = [observe(device, 0, round) for round in range(300)]
    assert min(free) == 0
    assert max(free) > 0


def test_rounds_clients_and_seeds_draw_apart() -> None:
    drawn = [
        observe(Device(client, "strong", 110.0, 10.0), seed, round)
        for seed in (0, 1)
        for round in range(30)
        for client in range(5)
    ]
    assert len(set(drawn)) == len(drawn)


# -------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ((), "at least one tier"),
        ((Tier("a", 0.5, 35.0), Tier("b", 0.4, 60.0)), r"add up to 1, got a 0\.5, b 0\.4"),
        ((Tier("a", 1.5, 35.0), Tier("b", -0.5, 60.0)), "'b'"),
        ((Tier("a", 1.0, 0.0),), "memory > 0"),
        ((Tier("a", 1.0, -3.0),), "memory > 0"),
        ((Tier("a", 1.0, 35.0, ()),), "sigma"),
        ((Tier("a", 1.0, 35.0, (5.0, -1.0)),), "sigma >= 0"),
        ((Tier("a", 1.0, float("nan")),), "memory"),
        ((Tier("a", float("nan"), 35.0),), "share"),
        ((Tier("a", 1.0, 35.0, (float("nan"),)),), "sigma"),
    ],
)
def test_an_impossible_fleet_is_refused(tiers: tuple[Tier, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet(tiers, 10, 0)
