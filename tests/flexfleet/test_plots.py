"""The drawings of reports and comparisons: runs look different, and long runs give small drawings."""

from __future__ import annotations

import pytest

from flexfleet.reports import figure, plots
from tests.harness.run_folders import rows

pytestmark = pytest.mark.pictures


def test_lines_of_interest_are_coloured_and_others_grey() -> None:
    for points in (9, figure.FEW - 1):
        looks = figure.looks_of({f"v{i}": points for i in range(8)}, ("v3", "v0"))
        grey = [look for label, look in looks.items() if label not in ("v0", "v3")]
        assert {look["color"] for look in grey} == {figure.GREY} and len({look["marker"] for look in grey}) == 6
        assert [looks[label]["color"] for label in ("v3", "v0")] == list(figure.PALETTE[:2])
        assert bool(looks["v0"]["marker"]) == (points < figure.FEW), "short lines have markers"


def test_drawing_of_ten_thousand_rounds_is_small() -> None:
    measured = [({"M1": 0.3 + i % 7 / 100, "M3": 0.5 + i % 11 / 100}, 2.0, 2.0, 3, 0, 0) for i in range(10_000)]
    history = rows(measured)
    curves = plots.curve([history], "avg"), plots.curve([history], "full")
    for drawing in (plots.comparison([("long", *curves)], ("long",)), plots.of_levels(history, ["M1", "M3"])):
        assert len(drawing) < 150_000
