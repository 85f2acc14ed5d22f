"""Uniformity: the formula by hand, its laws, and what a round says of it, whatever became of its clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.backends import InProcess
from fl_engine.core import clients as reports
from fl_engine.fleet.uniformity import MEASURED, NAMES, Times, measured, uniformity
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore
from fl_engine.testing import played
from fl_engine.testing.tiny import TRAINING, assert_same_bits, tiny_fleet, tiny_site

ALGORITHM = FedAvg(training=replace(TRAINING, fraction=0.5), eligible="all")
FLEET = tuple(
    replace(d, memory=200.0, speed=1e6 * (1 + d.client), bandwidth=1e6 / (1 + d.client)) for d in tiny_fleet()
)
"""Each computes faster and sends slower than the one before, and has room for everything."""
SITE = tiny_site(ALGORITHM, fleet=FLEET)
FIGURES = tuple(name for name in NAMES if name != MEASURED)
"""Those that are the same again when a run is repeated."""


def federate(folder: Path, site: Any = SITE, **terms: Any) -> tuple[Any, list[Any]]:
    run = Run(ALGORITHM, site, RoundsConfig(**({"stop": 2, "evaluate_every": 100, "commit_every": 1} | terms)))
    return played.federated(run, FolderStore(folder))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((7.0,), 0.0),
        ((3.0, 3.0, 3.0), 0.0),
        ((0.0, 0.0), 0.0),
        ((1.0, 4.0), 3 / math.sqrt(2)),  # sqrt((0 + 9) / 2)
        ((10.0, 13.0, 14.0, 10.0), 2.5),  # sqrt((0 + 9 + 16 + 0) / 4)
        ((1e200, 0.0), 1e200 / math.sqrt(2)),
    ],
)
def test_the_formula_by_hand(seconds: tuple[float, ...], expected: float) -> None:
    assert uniformity(seconds) == pytest.approx(expected, rel=1e-15)


TIMES = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(TIMES, st.floats(0, 1e6), st.floats(1e-3, 1e3), st.randoms())
def test_uniformity_is_shift_invariant_and_scales(
    seconds: list[float], shift: float, scale: float, random: Any
) -> None:
    found = uniformity(seconds)
    assert 0 <= found <= (max(seconds) - min(seconds)) * (1 + 1e-12)
    assert uniformity([t + shift for t in seconds]) == pytest.approx(found, abs=1e-8)
    assert uniformity([t * scale for t in seconds]) == pytest.approx(scale * found, rel=1e-9, abs=1e-12)
    mixed = list(seconds)
    random.shuffle(mixed)
    assert uniformity(mixed) == pytest.approx(found, rel=1e-12)


def test_the_figures_of_a_round_by_hand() -> None:
    """Two that answer, after 1 + 1 and 4 + 1 s, and one that is late, after 4 + 4 s."""
    in_time = [Times(2.0, 1.0, 1.0, 0.5), Times(5.0, 4.0, 1.0, 0.5)]
    late = Times(8.0, 4.0, 4.0, 3.5)
    found = measured([*in_time, late], in_time, alone=True)
    assert found == pytest.approx(
        {
            "uniformity": math.sqrt((0 + 9 + 36) / 3),
            "uniformity_compute": math.sqrt((0 + 9 + 9) / 3),
            "uniformity_communication": math.sqrt(9 / 3),
            "uniformity_real": math.sqrt(9 / 3),
            "uniformity_answered": math.sqrt(9 / 2),
            "time_variance": 6.0,  # around 5: (9 + 0 + 9) / 3
        }
    )
    assert "uniformity_real" not in measured(in_time, in_time, alone=False), "they share their steps"
    assert "uniformity_answered" not in measured([late], [], alone=True), "nobody answered in time"
    assert measured([], [], alone=True) == {}


def of_lines(row: Any) -> dict[str, float]:
    """A round's figures, computed from its lines about clients."""
    timed = [line for line in row.clients if "seconds_simulated" in line]
    total, compute, communication = (
        [line[f"seconds_{kind}"] for line in timed] for kind in ("simulated", "compute", "communication")
    )
    middle = sum(total) / len(total)
    return {
        "uniformity": uniformity(total),
        "uniformity_compute": uniformity(compute),
        "uniformity_communication": uniformity(communication),
        "time_variance": sum((t - middle) ** 2 for t in total) / len(total),
    }


def test_a_line_of_a_client_has_the_two_parts_of_its_time(tmp_path: Path) -> None:
    _, rows = federate(tmp_path)
    for row in rows:
        assert {k: row.metrics[k] for k in of_lines(row)} == pytest.approx(of_lines(row))
        assert row.metrics["uniformity_answered"] == row.metrics["uniformity"] > 0
        assert row.metrics["uniformity_real"] >= 0
        for line in row.clients:
            device = FLEET[line["client"]]
            assert line["seconds_compute"] == line["macs"] / device.speed
            assert line["seconds_communication"] == 2 * 4 * SITE.pool[-1].params / device.bandwidth
            assert line["seconds_simulated"] == line["seconds_compute"] + line["seconds_communication"]


@pytest.mark.parametrize(
    ("terms", "stage"),
    [
        ({"over_provision": 2.0}, "straggle"),
        ({"deadline_s": 0.2}, "straggle"),
        ({"faults": "slow=0.3x50", "deadline_s": 1.0}, "straggle"),
        ({"norm_bound": 1e-9}, "validate"),
        ({"deadline_s": 1e-9, "quorum": 1.0}, "straggle"),
    ],
)
def test_stragglers_count_only_in_uniformity_of_asked(tmp_path: Path, terms: dict[str, Any], stage: str) -> None:
    _, rows = federate(tmp_path, **terms)
    for row in rows:
        refused = [line for line in row.clients if "failure" in line]
        assert {k: row.metrics[k] for k in of_lines(row)} == pytest.approx(of_lines(row))
        assert all("seconds_simulated" in line and line["failure"].startswith(stage) for line in refused)
        answered = [line["seconds_simulated"] for line in row.clients if "failure" not in line]
        assert row.metrics.get("uniformity_answered") == (uniformity(answered) if answered else None)
    assert any("failure" in line for row in rows for line in row.clients), "some were refused"


@pytest.mark.parametrize(
    ("terms", "waits"),
    [
        ({"norm_bound": 0.9}, False),
        ({"faults": "slow=0.3x1000"}, True),
        ({"faults": "drop=0.3"}, True),
        ({"faults": "nan=0.3"}, True),  # what cannot be read has no time
    ],
)
def test_round_lasts_until_deadline_only_if_an_update_is_missing(
    tmp_path: Path, terms: dict[str, Any], waits: bool
) -> None:
    _, rows = federate(tmp_path, **terms, deadline_s=20.0)
    short = [row for row in rows if any("failure" in line for line in row.clients)]
    assert short, "some are not merged"
    for row in short:
        merged = [line["seconds_simulated"] for line in row.clients if "failure" not in line]
        assert row.metrics["seconds_simulated"] == (20.0 if waits else max(merged))


class Dies(Exception):
    """The coordinator is killed."""


def killed_when_round_2_was_closed(folder: Path, monkeypatch: pytest.MonkeyPatch, **terms: Any) -> Path:
    """The run is killed before the merge; its record of the round's answers."""
    merge: Callable[..., Any] = FedAvg.merge

    def killed(self: Any, state: Any, plan: Any, *more: Any) -> Any:
        if plan.round == 1:
            raise Dies
        return merge(self, state, plan, *more)

    with monkeypatch.context() as patched:
        patched.setattr(FedAvg, "merge", killed)
        with pytest.raises(Dies):
            federate(folder, keep_updates=True, **terms)
    (closed,) = folder.rglob("closed.json")
    return closed


@pytest.mark.parametrize(
    "terms",
    [{"over_provision": 2.0}, {"deadline_s": 0.2}, {"deadline_s": 20.0, "norm_bound": 0.9}, {"norm_bound": 1e-9}],
)
def test_kill_before_the_merge_keeps_times_of_stragglers(
    tmp_path: Path, terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected = federate(tmp_path / "whole", **terms)
    killed_when_round_2_was_closed(tmp_path / "killed", monkeypatch, **terms)
    final, rows = federate(tmp_path / "killed", keep_updates=True, **terms)
    assert_same_bits(final.params, whole.params)
    for one, other in zip(rows, expected, strict=True):
        names = ("seconds_simulated", *FIGURES)
        assert [one.metrics.get(k) for k in names] == [other.metrics.get(k) for k in names]
        assert "uniformity_real" in one.metrics
        for line, same in zip(one.clients, other.clients, strict=True):
            assert {k: v for k, v in line.items() if k != "seconds"} == {
                k: v for k, v in same.items() if k != "seconds"
            }


def test_lie_about_seconds_changes_only_uniformity_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = federate(tmp_path / "honest", keep_updates=True)
    run: Callable[..., Any] = InProcess.run
    worst = reports.FIGURES["seconds"][1]

    def lying(self: Any, algorithm: Any, plan: Any) -> Any:
        for outcome in run(self, algorithm, plan):
            liar = outcome.client == min(plan.order_of)
            yield replace(outcome, metrics={**outcome.metrics, "seconds": worst}) if liar else outcome

    monkeypatch.setattr(InProcess, "run", lying)
    final, rows = federate(tmp_path / "lied to", keep_updates=True)
    assert_same_bits(final.params, whole.params)
    for one, other in zip(rows, expected, strict=True):
        assert {k: one.metrics[k] for k in FIGURES} == {k: other.metrics[k] for k in FIGURES}
        assert worst / 10 < one.metrics[MEASURED] <= worst
