"""Trackers: the console, and MLflow, which has everything once, also after a kill."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import mlflow
import mlflow.store.db.utils
import pytest

from fl_engine.storage.checkpoints import Checkpoints
from flexfleet.files.artifacts import RunFile
from flexfleet.pipeline import publish
from flexfleet.tracking import server
from flexfleet.tracking import trackers as tracking
from flexfleet.tracking.console import Console
from flexfleet.tracking.trackers import MLflow, log_outcome
from tests.harness.mlflow_server import serving
from tests.harness.settings import refused_at

pytestmark = pytest.mark.usefixtures("own_folder")  # MLflow puts artifacts under ./mlruns

ROW = {
    "seconds_round": 1.5,
    "avg": 0.25,
    "full": 0.5,
    "train_loss": 2.0,
    "clients_trained": 3.0,
    "clients_pruned": 1.0,
    "clients_failed": 0.0,
}


# ----------------------------------------------------------------------------------------- memory and console
def test_console_skips_the_rounds_of_an_earlier_start(
    job: Any, memory_store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job.federate(memory_store, stop=2)
    with caplog.at_level(logging.INFO, "flexfleet"):
        job.federate(memory_store, stop=3, tracker=Console(3, len(Checkpoints(memory_store).rows())))
    assert [m.split()[1] for m in caplog.messages if m.startswith("round ")] == ["3/3"]


# ----------------------------------------------------------------------------------------------------- MLflow
def logged(uri: str) -> list[tuple[str, int, int]]:
    """(metric, step, how often) of everything in the database."""
    return query(uri, "select key, step, count(*) from metrics group by key, step order by step, key")


def query(uri: str, sql: str) -> list[Any]:
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as data_base:
        return data_base.execute(sql).fetchall()


def start(uri: str, run_id: str | None = None) -> MLflow:
    return MLflow(uri, "digits-small_cnn-iid", "flexfl-s0", {"algorithm": "flexfl", "seed": "0"}, run_id)


def test_names_that_mlflow_refuses_stay_distinct(mlflow_uri: str) -> None:
    tiers = ["Pi 4 (2 GB)", "Pi 4 [2 GB]", "../a", ".", "x" * 300, "x" * 301, "größe"]
    names = [f"on_clients/mean/tier/{tier}" for tier in tiers]
    run_id = None
    for _ in range(2):  # once more, as a resumed run does
        tracker = start(mlflow_uri, run_id)
        run_id = tracker.run_id
        tracker.params({"kubernetes.pools.Pi 4 (2 GB).memory": "1Gi"})
        tracker.metrics([(1, {name: float(i) for i, name in enumerate(names)} | ROW)])
        log_outcome(tracker.client, tracker.run_id, {f"final/{name}": float(i) for i, name in enumerate(names)}, {}, [])
    run = mlflow.MlflowClient(mlflow_uri).get_run(run_id)
    assert list(run.data.params) == ["kubernetes.pools.Pi 4 _2 GB_.memory-8d561"]
    kept = {key: value for key, value in run.data.metrics.items() if key.startswith("on_clients/")}
    assert sorted(kept.values()) == list(range(7)) and kept["on_clients/mean/tier/größe"] == 6
    assert len([key for key in run.data.metrics if key.startswith("final/")]) == 7
    assert {times for _, _, times in logged(mlflow_uri)} == {1}


def test_a_kill_between_two_batches_leaves_every_metric_once(
    mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, killed: type[BaseException]
) -> None:
    rows = [(step, {f"m{i:02}": 1.0 for i in range(30)} | ROW) for step in range(1, 61)]
    tracker = start(mlflow_uri)
    send, batches = mlflow.MlflowClient.log_batch, []

    def log_batch(*args: Any, **kwargs: Any) -> Any:
        if batches:
            raise killed
        batches.append(1)
        return send(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
        with pytest.raises(killed):
            tracker.metrics(rows)
    start(mlflow_uri, tracker.run_id).metrics(rows)
    found = logged(mlflow_uri)
    assert {(key, step) for key, step, _ in found} == {(key, step) for step, values in rows for key in values}
    assert [entry for entry in found if entry[2] > 1] == []


def test_deleted_run_or_experiment_is_a_config_error(mlflow_uri: str) -> None:
    tracker, client = start(mlflow_uri), mlflow.MlflowClient(tracking_uri=mlflow_uri)
    client.delete_run(tracker.run_id)
    with refused_at("tracking.mlflow"):
        start(mlflow_uri, tracker.run_id)
    client.delete_experiment(tracker.experiment_id)
    with refused_at("tracking.mlflow"):
        start(mlflow_uri)


# ------------------------------------------------------------------------------------------- a whole run in it
def table_of(client: Any, run_id: str, name: str = "clients.json") -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        found = json.loads(Path(client.download_artifacts(run_id, name, scratch)).read_text())
    return {name: [row[i] for row in found["data"]] for i, name in enumerate(found["columns"])}


def test_a_run_is_one_flat_mlflow_run(flexfleet: Any, quick: Sequence[str], mlflow_uri: str, no_drawings: None) -> None:
    sets = [*quick, f"tracking.mlflow={mlflow_uri}", "rounds.commit_every=1"]
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets).ok()
    client, run_id = mlflow.MlflowClient(mlflow_uri), done.json["mlflow_run_id"]
    assert RunFile.read(Path("runs/a/run.json")).mlflow_run_id == run_id
    experiment = client.get_experiment_by_name("digits-small_cnn-dirichlet")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert run.data.params["model.width"] == "0.5"
    assert {"algorithm": "flexfl", "seed": "1", "flexfleet.run_id": "a"}.items() <= run.data.tags.items()
    assert done.json["store_uri"] in run.data.tags.values()
    assert run.data.tags["model_sha256"] == done.json["model_sha256"]
    assert run.data.metrics["final/avg"] == done.json["metrics"]["avg"]
    measured = {"avg", "full", "train_loss", "bytes_down", "bytes_up", "waste", "seconds_train", "seconds_evaluate"}
    measured |= {f"clients_{what}" for what in ("trained", "pruned", "failed")}
    measured |= {f"accuracy/{level}" for level in ("M1", "M2", "M3")}
    rounds = {(key, step) for key, step, _ in logged(mlflow_uri) if step > 0}
    assert {(key, step) for key in measured for step in (1, 2, 3)} <= rounds
    files = {file.path for file in client.list_artifacts(run_id)}
    assert {"clients.json", "report.html", "pool.json", "result.json", "confusion.json"} <= files
    assert len(table_of(client, run_id, "confusion_matrix.json")["true class"]) == 10
    assert run.data.params["algorithm.kd_weight"] == "10.0" and run.data.params["model.norm"] == "batch"
    assert run.info.run_name == "a" and "digits" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["rounds.stop"] == "3" and "run.backend" in run.data.tags and "mlflow.user" in run.data.tags
    assert not [name for name in run.data.params if name.startswith(("run.", "kubernetes.", "agents.", "tracking."))]
    table = table_of(client, run_id)
    assert table["round"] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {"client", "sent", "trained", "loss", "examples"} <= table.keys()

    # A resume of what is finished adds nothing; more rounds add theirs, in the same run.
    assert flexfleet("run", "--json", "--run-id", "a", "--resume", sets=sets).json["mlflow_run_id"] == run_id
    assert table_of(client, run_id)["round"] == [1, 1, 1, 2, 2, 2, 3, 3, 3], "the table is not appended to itself"
    more = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*sets, "rounds.stop=4"])
    assert more.json["mlflow_run_id"] == run_id
    assert {step for key, step, _ in logged(mlflow_uri) if key == "avg"} == {1, 2, 3, 4}
    assert client.get_run(run_id).data.tags["rounds.stop"] == "4"
    assert [entry for entry in logged(mlflow_uri) if entry[2] > 1 and entry[1] > 0] == []
    assert table_of(client, run_id)["round"] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert client.get_run(run_id).data.metrics["final/avg"] == more.json["metrics"]["avg"], "the newest figures count"
    assert len(client.search_runs([experiment.experiment_id])) == 1


@pytest.mark.parametrize("nth", [1, 2])
def test_kill_after_the_mlflow_run_began_leaves_one_run(
    flexfleet: Any,
    quick: Sequence[str],
    mlflow_uri: str,
    no_drawings: None,
    killed: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    nth: int,
) -> None:
    sets = [*quick, f"tracking.mlflow={mlflow_uri}", "rounds.stop=1"]
    write, writes = RunFile.write, iter(range(1, 100))

    def dying(self: RunFile, path: Path) -> Path:
        if next(writes) == nth:
            raise killed
        return write(self, path)

    with monkeypatch.context() as patch, suppress(killed):
        patch.setattr(RunFile, "write", dying)
        flexfleet("run", "--run-id", "a", sets=sets)
    assert flexfleet("run", "--run-id", "a", "--resume", sets=sets).code == 0
    assert query(mlflow_uri, "select status from runs") == [("FINISHED",)]


def begin_beside(uri: str, experiment: str, place: int, together: Any) -> None:
    """What a run of a comparison logs at its start, and a level that it registers at its end."""
    together.wait(60)
    found = MLflow(uri, experiment, f"run {place}", {tracking.TOKEN: str(place)})
    found.dataset("digits", "abc", "here", "training")
    found.finish("FINISHED")
    client = server.Client(uri)
    client.set_tag(found.run_id, "a", "b")
    source = client.get_run(found.run_id).info.artifact_uri
    publish._version(client, experiment, f"{source}/level", found.run_id, str(place), "about")


@pytest.mark.parametrize("kind", ["sqlite", "server"])
def test_eight_processes_log_the_same_at_once(kind: str, tmp_path: Path, mlflow_template: Path) -> None:
    """MLflow inserts without a lock what it has not found. Without a second try most end in an exception."""
    context, rounds, processes = multiprocessing.get_context("fork"), 2, 8
    with serving(tmp_path, mlflow_template) as port:
        uri = f"http://127.0.0.1:{port}" if kind == "server" else f"sqlite:///{tmp_path}/mlflow.db"
        for number in range(rounds):
            together = context.Barrier(processes)
            given = [(uri, f"test {number}", place, together) for place in range(processes)]
            beside = [context.Process(target=begin_beside, args=each) for each in given]
            for process in beside:
                process.start()
            for process in beside:
                process.join(120)
            assert [process.exitcode for process in beside] == [0] * processes
            client = server.Client(uri)
            at = client.get_experiment_by_name(f"test {number}").experiment_id
            runs = client.search_runs([at])
            assert len(runs) == processes and all(len(run.inputs.dataset_inputs) == 1 for run in runs)
            assert len(client.search_model_versions(f"name = 'test {number}'")) == processes
