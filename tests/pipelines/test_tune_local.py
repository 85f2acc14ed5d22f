"""The tuning graph, each task a process of its own, on the digits."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from components.tune import Tuned
from pipelines.tune import tuning

pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning")

FEW = {
    "pretrain.epochs": 3, "partition.minimum": 10, "algorithm.epsilon": 8, "tune.held_out": [7],
    "tune.space": {"algorithm.kd_weight": {"low": 1, "high": 100, "log": True}},
}  # fmt: skip


def test_a_study_as_a_pipeline(scratch: Path, monkeypatch: pytest.MonkeyPatch, telling: Any) -> None:
    """Its data base is in the environment, where a Secret puts its address, and in no artifact."""
    base = scratch / "pl4nted-secret.db"
    monkeypatch.setenv("FLEXFLEET_TUNE_STORAGE", f"sqlite:///{base}")
    tuning(rounds=1, clients=6, client_fraction=0.5, local_epochs=1, study_id="a", trials=2, advanced=FEW)
    (folder,) = (scratch / "tasks").glob("tune-*/tune")
    found = Tuned.read(folder / "study" / "tune.json")
    assert (found.id, sum(found.trials.values()), list(found.space)) == ("a", 2, ["algorithm.kd_weight"])
    assert found.default == {"algorithm.kd_weight": 10.0}
    assert "held-out seeds 7:" in (folder / "told").read_text() and "kd_weight" in (folder / "told").read_text()
    assert "<svg" in (folder / "page").read_text()
    told = json.loads((folder / "executor_output.json").read_text())["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert told == {"best/avg": found.best_value, "held_out/gain": found.gain}
    with contextlib.closing(sqlite3.connect(base)) as study:
        assert study.execute("select count(*) from trials").fetchone() == (2,)
    assert not (scratch / "runs" / "a" / "study.log").exists()
    assert telling(scratch / "tasks", scratch / "runs") == []


def test_a_password_in_the_address_of_a_study_is_refused(
    scratch: Path, capsys: pytest.CaptureFixture[str], telling: Any
) -> None:
    with pytest.raises(RuntimeError):
        tuning(advanced={"tune.storage": "postgresql://me:pl4nted-secret@host/studies"})
    assert "ConfigError: tune.storage holds a password" in capsys.readouterr().out
    assert telling(scratch) == []


def test_what_the_form_asks_for_is_not_given_twice(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        tuning(advanced={"tune.trials": 3})
    assert "'tune.trials' is the parameter 'trials'" in capsys.readouterr().out
