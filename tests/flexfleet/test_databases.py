"""Databases of MLflow and of studies: an outage is waited for, other errors are reported, and no password is shown."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from optuna.exceptions import StorageInternalError

from fl_engine.core.errors import ConfigError, Refused, Unreachable, UnreachableAddress
from flexfleet.config import Config
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.tracking import databases, server
from flexfleet.tracking.trackers import MLflow
from tests.harness import postgres
from tests.harness.postgres import Postgres

pytest.importorskip("psycopg", reason="psycopg, PostgreSQL's driver, is not installed (the extra `dev` has it)")

FIRST: dict[str, Callable[[str], Any]] = {
    "MLflow": lambda url: MLflow(url, "e", "name", {}),
    "a study": lambda url: tune_storage.open_study(Config(tune={"storage": url}), Path("folder"), "a"),
}
"""The first calls of a database, by who makes them."""


@pytest.fixture(autouse=True)
def _no_address_is_known(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXFLEET_TUNE_STORAGE", raising=False)
    databases.check_connection.cache_clear()


@pytest.mark.parametrize("who", FIRST)
def test_database_that_never_answered_is_an_unreachable_address(who: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(UnreachableAddress) as error:
            FIRST[who](f"postgresql+psycopg://me:pl4nted@127.0.0.1:{bound.getsockname()[1]}/db")
    assert error.value.exit_code == 6 and "pl4nted" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "later", "first"),
    [
        (sqlalchemy.exc.OperationalError, Unreachable, UnreachableAddress),
        (sqlalchemy.exc.InterfaceError, Unreachable, UnreachableAddress),
        (sqlalchemy.exc.ProgrammingError, Refused, ConfigError),
        (sqlalchemy.exc.DataError, Refused, ConfigError),
    ],
)
def test_kind_of_a_database_error_tells_outages_from_refusals(
    kind: type[sqlalchemy.exc.DBAPIError], later: type[Exception], first: type[Exception]
) -> None:
    error = kind("INSERT INTO x", {}, Exception("said"))
    wrapped = MlflowException(str(error), error_code=BAD_REQUEST)
    wrapped.__cause__ = error
    for raised in (error, wrapped):
        with pytest.raises(later), server.explained("postgresql://host/db", "it"):
            raise raised
        with pytest.raises(first), server.first_calls("x"), server.explained("postgresql://host/db", "it"):
            raise raised
    with pytest.raises(later, match="said"), tune_storage.answering(Config()):
        raise StorageInternalError("An exception is raised during the commit.") from error


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:pl4nted/pa@pl4nted@host/db",
        "mysql+pymysql://me:pl4n?ted@pl4nted:7@host:1/db",
        "postgresql://me:pl4nted xyzzy@host/db",
    ],
)
@pytest.mark.parametrize("who", [*FIRST, "a check"])
def test_unquoted_password_is_refused_and_not_shown(who: str, url: str) -> None:
    with pytest.raises(ConfigError) as error:
        {**FIRST, "a check": server.check_address}[who](url)
    assert not re.search("pl4n|xyzzy|host", str(error.value))


def test_outage_of_a_study_stops_the_worker_and_costs_no_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The database goes away within a trial, whose values are tried again when the study is resumed."""
    file, away = tmp_path / "study.db", tmp_path / "away.db"
    config = Config(tune={"storage": f"sqlite:///{file}", "trials": 1})
    monkeypatch.setattr(tune_worker, "searched", lambda *_: ({}, None))
    monkeypatch.setattr(tune_worker, "_pools", lambda *_: [])
    tune_storage.open_study(config, tmp_path, "outage").enqueue_trial({"training.lr": 0.5})

    def cut_off(config: Config, study: Any, trial: Any, ready: Any) -> float:
        file.rename(away)
        file.mkdir()
        tune_worker.Reporter(trial, "avg").metrics([(1, {"avg": 0.5})])
        pytest.fail("the database stored it")

    monkeypatch.setattr(tune_worker, "_trial", cut_off)
    with pytest.raises(Unreachable):
        tune_worker.work(config, tmp_path, "outage")
    file.rmdir()
    away.rename(file)
    monkeypatch.setattr(tune_worker, "_trial", lambda *_: 0.5)
    assert tune_worker.work(config, tmp_path, "outage") == [1]
    (first, again) = tune_storage.open_study(config, tmp_path, "outage").trials
    assert (first.state.name, again.state.name) == ("FAIL", "COMPLETE")
    assert again.system_attrs["fixed_params"] == {"training.lr": 0.5}
    assert again.user_attrs[tune_worker.DEATHS] == 1


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


@pytest.mark.long
def test_outage_of_mlflows_database_loses_no_metric(pg: Postgres) -> None:
    run = MLflow(pg.url(database="mlflow"), "e", "outage", {})
    run.metrics([(1, {"avg": 0.5, "seconds_round": 1.0})])
    pg.stop("immediate")
    run.metrics([(2, {"avg": 0.6, "seconds_round": 1.0})])
    with pytest.raises(Unreachable) as error:
        run.finish("FINISHED")
    assert "pl4nted" not in str(error.value)
    pg.start()
    run.finish("FINISHED")
    history = server.Client(run.uri).get_metric_history(run.run_id, "avg")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.6)]
