"""The drawings of reports and comparisons: every run is told apart, long ones stay small."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfleet.experiments import comparison_curves
from flexfleet.files.artifacts import LocalScore
from flexfleet.reports import figure, plots
from flexfleet.reports.local_accuracy import Shown, bars, heights
from tests.harness.run_folders import FLEXFL, rows

pytestmark = pytest.mark.pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    save = plots.heat_map.save_figure

    def keep(figure: Any, *told: Any) -> None:
        save(figure, *told)
        found.append(figure)

    monkeypatch.setattr(plots.heat_map, "save_figure", keep)
    return found


def curve_of(points: int) -> list[tuple[int, float, list[float]]]:
    return [(i + 1, float(i), [i / 100]) for i in range(points)]


@pytest.mark.parametrize("points", [[9], [5], [1, 0, 9]], ids=str)
def test_a_run_looks_as_in_the_legend_and_like_no_other(drawn: list[Any], points: list[int]) -> None:
    counts = [points[i % len(points)] for i in range(len(plots.PALETTE) * (len(plots.MARKS) - 1))]
    series = [(f"run {i}", rows((FLEXFL * 3)[:n])) for i, n in enumerate(counts)]
    plots.learning_curves(series)
    plots.bytes_to_accuracy(series)
    plots.comparison([(f"run {i}", [], curve_of(n)) for i, n in enumerate(counts)])
    for each in drawn:
        shown = [(h.get_color(), h.get_marker(), h.get_linewidth()) for h in each.legends[0].legend_handles]
        shown = shown[: len(counts)]
        assert len(set(shown)) == len(shown)
        for axes in each.axes:
            lines = [line for line in axes.get_lines() if len(line.get_xdata())]
            assert {(line.get_color(), line.get_marker()) for line in lines} == {
                look[:2] for look, n in zip(shown, counts, strict=True) if n
            }
            assert all(line.get_marker() not in ("", "None") for line in lines if len(line.get_xdata()) < 8)


def test_a_long_curve_keeps_its_lowest_and_highest_points() -> None:
    x, y = list(range(10_000)), [math.sin(i / 900) for i in range(10_000)]
    y[1234], y[8765] = -9.0, 9.0
    few, kept = figure.thinned(x, y)
    assert len(few) <= figure.MOST_POINTS and list(few) == sorted(set(few))
    assert [y[i] for i in few] == list(kept) and {-9.0, 9.0} <= set(kept)
    assert max(b - a for a, b in itertools.pairwise(few)) < 2 * 10_000 // (figure.MOST_POINTS // 2)
    _, low, high = figure.band(x, y, [v + 1 for v in y])
    assert min(low) == -9.0 and max(high) == 10.0 and len(low) == len(high) == figure.MOST_POINTS // 2
    short = x[: figure.MOST_POINTS]
    assert figure.thinned(short, short)[0] is short and figure.band(short, short, short)[2] is short


def test_the_page_of_ten_thousand_rounds_is_small() -> None:
    measured = [({"M1": 0.3 + i % 7 / 100, "M3": 0.5 + i % 11 / 100}, 2.0, 2.0, 3, 0, 0) for i in range(10_000)]
    series = [("long", rows(measured))]
    for drawing in (
        plots.learning_curves(series),
        plots.bytes_to_accuracy(series),
        plots.of_levels(series[0][1], ["M1", "M3"]),
    ):
        assert len(drawing) < 150_000


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
