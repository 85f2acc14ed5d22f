"""The benchmark of uniformity: its figures on a small fleet."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.uniformity import correlated, four, pools, world


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return four(world(correlated(0.0), 200), 6)


def test_branches_make_rounds_more_even_and_shorter(rows: dict[str, Any]) -> None:
    assert [len(pool) for pool in pools()] == [1, 10]
    for whole, branches in (("random", "mb_random"), ("oort", "mb_oort")):
        assert rows[branches].uniformity < 0.8 * rows[whole].uniformity
        assert rows[branches].round_s < rows[whole].round_s
    assert rows["oort"].round_s < rows["random"].round_s


def test_time_to_samples_is_that_of_the_round_that_reached_it(rows: dict[str, Any]) -> None:
    row = rows["random"]
    assert row.until(row.samples[2]) == row.clock[2] and row.until(row.samples[2] + 1) == row.clock[3]
    assert list(row.clock) == sorted(row.clock) and list(row.samples) == sorted(row.samples)
