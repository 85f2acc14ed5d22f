"""MLflow is away during a run: the rounds continue, and MLflow has every step once at the end."""

from __future__ import annotations

import logging
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from fl_engine.core.errors import Replaced, Stopped, Unreachable
from fl_engine.testing.tiny import Memory
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from flexfleet.pipeline.run import run
from flexfleet.tracking.trackers import MLflow
from tests.harness.processes import until

ROW = {"avg": 0.5, "seconds_round": 1.0}


@pytest.fixture(autouse=True)
def _quick(own_folder: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexfleet")


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Let MLflow's database fail inside, because its table of runs is not there."""

    def rename(old: str, new: str) -> None:
        with closing(sqlite3.connect(folder / "mlflow.db", timeout=30)) as data_base:
            data_base.execute("PRAGMA legacy_alter_table = ON")  # references to the table stay
            data_base.execute(f"ALTER TABLE {old} RENAME TO {new}")

    rename("runs", "gone")
    yield
    rename("gone", "runs")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let MLflow's database hang inside: MLflow waits for 20 seconds for a lock."""
    with closing(sqlite3.connect(folder / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.rollback()


class Quick(MLflow):
    """Waits less."""

    WAIT_S, AGAIN_S = 0.5, 0.05

    def __init__(self, uri: str, patience_s: float = 30.0, check: Callable[[], object] = lambda: None) -> None:
        super().__init__(uri, "e", "name", {}, patience_s=patience_s, check=check)


def steps(folder: Path, key: str = "avg") -> list[int]:
    """The steps of a metric, in the order in which they were logged."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as found:
        return [step for (step,) in found.execute("select step from metrics where key = ? order by rowid", (key,))]


def statuses(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as found:
        return [status for (status,) in found.execute("select status from runs")]


# --------------------------------------------------------------------------------------------- the tracker
def test_metrics_are_sent_when_mlflow_answers_again(
    mlflow_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def count(text: str) -> int:
        return sum(text in each for each in caplog.messages)

    tracker = Quick(mlflow_uri)
    for outage in (0, 1):  # the second is logged too
        with away(tmp_path):
            for step in range(6):
                tracker.metrics([(6 * outage + step + 1, ROW)])
        until(lambda outage=outage: count("is reachable again") > outage, "MLflow's answer", 30)
    assert steps(tmp_path) == list(range(1, 13)) and count("rounds continue") == 2


def test_answer_that_was_lost_does_not_double_the_metrics(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, send, lost = Quick(mlflow_uri), mlflow.MlflowClient.log_batch, list[int]()

    def loses(*args: Any, **kwargs: Any) -> Any:
        send(*args, **kwargs)
        if not lost:
            lost.append(1)
            raise MlflowException("Max retries exceeded with url: /api/2.0/mlflow/runs/log-batch (Connection refused)")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", loses)
    tracker.metrics([(1, ROW)])
    time.sleep(0.1)
    tracker.metrics([(2, ROW)])
    tracker.finish("FINISHED")
    assert lost and steps(tmp_path) == [1, 2]


def test_replaced_coordinator_stops_waiting_and_logs_nothing(mlflow_uri: str, tmp_path: Path) -> None:
    def check() -> None:
        raise Replaced("another coordinator has taken over")

    tracker = Quick(mlflow_uri, check=check)
    with away(tmp_path), pytest.raises(Replaced):
        tracker.metrics([(1, ROW)])
        tracker.finish("FINISHED")
    assert steps(tmp_path) == []


# ------------------------------------------------------------------------------------------------ whole runs
class Observer(Memory):
    """Does something after a round."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        super().__init__()
        self._actions = actions

    def metrics(self, rows: Sequence[Any]) -> None:
        for step, _ in rows:
            self._actions.get(step, int)()


def resolved(quick: Sequence[str], uri: str) -> Resolved:
    return Resolved.load(None, [*quick, f"tracking.mlflow={uri}", "rounds.commit_every=1", "run.patience_s=0.5"])


def test_run_without_mlflow_is_resumed_and_logs_all(
    quick: Sequence[str], mlflow_uri: str, tmp_path: Path, no_drawings: None
) -> None:
    given = resolved(quick, mlflow_uri)
    with ExitStack() as outage, pytest.raises(Unreachable, match="--resume"):
        run(given, "a", Attempt(observer=Observer({1: lambda: outage.enter_context(away(tmp_path))})))
    assert steps(tmp_path) == [1]
    assert len(list(Path("runs/a/rounds").iterdir())) > 1, "the rounds continued"
    run(given, "a", Attempt(resume=True))
    assert steps(tmp_path) == [1, 2, 3] and statuses(tmp_path) == ["FINISHED"]


def test_stopped_run_does_not_wait_for_a_server_that_hangs(
    quick: Sequence[str], mlflow_uri: str, tmp_path: Path, no_drawings: None
) -> None:
    given, stopped = resolved(quick, mlflow_uri), list[float]()
    with ExitStack() as outage, pytest.raises(Stopped, match="--resume"):

        def stop() -> None:
            outage.enter_context(locked(tmp_path))
            stopped.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)

        run(given, "a", Attempt(observer=Observer({2: stop})))
    assert time.monotonic() - stopped[0] < 18
    until(lambda: statuses(tmp_path) == ["KILLED"], "the run's end in MLflow", 60)
    run(given, "a", Attempt(resume=True))
    assert steps(tmp_path) == [1, 2, 3]
