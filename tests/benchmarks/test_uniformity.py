"""The benchmark of uniformity: its figures on a small fleet, and that it is the same each time."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import uniformity
from benchmarks.uniformity import correlated, four, pools, simulated, summary, world
from fl_engine.selection import Uniform


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return four(world(correlated(0.0), 200), 6)


def test_branches_make_rounds_more_even_and_shorter(rows: dict[str, Any]) -> None:
    for whole, branches in (("random", "mb_random"), ("oort", "mb_oort")):
        assert rows[branches].uniformity < 0.8 * rows[whole].uniformity
        assert rows[branches].round_s < rows[whole].round_s
    assert rows["oort"].round_s < rows["random"].round_s


def test_it_is_the_same_again(rows: dict[str, Any]) -> None:
    assert four(world(correlated(0.0), 200), 6) == rows


def test_the_time_to_a_number_of_samples_is_that_of_the_round_that_reached_it(rows: dict[str, Any]) -> None:
    row = rows["random"]
    assert row.until(row.samples[2]) == row.clock[2] and row.until(row.samples[2] + 1) == row.clock[3]
    assert list(row.clock) == sorted(row.clock) and list(row.samples) == sorted(row.samples)


def test_the_sizes_are_those_of_the_published_network() -> None:
    whole, branches = pools()
    assert len(whole) == 1 and len(branches) == 10
    assert simulated(world(correlated(0.0), 50), Uniform(model="largest"), branches, 1.0, rounds=1).uniformity > 0


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(uniformity, "world", lambda devices: world(devices, 60))
    monkeypatch.setattr(sys, "argv", ["uniformity", "--json", "--rounds", "2"])
    assert uniformity.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["uniformity"]) == {"random", "mb_random", "oort", "mb_oort"}
    assert found["ratio"]["oort"] == found["uniformity"]["mb_oort"] / found["uniformity"]["oort"]
    assert set(found["correlation"]) == {"0", "0.5", "0.9"} and set(found["mu"]) == {"0", "0.5", "1", "2", "only P"}
    assert "| 0.5 | uniformity, s |" in uniformity.told(found)


def test_a_summary_counts_to_half_of_the_fewest_samples(rows: dict[str, Any]) -> None:
    half = min(row.samples[-1] for row in rows.values()) / 2
    found = summary(rows)
    assert found["seconds_to_samples"] == {name: row.until(half) for name, row in rows.items()}
