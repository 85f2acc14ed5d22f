"""Callbacks of the package log each round once, also if a run is stopped or fails, and is resumed."""

from __future__ import annotations

import csv
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

import flexfleet as ff
from tests.harness import from_python
from tests.harness.settings import refused_at

pytestmark = pytest.mark.usefixtures("own_folder")

SMALL = {**from_python.SMALL, "algorithm": "heterofl", "rounds": 3, "run_id": "a"}


class EndsInRound2(ff.Callback):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_round(self, round: ff.Round) -> Any:
        if round.number == 2 and self.fails:
            raise ff.EnvironmentFailure("the store has failed")  # after this error, no round is committed
        return ff.STOP if round.number == 2 else None


@pytest.fixture(params=[False, True], ids=["stopped", "failed"])
def ends(request: pytest.FixtureRequest) -> ff.Callback:
    return EndsInRound2(request.param)


def resumed(ends: ff.Callback, *loggers: ff.Callback) -> ff.Result:
    """Run with a logger until round 2, and resume with another logger."""
    with suppress(ff.EnvironmentFailure):
        ff.run(**SMALL, callbacks=[loggers[0], ends])
    return ff.load("a").resume(callbacks=[loggers[1]], progress=False)


def test_csv_file_has_each_round_once(ends: ff.Callback) -> None:
    result = resumed(ends, ff.CSVLogger("logs/a.csv"), ff.CSVLogger("logs/a.csv"))
    rows = list(csv.DictReader(Path("logs/a.csv").read_text().splitlines()))
    assert [int(row["round"]) for row in rows] == [1, 2, 3]
    assert [float(row["avg"]) for row in rows] == result.history["avg"].tolist()


def test_csv_file_gets_a_column_when_a_metric_appears() -> None:
    ff.run(**{**SMALL, "options": {**from_python.OPTIONS, "rounds.evaluate_every": 2}}, callbacks=[ff.CSVLogger()])
    rows = list(csv.DictReader(Path("runs/a/metrics.csv").read_text().splitlines()))
    assert [bool(row["avg"]) for row in rows] == [False, True, True] and all(row["train_loss"] for row in rows)


def test_tensorboard_has_each_step_once(ends: ff.Callback) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = resumed(ends, ff.TensorBoardLogger("tb"), ff.TensorBoardLogger("tb"))
    events = EventAccumulator("tb/a").Reload().Scalars("avg")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == pytest.approx(result.history["avg"].tolist())


def test_wandb_gets_each_step_once_in_one_run(ends: ff.Callback, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, list[int]] = {}

    def init(**settings: Any) -> Any:
        assert settings["resume"] == "allow" and settings["project"] == "mine"
        known = steps.setdefault(settings["id"], [])

        def log(metrics: dict[str, float], step: int, commit: bool) -> None:
            assert "avg" in metrics and commit
            known.append(step)
            run.step = step + 1

        run = SimpleNamespace(step=known[-1] + 1 if known else 0, summary={}, log=log, finish=lambda exit_code: None)
        return run

    wandb: Any = module_from_spec(ModuleSpec("wandb", None))
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    resumed(ends, ff.WandbLogger("mine"), ff.WandbLogger("mine"))
    assert list(steps.values()) == [[1, 2, 3]]


# ------------------------------------------------------------------------------------------------ early stopping
def test_early_stopping_counts_rounds_without_an_improvement() -> None:
    stopped = ff.run(**SMALL, callbacks=[ff.EarlyStopping("train_loss", patience=1, min_delta=100)])
    assert stopped.status == "stopped" and len(stopped.history) == 2
    finished = stopped.resume(rounds=2, progress=False)
    assert finished.status == "finished" and finished.report is not None


def test_early_stopping_counts_the_rounds_before_a_resume(ends: ff.Callback) -> None:
    callbacks = [ff.EarlyStopping(patience=2, min_delta=1.0), ff.EarlyStopping(patience=2, min_delta=1.0)]
    assert len(resumed(ends, *callbacks).history) == 3


@pytest.mark.parametrize(
    ("arguments", "path"),
    [({"patience": 0}, "patience"), ({"min_delta": -1}, "min_delta"), ({"mode": "up"}, "mode")],
)
def test_early_stopping_names_a_wrong_argument(arguments: dict[str, Any], path: str) -> None:
    with refused_at(path):
        ff.EarlyStopping(**arguments)


def test_early_stopping_names_a_metric_that_does_not_exist() -> None:
    with refused_at("metric"):
        ff.run(**SMALL, callbacks=[ff.EarlyStopping("accuracy_of_nothing")])


# ------------------------------------------------------------------------------------------------------- MLflow
def test_run_in_an_active_mlflow_run_becomes_its_child(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the user")
    options = {name: value for name, value in from_python.OPTIONS.items() if name != "tracking.mlflow"}
    own = {**SMALL, "options": options, "rounds": 1}
    with mlflow.start_run() as parent:
        result = ff.run(**own)
        ff.run(**{**own, "run_id": "b", "options": from_python.OPTIONS})  # tracking is off
        ff.run(**own | {"run_id": "c", "mlflow_uri": "sqlite:///other.db"})
    result.resume(rounds=2, progress=False)
    runs = {run.info.run_id: run for run in mlflow.search_runs(search_all_experiments=True, output_format="list")}
    del runs[parent.info.run_id]
    (child,) = runs.values()
    assert child.info.experiment_id == parent.info.experiment_id
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
