"""MLflow is away during a run: the rounds continue, and MLflow has every step once at the end."""

from __future__ import annotations

import logging
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from fl_engine.core.errors import Refused, Replaced, Unreachable
from flexfleet.tracking import server
from flexfleet.tracking import trackers as tracking
from flexfleet.tracking.trackers import MLflow
from tests.harness.mlflow_server import serving

AWAY = "Max retries exceeded with url: /api/2.0/mlflow/runs/log-batch (Connection refused)"
ROW = {"avg": 0.5, "seconds_round": 1.0}


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(tracking, "AGAIN_S", 0.05)
    monkeypatch.setattr(tracking, "WAIT_S", 0.5)
    monkeypatch.setattr(server, "LONGEST_PAUSE_S", 0.1)
    caplog.set_level(logging.INFO, "flexfleet")


@pytest.fixture
def goes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Call it with whether MLflow is away for what a run logs."""
    away = threading.Event()

    def unless_away(name: str) -> Callable[..., Any]:
        call = getattr(mlflow.MlflowClient, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if away.is_set():
                raise MlflowException(AWAY)
            return call(*args, **kwargs)

        return called

    for name in ("log_batch", "set_terminated", "set_tag", "log_artifact"):
        monkeypatch.setattr(mlflow.MlflowClient, name, unless_away(name))
    yield lambda is_away: away.set() if is_away else away.clear()


def begin(uri: str, patience_s: float = 30.0) -> MLflow:
    return MLflow(uri, "e", "name", {}, patience_s=patience_s)


def steps(folder: Path, key: str = "avg") -> list[int]:
    """The steps of a metric, in the order in which they were logged."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as found:
        return [step for (step,) in found.execute("select step from metrics where key = ? order by rowid", (key,))]


def statuses(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as found:
        return [status for (status,) in found.execute("select status from runs")]


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [each for each in caplog.messages if text in each]


# --------------------------------------------------------------------------------------------- the tracker
def test_rounds_continue_while_a_server_is_down(
    tmp_path: Path, mlflow_template: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, mlflow_template) as port:
        tracker = begin(f"http://127.0.0.1:{port}", patience_s=120.0)
        tracker.metrics([(1, ROW)])
    began = time.monotonic()
    for step in range(2, 12):
        tracker.metrics([(step, ROW)])
        time.sleep(0.02)
    assert time.monotonic() - began < 10
    while not lines(caplog, "Rounds continue") and time.monotonic() - began < 110:
        time.sleep(0.02)
    with serving(tmp_path, mlflow_template, port=port):
        tracker.finish("FINISHED")
    assert steps(tmp_path) == list(range(1, 12)) and statuses(tmp_path) == ["FINISHED"]
    assert len(lines(caplog, "Rounds continue")) == 1


def test_metrics_are_sent_in_one_batch_when_mlflow_answers_again(
    mlflow_uri: str, tmp_path: Path, goes: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    tracker, batches = begin(mlflow_uri), list[int]()
    send = mlflow.MlflowClient.log_batch

    def counted(*args: Any, metrics: Sequence[Any], **more: Any) -> None:
        send(*args, metrics=metrics, **more)
        batches.append(len(metrics))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", counted)
        for first in (1, 7):  # a second outage is logged too
            goes(True)
            for step in range(first, first + 6):
                tracker.metrics([(step, ROW)])
            goes(False)
            end = time.monotonic() + 30
            while len(steps(tmp_path)) < first + 5 and time.monotonic() < end:
                time.sleep(0.02)
            while not lines(caplog, "the metrics of 6 rounds") and time.monotonic() < end:
                time.sleep(0.02)
    assert batches == [12, 12] and steps(tmp_path) == list(range(1, 13))
    assert len(lines(caplog, "Rounds continue")) == 2


def test_answer_that_was_lost_does_not_double_the_metrics(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, send, lost = begin(mlflow_uri), mlflow.MlflowClient.log_batch, list[int]()

    def loses(*args: Any, **kwargs: Any) -> Any:
        send(*args, **kwargs)
        if not lost:
            lost.append(1)
            raise MlflowException(AWAY)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", loses)
    tracker.metrics([(1, ROW)])
    time.sleep(0.1)
    tracker.metrics([(2, ROW)])
    tracker.finish("FINISHED")
    assert lost and steps(tmp_path) == [1, 2]


def test_server_that_refuses_metrics_fails_the_end_and_no_round(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def refuses(*_: Any, **__: Any) -> None:
        raise MlflowException("quota", error_code=INVALID_PARAMETER_VALUE)

    tracker = begin(mlflow_uri)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refuses)
    with pytest.raises(Refused, match="quota"), tracking.ending(tracker):
        tracker.metrics([(1, ROW)])
        tracker.metrics([(2, ROW)])
        tracker.finish("FINISHED")
    assert statuses(tmp_path) == ["FAILED"] and len(lines(caplog, "Rounds continue")) == 1


def test_end_waits_for_patience_s_and_logs_once(
    mlflow_uri: str, goes: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    tracker = begin(mlflow_uri, patience_s=0.5)
    goes(True)
    tracker.metrics([(1, ROW)])
    began = time.monotonic()
    with pytest.raises(Unreachable):
        tracker.finish("FINISHED")
    assert 0.5 <= time.monotonic() - began < 10
    assert len(lines(caplog, "waiting for up to")) == 1


def test_replaced_coordinator_stops_waiting_and_logs_nothing(
    mlflow_uri: str, tmp_path: Path, goes: Callable[[bool], None]
) -> None:
    def check() -> None:
        goes(False)
        raise Replaced("another coordinator has taken over")

    tracker = MLflow(mlflow_uri, "e", "name", {}, patience_s=30.0, check=check)
    goes(True)
    with pytest.raises(Replaced):
        tracker.metrics([(1, ROW)])
        tracker.finish("FINISHED")
    assert steps(tmp_path) == []


# ------------------------------------------------------------------------------------------------ whole runs
def sets_of(quick: Sequence[str], uri: str, *more: str) -> list[str]:
    return [*quick, f"tracking.mlflow={uri}", "rounds.commit_every=1", *more]


def test_run_without_mlflow_is_resumed_and_logs_all(
    flexfleet: Any, quick: Sequence[str], mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    goes: Callable[[bool], None], no_drawings: None,
) -> None:  # fmt: skip
    log = tracking.MLflow.metrics

    def metrics(self: MLflow, rows: Sequence[Any]) -> None:
        goes(any(step >= 2 for step, _ in rows))
        log(self, rows)

    sets = sets_of(quick, mlflow_uri, "run.patience_s=0.5")
    with monkeypatch.context() as patch:
        patch.setattr(tracking.MLflow, "metrics", metrics)
        stopped = flexfleet("run", "--run-id", "a", sets=sets)
    assert stopped.code == 6 and "--resume" in stopped.err and steps(tmp_path) == [1]
    assert len(list(Path("runs/a/rounds").iterdir())) > 1, "the rounds continued"
    goes(False)
    done = flexfleet("run", "--run-id", "a", "--resume", sets=sets)
    assert done.code == 0, done.err
    assert steps(tmp_path) == [1, 2, 3] and statuses(tmp_path) == ["FINISHED"]


def test_stopped_run_does_not_wait_for_a_server_that_hangs(
    flexfleet: Any, quick: Sequence[str], mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    no_drawings: None,
) -> None:  # fmt: skip
    monkeypatch.setattr(tracking, "HASTE_S", 1)
    log_batch, ended = mlflow.MlflowClient.log_batch, threading.Event()

    def hangs(self: Any, run_id: str, metrics: Sequence[Any] = (), **more: Any) -> None:
        if any(metric.step == 2 for metric in metrics):
            signal.raise_signal(signal.SIGTERM)
            ended.wait(60)
            raise MlflowException(AWAY)
        log_batch(self, run_id, metrics, **more)

    sets = sets_of(quick, mlflow_uri)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", hangs)
        stopped = flexfleet("run", "--run-id", "a", sets=sets)
        assert time.monotonic() - began < 50
        ended.set()
    assert stopped.code == 3 and "--resume" in stopped.err
    assert statuses(tmp_path) == ["KILLED"]
    done = flexfleet("run", "--run-id", "a", "--resume", sets=sets)
    assert done.code == 0, done.err
    assert steps(tmp_path) == [1, 2, 3]
