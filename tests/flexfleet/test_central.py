"""`flexfleet central`: the same bits after a stop and a kill, figures beside those of federated runs, refusals."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest
from torch import Tensor

from fl_engine.core import seeds
from fl_engine.core.slicing import initial_params
from fl_engine.storage.store import decode
from fl_engine.testing.tiny import assert_same_bits
from fl_engine.training.central import train_centrally
from fl_engine.training.numerics import flushes_now
from flexfleet.files.artifacts import ConfusionFile, EvaluationFile, History, Result
from flexfleet.pipeline import central as runs_central
from flexfleet.pipeline.central import task_of
from flexfleet.pipeline.prepare import Resolved

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

SETS = (
    "dataset.train_samples=300", "dataset.test_samples=100", "model.width=0.5", "central.epochs=4", "central.lr=0.05",
    "tracking.mlflow=null",
)  # fmt: skip


def weights(run: str) -> dict[str, Tensor]:
    return decode((Path("runs") / run / "model.safetensors").read_bytes(), run)


def test_it_trains_with_the_engine_and_tells_what_a_run_tells(flexfleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flexfleet"):
        done = flexfleet("central", "--json", "--run-id", "a", sets=SETS)
    assert done.code == 0, done.err
    found, folder = Result.model_validate(done.json), Path("runs/a")
    assert Result.read(folder / "result.json") == found
    assert "epoch 4 of 4: loss " in caplog.text and done.out.count("\n") == 1

    resolved = Resolved.load(None, SETS)
    start = initial_params(resolved.family, seeds.derive(0, "init"))
    epochs = list(train_centrally(resolved.family, resolved.data, task_of(resolved.config), start))
    assert_same_bits(weights("a"), epochs[-1].params)
    history, evaluation = History.read(folder / "history.json"), EvaluationFile.read(folder / "evaluation.json")
    assert history.model_sha256 == found.model_sha256
    values = [row["metrics"]["full"] for row in history.rounds]
    assert values == [epoch.score.value for epoch in epochs] and found.metrics["full"] == values[-1]
    assert {"avg", "accuracy/full", "loss/full", "train_loss", "seconds_round"} <= set(history.rounds[0]["metrics"])
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
def test_a_killed_one_goes_on_with_the_same_bits(flexfleet: Any) -> None:
    slow = [*SETS, "central.epochs=20"]
    whole = flexfleet("central", "--json", "--run-id", "whole", sets=slow)
    assert whole.code == 0, whole.err
    command = [sys.executable, "-c", SLOWLY, "central", "--run-id", "cut", "--resume"]
    command += [word for each in slow for word in ("--set", each)]
    codes = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        before = commits()
        while process.poll() is None and commits() <= before:
            time.sleep(0.01)
        process.send_signal(number)
        codes.append(process.wait())
    assert codes == [3, -signal.SIGKILL]
    again = flexfleet("central", "--json", "--run-id", "cut", "--resume", sets=slow)
    assert again.json["model_sha256"] == whole.json["model_sha256"]
    assert again.json["metrics"] == whole.json["metrics"]
    assert len(History.read(Path("runs/cut/history.json")).rounds) == 20
    once_more = flexfleet("central", "--json", "--run-id", "cut", "--resume", sets=slow)
    assert once_more.json == again.json


def test_mlflow_has_it_beside_the_federated_runs(flexfleet: Any, quick: Any, mlflow_uri: str) -> None:
    sets = [*SETS[:-1], f"tracking.mlflow={mlflow_uri}"]
    central = flexfleet("central", "--json", "--run-id", "c", "--tag", "of=both", sets=sets)
    again = flexfleet("central", "--json", "--run-id", "c", "--resume", sets=sets)
    assert central.json["mlflow_run_id"] == again.json["mlflow_run_id"]
    given = [each for each in quick if not each.startswith("tracking.")]
    federated = flexfleet("run", "--json", "--run-id", "f", sets=[*given, f"tracking.mlflow={mlflow_uri}"])
    client = mlflow.MlflowClient(mlflow_uri)
    one, other = (client.get_run(done.json["mlflow_run_id"]) for done in (central, federated))
    assert one.info.experiment_id == other.info.experiment_id
    assert (one.info.run_name, one.info.status) == ("central-s0", "FINISHED")
    assert (one.data.tags["algorithm"], one.data.tags["of"]) == ("central", "both")
    assert {"avg", "full", "train_loss", "final/full", "final/avg", "seconds_round"} <= set(one.data.metrics) & set(
        other.data.metrics
    )
    points = client.get_metric_history(one.info.run_id, "full")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert points[-1].value == one.data.metrics["final/full"] == central.json["metrics"]["full"]
    assert one.data.params["central.lr"] == "0.05" and "algorithm.name" not in one.data.params


def test_central_flushes_denormals_and_refuses_other_runs(flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    evaluate = runs_central.evaluate

    def noted(*given: Any) -> Any:
        seen.append(flushes_now())
        return evaluate(*given)

    monkeypatch.setattr(runs_central, "evaluate", noted)
    assert flexfleet("central", "--json", "--run-id", "a", sets=SETS).code == 0
    file = Path("runs/a/central.json")
    told = json.loads(file.read_text())
    assert seen == [True] and told["numerics"].pop("flush_denormal") is True
    file.write_text(json.dumps(told))
    refused = flexfleet("central", "--json", "--run-id", "a", "--resume", sets=SETS)
    assert refused.code == 6 and "flush_denormal: None there, True here" in refused.err


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("central.lr=0.1",), "was started with another configuration (central.lr: 0.05 -> 0.1)"),
        (("seed=3",), "seed: 0 -> 3"),
        (("model.width=0.25",), "model.width: 0.5 -> 0.25"),
    ],
)
def test_another_training_does_not_go_on(flexfleet: Any, sets: tuple[str, ...], said: str) -> None:
    first = flexfleet("central", "--run-id", "a", sets=[*SETS, "central.epochs=1"])
    assert first.code == 0, first.err
    refused = flexfleet("central", "--run-id", "a", "--resume", sets=[*SETS, "central.epochs=1", *sets])
    assert refused.code == 2 and said in refused.err and "choose another --run-id" in refused.err
    assert flexfleet("central", "--run-id", "a", sets=SETS).code == 2, "without --resume"


def test_bad_input_is_one_line(flexfleet: Any) -> None:
    for sets, said in (
        (["central.augment=[{name: turn}]"], "central.augment"),
        (
            ["partition.rule=local", "partition.folders=.", "dataset.train_samples=null"],
            "nobody has all training samples",
        ),
        (["central.lr=1e30"], "epoch 1 (learning rate 1e+30)"),
    ):
        done = flexfleet("central", "--run-id", "bad", "--resume", sets=[*SETS, *sets])
        code = 7 if sets == ["central.lr=1e30"] else 2  # training that diverges has an exit code of its own
        assert (done.code, said in done.err) == (code, True), done.err
        assert len([line for line in done.err.splitlines() if line.startswith("error: ")]) == 1


def test_damaged_commits_are_refused_and_may_be_left(flexfleet: Any) -> None:
    whole = flexfleet("central", "--json", "--run-id", "a", sets=SETS)
    state = next(Path("runs/a").glob("rounds/*/state.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    refused = flexfleet("central", "--run-id", "a", "--resume", sets=SETS)
    assert refused.code == 4 and "is damaged" in refused.err
    again = flexfleet("central", "--json", "--run-id", "a", "--resume", "--discard-damaged", sets=SETS)
    assert again.json["model_sha256"] == whole.json["model_sha256"]


def test_a_federated_run_keeps_to_itself(finished: Any, flexfleet: Any) -> None:
    done = flexfleet("central", "--run-id", "a", "--resume", sets=SETS)
    assert done.code == 2 and "holds a federated run" in done.err
    flexfleet("central", "--run-id", "c", sets=SETS)
    before = sorted(Path("runs/c").rglob("*"))
    done = flexfleet("run", "--run-id", "c", "--resume", sets=SETS)
    assert done.code == 2 and "holds a central training" in done.err and sorted(Path("runs/c").rglob("*")) == before
    listed = flexfleet("status", "--json")
    assert [run["run_id"] for run in json.loads(listed.out)["runs"]] == ["a"]
