"""The Tier Clustering Algorithm: by hand, and what holds for all clients."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.selection.tiers import tiers

FEW = st.lists(st.tuples(st.sampled_from([1e9, 2e9, 5e9, 2e11]), st.floats(1e3, 1e9)), min_size=1, max_size=60)
COUNTS = st.integers(1, 12)
MUS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e6])


def test_by_hand() -> None:
    """P of 0, 1/2, 1/4, 1 and S of 1, 0, 1/2, 0: T with mu = 2 is 1, 1, 1, 2, with 0.5 it is 1, 1/4, 5/8, 1/2, with 0
    it is S."""
    speed, bandwidth = [10.0, 30.0, 20.0, 50.0], [9.0, 1.0, 5.0, 1.0]
    assert tiers(speed, bandwidth, 4, mu=2.0) == [0, 1, 2, 3], "equal ones in the order of their numbers"
    assert tiers(speed, bandwidth, 4, mu=0.5) == [3, 0, 2, 1]
    assert tiers(speed, bandwidth, 4, mu=0.0) == [3, 0, 2, 1]
    assert tiers(speed, bandwidth, 4, mu=1e6) == [0, 2, 1, 3], "the speed alone"
    assert tiers(speed, bandwidth, 2, mu=0.5) == [1, 0, 1, 0]


def test_each_is_in_one_tier_where_the_printed_loop_overlaps() -> None:
    """Line 7 as printed gives tier 1 the clients 1 to 4, tier 2 the clients 2 to 5, tier 3 the clients 3 to 6."""
    assert tiers([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], [1.0] * 9, 3, mu=1.0) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_paper_s_hundred_clients_in_ten_tiers() -> None:
    assert Counter(tiers([float(i) for i in range(100)], [1.0] * 100, 10, mu=1.0)) == dict.fromkeys(range(10), 10)


@pytest.mark.parametrize(
    ("clients", "count", "expected"),
    [
        pytest.param(0, 3, [], id="nobody"),
        pytest.param(1, 10, [9], id="one client"),
        pytest.param(2, 10, [4, 9], id="fewer clients than tiers"),
        pytest.param(3, 10, [3, 6, 9], id="three clients"),
        pytest.param(5, 3, [0, 1, 1, 2, 2], id="not a multiple"),
        pytest.param(4, 1, [0, 0, 0, 0], id="one tier"),
    ],
)
def test_all_alike_in_the_order_of_their_numbers(clients: int, count: int, expected: list[int]) -> None:
    assert tiers([7.0] * clients, [3.0] * clients, count, mu=1.0) == expected


@given(FEW, COUNTS, MUS)
def test_tiers_are_even_and_in_the_order_of_capability(
    clients: list[tuple[float, float]], count: int, mu: float
) -> None:
    speed, bandwidth = zip(*clients, strict=True)
    found = tiers(speed, bandwidth, count, mu)
    sizes = Counter(found)
    assert set(found) <= set(range(count)) and count - 1 in found
    assert max(sizes.values()) - min(sizes[tier] for tier in range(count)) <= 1
    for i, (p, s) in enumerate(clients):
        for j, (q, t) in enumerate(clients):
            if p >= q and s >= t and (p, s) != (q, t) and mu > 0 and p > q:
                assert found[i] >= found[j], "no slower in anything, and faster in one thing"


@given(FEW, COUNTS, MUS, st.sampled_from([0.5, 2.0, 1024.0]))
def test_units_do_not_matter(clients: list[tuple[float, float]], count: int, mu: float, unit: float) -> None:
    speed, bandwidth = zip(*clients, strict=True)
    scaled = [value * unit for value in bandwidth]
    assert tiers(speed, scaled, count, mu) == tiers(speed, bandwidth, count, mu)


def test_lists_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="2 speeds, 1 bandwidths and 3 tiers make no tiers"):
        tiers([1.0, 2.0], [1.0], 3, mu=1.0)
