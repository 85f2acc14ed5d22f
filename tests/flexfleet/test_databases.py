"""Databases of MLflow and of studies: an outage is waited for, other errors are reported, and no password is shown."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from optuna.exceptions import StorageInternalError

from fl_engine.core.errors import ConfigError, Refused, Unreachable, UnreachableAddress
from flexfleet.config import Config
from flexfleet.experiments import tune_storage
from flexfleet.tracking import server
from flexfleet.tracking.trackers import MLflow
from tests.harness import postgres
from tests.harness.outages import FIRST, interrupted_and_resumed, opened
from tests.harness.outages import asked_anew as asked_anew  # a fixture
from tests.harness.postgres import Postgres

pytest.importorskip("psycopg", reason="psycopg, PostgreSQL's driver, is not installed (the extra `dev` has it)")

pytestmark = pytest.mark.usefixtures("asked_anew")


# ------------------------------------------------------------------------------------------------------ errors
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
        with pytest.raises(later), server.answering("postgresql://host/db"):
            raise raised
        with pytest.raises(first), server.usable("postgresql://host/db"):
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


# ------------------------------------------------------------------------------------------------------ studies
def test_study_creates_the_folder_of_its_file_when_it_begins() -> None:
    with pytest.raises(sqlalchemy.exc.OperationalError):
        opened("sqlite:///new/folder/study.db", begun=True)
    assert not Path("new").exists()
    opened("sqlite:///new/folder/study.db").enqueue_trial({"x": 1.0})
    assert len(opened("sqlite:///new/folder/study.db", begun=True).trials) == 1


def test_outage_of_a_study_stops_the_worker_and_costs_no_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, away = tmp_path / "study.db", tmp_path / "away.db"

    def leave() -> None:
        file.rename(away)
        file.mkdir()

    def come_back() -> None:
        file.rmdir()
        away.rename(file)

    interrupted_and_resumed(f"sqlite:///{file}", tmp_path, monkeypatch, leave, come_back)


# --------------------------------------------------------------------------------------------- a real PostgreSQL
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
@pytest.mark.parametrize("who", FIRST)
def test_wrong_password_is_reported_at_once_and_not_shown(who: str, of_module: Postgres) -> None:
    with pytest.raises(ConfigError, match="password authentication failed") as error:
        FIRST[who](of_module.url("admin:pl4nted-wrong"))
    assert "pl4nted" not in str(error.value)


@pytest.mark.long
def test_outage_of_mlflows_database_loses_no_metric(pg: Postgres) -> None:
    run = MLflow(pg.url(database="mlflow"), "e", "outage", {})
    run.metrics([(1, {"avg": 0.5, "seconds_round": 1.0})])
    pg.stop(signal.SIGQUIT)
    run.metrics([(2, {"avg": 0.6, "seconds_round": 1.0})])
    with pytest.raises(Unreachable) as error:
        run.finish("FINISHED")
    assert "pl4nted" not in str(error.value)
    pg.start()
    run.finish("FINISHED")
    history = server.client_of(run.uri).get_metric_history(run.run_id, "avg")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.6)]


@pytest.mark.long
def test_restart_of_a_studys_database_stops_nothing(pg: Postgres) -> None:
    study: Any = opened(pg.url())
    trial = study.ask()
    trial.report(0.1, 1)
    pg.stop()
    pg.start()
    trial.report(0.2, 2)
    study.tell(trial, 0.2)
    assert opened(pg.url()).trials[-1].intermediate_values == {1: 0.1, 2: 0.2}
