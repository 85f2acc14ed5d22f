"""`flexfleet central`: the same bits after a stop and a kill, metrics like those of federated runs, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.core import seeds
from fl_engine.core.slicing import initial_params
from fl_engine.storage.store import decode
from fl_engine.testing.tiny import assert_same_bits
from fl_engine.training.central import train_centrally
from fl_engine.training.numerics import flushes_now
from flexfleet.files.artifacts import ConfusionFile, EvaluationFile, History, RunResult
from flexfleet.pipeline.central import task_of
from flexfleet.pipeline.prepare import Resolved
from tests.harness.processes import refused, until

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

SETS = (
    "dataset.train_samples=300", "dataset.test_samples=100", "model.width=0.5", "central.epochs=4", "central.lr=0.05",
    "tracking.mlflow=null",
)  # fmt: skip


def test_central_writes_the_files_of_a_run(flexfleet: Any) -> None:
    done = flexfleet("central", "--json", "--run-id", "a", sets=SETS).ok()
    found, folder = RunResult.model_validate(done.json), Path("runs/a")
    assert RunResult.read(folder / "result.json") == found

    resolved = Resolved.load(None, SETS)
    start = initial_params(resolved.family, seeds.derive(resolved.config.seed, "init"))
    epochs = list(train_centrally(resolved.family, resolved.data, task_of(resolved.config), start))
    assert_same_bits(decode((folder / "model.safetensors").read_bytes(), "a"), epochs[-1].params)
    history, evaluation = History.read(folder / "history.json"), EvaluationFile.read(folder / "evaluation.json")
    assert history.model_sha256 == found.model_sha256
    values = [row.metrics["full"] for row in history.rounds]
    assert values == [epoch.score.value for epoch in epochs] and found.metrics["full"] == values[-1]
    assert {"avg", "accuracy/full", "loss/full", "train_loss", "seconds_round"} <= set(history.rounds[0].metrics)
    assert evaluation.full == found.metrics["levels"]["full"] == values[-1] > 0.5
    assert found.metrics["best"]["full"] == found.metrics["highest"]["100"]["full"] == max(values)
    assert found.metrics["highest"]["50"]["full"] == max(values[:2])
    assert (found.bytes, found.waste) == ({"down": 0, "up": 0}, 0.0)
    (matrix,) = ConfusionFile.read(folder / "confusion.json").levels.values()
    assert sum(map(sum, matrix)) == 100
    assert found.report == "runs/a/central.svg" and Path(found.report).is_file()


def commits() -> list[str]:
    return sorted(path.parent.name for path in Path("runs/cut").glob("rounds/*/COMMITTED"))


SLOWLY = """
import sys, time
from fl_engine.training.local import Session
from flexfleet.cli.main import main
epoch = Session.epoch
Session.epoch = lambda session: (time.sleep(0.3), epoch(session))
sys.exit(main())
"""
"""A process whose epochs take long enough for a signal to come in time on any machine."""


@pytest.mark.long
def test_killed_central_resumes_with_the_same_bits(flexfleet: Any) -> None:
    slow = [*SETS, "central.epochs=20"]
    whole = flexfleet("central", "--json", "--run-id", "whole", sets=slow).ok()
    command = [sys.executable, "-c", SLOWLY, "central", "--run-id", "cut", "--resume"]
    command += [word for each in slow for word in ("--set", each)]
    codes = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        before = commits()
        until(lambda before=before: commits() > before, "a commit")
        process.send_signal(number)
        codes.append(process.wait())
    assert codes == [3, -signal.SIGKILL]
    again = flexfleet("central", "--json", "--run-id", "cut", "--resume", sets=slow)
    assert again.json["model_sha256"] == whole.json["model_sha256"]
    assert again.json["metrics"] == whole.json["metrics"]
    assert len(History.read(Path("runs/cut/history.json")).rounds) == 20
    once_more = flexfleet("central", "--json", "--run-id", "cut", "--resume", sets=slow)
    assert once_more.json == again.json


def test_central_is_tracked_beside_federated_runs(flexfleet: Any, quick: Any, mlflow_uri: str) -> None:
    sets = [*SETS[:-1], f"tracking.mlflow={mlflow_uri}"]
    central = flexfleet("central", "--json", "--run-id", "c", "--tag", "of=both", sets=sets)
    again = flexfleet("central", "--json", "--run-id", "c", "--resume", sets=sets)
    assert central.json["mlflow_run_id"] == again.json["mlflow_run_id"]
    federated = flexfleet("run", "--json", "--run-id", "f", sets=[*quick, f"tracking.mlflow={mlflow_uri}"])
    client = mlflow.MlflowClient(mlflow_uri)
    one, other = (client.get_run(done.json["mlflow_run_id"]) for done in (central, federated))
    assert one.info.experiment_id == other.info.experiment_id
    assert (one.info.run_name, one.info.status) == ("c", "FINISHED")
    assert (one.data.tags["algorithm"], one.data.tags["of"]) == ("central", "both")
    assert {"avg", "full", "train_loss", "final/full", "final/avg", "seconds_round"} <= set(one.data.metrics) & set(
        other.data.metrics
    )
    points = client.get_metric_history(one.info.run_id, "full")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert points[-1].value == one.data.metrics["final/full"] == central.json["metrics"]["full"]
    assert one.data.params["central.lr"] == "0.05" and "algorithm.name" not in one.data.params


def test_central_flushes_denormals_and_refuses_other_runs(flexfleet: Any) -> None:
    assert not flushes_now()
    assert flexfleet("central", "--json", "--run-id", "a", sets=SETS).code == 0
    file = Path("runs/a/central.json")
    told = json.loads(file.read_text())
    assert flushes_now() and told["numerics"].pop("flush_denormal") is True
    file.write_text(json.dumps(told))
    assert flexfleet("central", "--json", "--run-id", "a", "--resume", sets=SETS).code == 6


@pytest.mark.parametrize("sets", [("central.lr=0.1",), ("seed=3",), ("model.width=0.25",)])
def test_central_with_other_settings_is_not_resumed(flexfleet: Any, sets: tuple[str, ...]) -> None:
    flexfleet("central", "--run-id", "a", sets=[*SETS, "central.epochs=1"]).ok()
    done = flexfleet("central", "--run-id", "a", "--resume", sets=[*SETS, "central.epochs=1", *sets])
    assert done.code == 2 and sets[0].partition("=")[0] in done.err


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (["central.augment=[{name: turn}]"], 2),
        (["partition.rule=local", "partition.folders=.", "dataset.train_samples=null"], 2),
        (["central.lr=1e30"], 7),
    ],
)
def test_central_refuses_bad_input(flexfleet: Any, sets: list[str], code: int) -> None:
    refused(flexfleet("central", "--run-id", "bad", "--resume", sets=[*SETS, *sets]), code)


def test_central_and_federated_runs_refuse_each_other(finished: Any, flexfleet: Any) -> None:
    assert flexfleet("central", "--run-id", "a", "--resume", sets=SETS).code == 2
    flexfleet("central", "--run-id", "c", sets=SETS)
    before = sorted(Path("runs/c").rglob("*"))
    done = flexfleet("run", "--run-id", "c", "--resume", sets=SETS)
    assert done.code == 2 and sorted(Path("runs/c").rglob("*")) == before
    listed = flexfleet("status", "--json")
    assert [run["run_id"] for run in json.loads(listed.out)["runs"]] == ["a"]
