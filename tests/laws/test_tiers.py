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
