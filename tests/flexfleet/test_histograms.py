"""Local accuracies over the clients: which bars are drawn, and which labels over each other."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfleet.experiments import comparison_curves
from flexfleet.files.artifacts import LocalScore
from flexfleet.reports.local_accuracy import (
    Shown,
    bars,
    heights,
)

pytestmark = pytest.mark.pictures


@pytest.mark.parametrize(
    ("histogram", "edges"),
    [
        (dict.fromkeys(range(70, 100), 4), list(range(70, 101, 2))),  # 120 clients: at most 21 bars for 30 %
        (dict.fromkeys(range(30, 100), 2), list(range(30, 101, 5))),  # 140: at most 23 for 70 %
        (dict.fromkeys(range(30, 100), 50), list(range(30, 101))),  # 3,500: 118
        ({40: 1, 61: 1, 72: 1, 95: 1}, [40, 50, 60, 70, 80, 90, 100]),  # 4: at most 4; the widest bars
        ({percent: 30 for percent in range(40, 101, 10)}, [40, 50, 60, 70, 80, 90, 100]),  # ten test samples each
        ({100: 5}, [99, 100]),
    ],
)
def test_the_more_clients_the_narrower_the_bars(histogram: dict[int, float], edges: list[int]) -> None:
    assert bars([histogram]) == edges


def test_the_last_bar_holds_100_percent() -> None:
    assert heights({0: 1, 89: 2, 90: 3, 99: 4, 100: 5}, [0, 90, 100]).tolist() == [3, 12]


HISTOGRAM = st.dictionaries(st.integers(0, 100), st.integers(1, 1000), min_size=1)


@given(st.lists(HISTOGRAM, min_size=1, max_size=4))
def test_every_client_is_in_a_bar(given: list[dict[int, int]]) -> None:
    edges = bars(given)
    assert edges[0] >= 0 and edges[-1] <= 100 and len({b - a for a, b in pairwise(edges)}) == 1
    for histogram in given:
        assert heights(histogram, edges).sum() == sum(histogram.values())


def run(mean: float, sd: float, histogram: dict[int, int] | None) -> Any:
    """With a full model `large`, the last of the pool; histogram None: of an older version. Negative mean: without
    local accuracies."""
    score = LocalScore(mean=abs(mean), sd=sd, clients=9)
    evaluation = SimpleNamespace(
        local={} if mean < 0 else {"small": LocalScore(mean=0, sd=0, clients=9), "large": score},
        local_histogram={} if histogram is None else {"small": {0: 9}, "large": histogram},
    )
    levels = [SimpleNamespace(name="small"), SimpleNamespace(name="large")]
    return SimpleNamespace(pool=SimpleNamespace(levels=levels), evaluation=evaluation)


def test_a_label_is_the_mean_over_its_seeds() -> None:
    two = [run(0.5, 0.1, {50: 1, 60: 2}), run(0.75, 0.3, {60: 1, 99: 2})]
    assert comparison_curves.of_full(two, "red") == Shown("red", 0.625, 0.2, {50: 0.5, 60: 1.5, 99: 1.0})
    assert comparison_curves.of_full([two[0], run(0.75, 0.3, None)], "red") == Shown("red", 0.625, 0.2, {})
    assert comparison_curves.of_full([two[0], run(-1, 0.3, None)], "red") is None
