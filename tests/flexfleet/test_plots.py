"""The drawings of reports and comparisons: every run is told apart, long ones stay small."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from flexfleet.reports import figure, plots
from tests.harness.run_folders import FLEXFL, rows

pytestmark = pytest.mark.pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is drawn."""
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
    """Ten thousand evaluated rounds make no larger drawing than those of the most points that are drawn."""
    measured = [({"M1": 0.3 + i % 7 / 100, "M3": 0.5 + i % 11 / 100}, 2.0, 2.0, 3, 0, 0) for i in range(10_000)]
    series = [("long", rows(measured))]
    for drawing in (
        plots.learning_curves(series),
        plots.bytes_to_accuracy(series),
        plots.of_levels(series[0][1], ["M1", "M3"]),
    ):
        assert len(drawing) < 150_000
