"""`rounds.until`: early stop on validation samples of the proxy, and the best model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.storage.store import sha256

SETS = ("algorithm.name=heterofl", "partition.proxy=0.2", "rounds.stop=30", "training.fraction=0.5")


@pytest.fixture
def run(flexfleet: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def started(run_id: str, *sets: str, more: Sequence[str] = (), code: int = 0) -> Any:
        given = [*(text for text in quick if not text.startswith(("rounds.stop", "partition.proxy"))), *SETS, *sets]
        done = flexfleet("run", "--json", "--run-id", run_id, *more, sets=given)
        assert done.code == code, done.err
        return done

    return started


def scores(run_id: str, name: str = "score") -> list[float]:
    rounds = json.loads(Path("runs", run_id, "history.json").read_text())["rounds"]
    return [row["metrics"][f"validation/{name}"] for row in rounds]


def sha_of_best(run_id: str) -> str:
    return sha256(Path("runs", run_id, "best.safetensors").read_bytes())


def test_run_stops_after_patience_and_keeps_the_best_model(run: Any) -> None:
    result = run("a", "rounds.until={patience: 2}").json
    found = scores("a")
    best = found.index(max(found))
    assert len(found) == best + 3 < 30
    assert result["metrics"]["best_model"]["round"] == best + 1
    assert sha_of_best("a") == run("b", f"rounds.stop={best + 1}").json["model_sha256"]
    assert sha_of_best("a") != result["model_sha256"]


def test_run_stops_at_its_target(run: Any) -> None:
    run("a", "rounds.until={metric: full, target: 0.2}")
    found = scores("a", "full")
    assert found[-1] >= 0.2 and all(value < 0.2 for value in found[:-1])


def test_run_stops_after_simulated_seconds(run: Any) -> None:
    run("a", "rounds.until={simulated_s: 0.01}")
    limited = run("b", "rounds.stop_simulated_s=0.01").json
    assert json.loads(Path("runs/a/result.json").read_text())["model_sha256"] == limited["model_sha256"]


def test_resumed_run_chooses_the_same_rounds(run: Any) -> None:
    whole = run("a", "rounds.until={patience: 2}").json
    best = whole["metrics"]["best_model"]["round"]
    for stop in sorted({1, best, best + 1}):
        run(f"r{stop}", "rounds.until={patience: 2}", f"rounds.stop={stop}")
        again = run(f"r{stop}", "rounds.until={patience: 2}", more=["--resume"]).json
        assert again["metrics"]["best_model"] == whole["metrics"]["best_model"]
        assert again["model_sha256"] == whole["model_sha256"]
        assert sha_of_best(f"r{stop}") == sha_of_best("a")


def test_test_set_does_not_influence_the_end(run: Any) -> None:
    run("a", "rounds.until={patience: 2}")
    run("b", "rounds.until={patience: 2}", "dataset.test_samples=30")
    assert scores("a") == scores("b")


def test_lower_values_of_an_error_are_better(run: Any) -> None:
    from fl_engine.rounds.options import Course, RoundsConfig, Until

    rounds = [{"validation/avg": value, "validation/score": -value} for value in (3.0, 2.0, 1.0)]
    course = Course(RoundsConfig(until=Until(target=1.5)))
    assert [course.add(metrics) for metrics in rounds] == [False, False, True] and course.best == 2


@pytest.mark.parametrize("until", ["{patience: 0}", "{metric: loss}", "{pacience: 3}", "5"])
def test_wrong_until_is_refused(run: Any, until: str) -> None:
    assert "rounds.until" in run("a", f"rounds.until={until}", code=2).err


def test_until_needs_a_proxy(own_folder: None, flexfleet: Any, quick: Sequence[str]) -> None:
    given = [*(text for text in quick if not text.startswith(("rounds.stop", "partition.proxy"))), *SETS]
    for command in ("check", "run"):
        done = flexfleet(command, sets=[*given, "rounds.until={patience: 3}", "partition.proxy=0"])
        assert done.code == 2 and "partition.proxy" in done.err
