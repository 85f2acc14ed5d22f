"""The drawings of reports and comparisons: runs look different, and long runs give small drawings."""

from __future__ import annotations

import pytest

from flexfleet.reports import plots
from tests.harness.run_folders import rows

pytestmark = pytest.mark.pictures


@pytest.mark.parametrize("points", [[9], [5], [1, 0, 9]], ids=str)
def test_lines_look_different_and_short_ones_have_marks(points: list[int]) -> None:
    counts = [points[i % len(points)] for i in range(len(plots.PALETTE) * (len(plots.MARKS) - 1))]
    looks = plots.looks_of(counts)
    assert len({(look["color"], look["marker"]) for look in looks}) == len(looks)
    assert all(look["marker"] for look, n in zip(looks, counts, strict=True) if 0 < n < plots.FEW)


def test_drawing_of_ten_thousand_rounds_is_small() -> None:
    measured = [({"M1": 0.3 + i % 7 / 100, "M3": 0.5 + i % 11 / 100}, 2.0, 2.0, 3, 0, 0) for i in range(10_000)]
    history = rows(measured)
    curves = plots.curve([history], "avg"), plots.curve([history], "full")
    for drawing in (plots.comparison([("long", *curves)]), plots.of_levels(history, ["M1", "M3"])):
        assert len(drawing) < 150_000
