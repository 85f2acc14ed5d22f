"""A real PostgreSQL, as MLflow's database and as a study's: it is stopped, killed and started again, or full."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest

from fl_engine.core.errors import ConfigError, Unreachable, UnreachableAddress
from flexfleet.experiments import tune_trials
from flexfleet.tracking import server
from flexfleet.tracking.trackers import MLflow
from tests.harness import postgres
from tests.harness.outages import FIRST, interrupted_and_resumed, opened
from tests.harness.outages import asked_anew as asked_anew  # a fixture, as the next
from tests.harness.outages import waits as waits
from tests.harness.postgres import Postgres

pytest.importorskip("psycopg", reason="psycopg, PostgreSQL's driver, is not installed (the extra `dev` has it)")

pytestmark = pytest.mark.usefixtures("asked_anew")


@pytest.fixture(scope="module")
def of_module() -> Iterator[Postgres]:
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install --no-install-recommends postgresql)")
    with postgres.serving() as started:
        started.execute("CREATE DATABASE mlflow")
        MLflow(started.url(database="mlflow"), "e", "first", {})  # creates its tables, which takes seconds
        yield started


@pytest.fixture
def pg(of_module: Postgres) -> Iterator[Postgres]:
    yield of_module
    of_module.stop()
    of_module.start()


REFUSED: dict[str, tuple[Callable[[Postgres], str], str]] = {
    "a wrong password": (lambda pg: pg.url("admin:pl4nted-wrong"), "password authentication failed"),
    "a wrong password, by name": (
        lambda pg: pg.url("admin:pl4nted-wrong").replace("127.0.0.1", "localhost"),
        "password authentication failed",
    ),
    "no role": (lambda pg: pg.url("nobody:pl4nted-word"), "password authentication failed"),
    "no database": (lambda pg: pg.url(database="nowhere"), 'database "nowhere" does not exist'),
    "no TLS": (lambda pg: pg.url(more="?sslmode=require"), "SSL was required"),
    "an unknown option": (lambda pg: pg.url(more="?nonsense=1"), 'invalid connection option "nonsense"'),
}


@pytest.mark.parametrize("who", [*FIRST, "a worker"])
@pytest.mark.parametrize("why", REFUSED)
def test_a_database_that_lets_nobody_in_is_told_at_once(
    who: str, why: str, of_module: Postgres, waits: list[float]
) -> None:
    url, said = REFUSED[why]
    with pytest.raises(ConfigError, match=rf"cannot be used: .*{said}") as error:
        {**FIRST, "a worker": lambda url: opened(url, begun=True)}[who](url(of_module))
    assert error.value.exit_code == 2 and waits == [] and "pl4nted" not in str(error.value)


def fill(pg: Postgres) -> Any:
    """Gives the one connection that there may be: as long as it is there, nobody else gets in."""
    pg.stop()
    pg.start(max_connections=1, superuser_reserved_connections=0)
    return pg.connected()


AWAY: dict[str, Callable[[Postgres], Any]] = {
    "stopped": lambda pg: pg.stop(),
    "killed": lambda pg: pg.stop(signal.SIGQUIT),
    "out of connections": fill,
}


@pytest.mark.parametrize("how", AWAY)
def test_mlflow_s_database_that_goes_away_is_an_outage_and_nothing_is_lost(
    how: str, pg: Postgres, waits: list[float]
) -> None:
    run = MLflow(pg.url(database="mlflow"), "e", how, {})
    run.metrics([(1, {"avg": 0.5, "seconds_round": 1.0})])
    with AWAY[how](pg) or nullcontext():
        run.metrics([(2, {"avg": 0.6, "seconds_round": 1.0})])
        with pytest.raises(Unreachable, match=r"MLflow at .* does not answer: ") as error:
            run.finish("FINISHED")
        with pytest.raises(UnreachableAddress):
            MLflow(pg.url(database="mlflow", more="?application_name=another"), "e", "name", {})
    assert "pl4nted" not in str(error.value)
    pg.stop()
    pg.start()
    run.finish("FINISHED")
    history = server.client_of(run.uri).get_metric_history(run.run_id, "avg")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.6)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_restart_of_a_study_s_database_between_two_rounds_stops_nothing(how: int, pg: Postgres) -> None:
    study = opened(pg.url())
    trial = study.ask()
    trial.report(0.1, 1)
    pg.stop(how)
    pg.start()
    trial.report(0.2, 2)
    study.tell(trial, 0.2)
    assert opened(pg.url()).trials[-1].intermediate_values == {1: 0.1, 2: 0.2}


def test_a_study_s_database_that_is_away_stops_the_worker_and_costs_the_trial_no_try(
    pg: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupted_and_resumed(pg.url(), tmp_path, monkeypatch, pg.stop, pg.start)


def test_what_a_study_logs_of_an_outage_shows_no_password(
    pg: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr(tune_trials, "BEAT_S", 0.01)
    trial, told = opened(pg.url()).ask(), threading.Event()
    monkeypatch.setattr(
        tune_trials.log, "warning", lambda *said, warn=tune_trials.log.warning: (warn(*said), told.set())
    )
    optuna.logging.enable_propagation()
    try:
        with tune_trials.beating(trial):
            pg.stop()
            assert told.wait(postgres.WAIT_S)
    finally:
        optuna.logging.disable_propagation()
    assert "may: (psycopg.OperationalError) connection failed" in caplog.text and "pl4nted" not in caplog.text
