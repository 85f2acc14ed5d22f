"""Databases as MLflow's and as a study's: one that is away is waited for or told so, one that lets nobody in is told at
once, and no error shows a password.

The drivers' own errors, of ports where nobody listens, stand in for a server here; test_postgres.py has a real one.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy
from mlflow.exceptions import MlflowException
from optuna.exceptions import StorageInternalError

from fl_engine.core.errors import ConfigError, Refused, Unreachable, UnreachableAddress
from flexfleet.config import Config
from flexfleet.experiments import tune as steps
from flexfleet.experiments import tune_space, tune_storage, tune_worker
from flexfleet.tracking import databases, server
from tests.harness.outages import FIRST, interrupted_and_resumed, opened
from tests.harness.outages import asked_anew as asked_anew  # a fixture, as the next
from tests.harness.outages import waits as waits

pytest.importorskip("psycopg", reason="psycopg, PostgreSQL's driver, is not installed (the extra `dev` has it)")

pytestmark = pytest.mark.usefixtures("asked_anew")


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def closing() -> Iterator[int]:
    """The port of a server that closes each connection, as one that dies."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=close, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("who", FIRST)
@pytest.mark.parametrize("how", ["port", "closing"])
def test_a_database_that_never_answered_may_answer_at_another_try(
    who: str, how: str, request: pytest.FixtureRequest, waits: list[float]
) -> None:
    url = f"postgresql+psycopg://me:pl4nted@127.0.0.1:{request.getfixturevalue(how)}/db"
    with pytest.raises(UnreachableAddress, match=r"cannot be used: .*(Connection refused|closed the conn)") as error:
        FIRST[who](url)
    assert error.value.exit_code == 6 and "pl4nted" not in str(error.value)
    assert (len(waits) > 5) == (who == "MLflow"), "MLflow waits for one that starts"


SAID = {
    "terminating connection due to administrator command": Unreachable,
    "the database system is starting up": Unreachable,
    "the database system is in recovery mode": Unreachable,
    "sorry, too many clients already": Unreachable,
    "remaining connection slots are reserved for roles with the SUPERUSER attribute": Unreachable,
    'too many connections for role "me"': Unreachable,
    "consuming input failed: server closed the connection unexpectedly": Unreachable,
    "the connection is lost": Unreachable,
    "failed to resolve host 'postgres': [Errno -3] Temporary failure in name resolution": Unreachable,
    "(2003, \"Can't connect to MySQL server on 'host' (timed out)\")": Unreachable,
    "(2006, 'Server has gone away')": Unreachable,
    "(1040, 'Too many connections')": Unreachable,
    "deadlock detected": Unreachable,
    "value too long for type character varying(5000)": Refused,
    "permission denied for table runs": Refused,
    'password authentication failed for user "me"': Refused,
    "(1045, \"Access denied for user 'me'@'host' (using password: YES)\")": Refused,
    "(2003, \"Can't connect to MySQL server on 'host' ([SSL: CERTIFICATE_VERIFY_FAILED] ...)\")": Refused,
}
"""What databases say, and what that is of a database that worked before."""


@pytest.mark.parametrize("said", SAID)
def test_what_a_database_says_is_an_outage_or_a_refusal(said: str) -> None:
    """Whatever values the command had, which SQLAlchemy tells too."""
    values = {"a": "Connection refused", "b": "authentication failed"}
    error = sqlalchemy.exc.OperationalError("INSERT INTO x", values, Exception(said))
    at_first = UnreachableAddress if SAID[said] is Unreachable else ConfigError
    for raised in (error, MlflowException(error), MlflowException(f"BAD_REQUEST: {error}")):
        with pytest.raises(SAID[said]) as found, server.answering("postgresql://host/db"):
            raise raised
        assert type(found.value) is SAID[said]
        with pytest.raises(at_first) as first, server.usable("postgresql://host/db"):
            raise raised
        assert type(first.value) is at_first


@pytest.mark.parametrize(
    ("kind", "said", "what"),
    [
        (sqlalchemy.exc.OperationalError, "words that nobody knows", Unreachable),
        (sqlalchemy.exc.InterfaceError, "(0, '')", Unreachable),
        (sqlalchemy.exc.InternalError, "terminating connection due to administrator command", Unreachable),
        (sqlalchemy.exc.ProgrammingError, "permission denied for table studies", Refused),
        (sqlalchemy.exc.DataError, "PostgreSQL text fields cannot contain NUL (0x00) bytes", Refused),
        (sqlalchemy.exc.OperationalError, "(1142, \"INSERT command denied to user 'me'\")", Refused),
        (sqlalchemy.exc.OperationalError, 'password authentication failed for user "me"', Refused),
    ],
)
def test_what_the_database_of_a_study_says_once_it_has_begun_is_an_outage_or_a_refusal(
    kind: type[sqlalchemy.exc.DBAPIError], said: str, what: type[Exception]
) -> None:
    verb = "refuses" if what is Refused else "does not answer"
    with (
        pytest.raises(what, match=rf"^the study's database \(file\) {verb}: .*{re.escape(said)}$") as found,
        tune_storage.answering(Config()),
    ):
        try:
            raise kind("INSERT INTO x", {"a": "Connection refused", "b": "authentication failed"}, Exception(said))
        except sqlalchemy.exc.DBAPIError as error:
            raise StorageInternalError("An exception is raised during the commit.") from error
    assert type(found.value) is what


def test_a_connection_that_the_driver_knows_to_be_lost_is_an_outage_in_any_language() -> None:
    lost = sqlalchemy.exc.OperationalError("", {}, Exception("la connexion a fermé"), connection_invalidated=True)
    with pytest.raises(Unreachable), server.answering("postgresql://host/db"):
        try:
            raise lost
        except sqlalchemy.exc.OperationalError as error:
            raise MlflowException(str(error)) from error


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("postgresql://me:pl4nted/pa@pl4nted@host/db", "an @"),
        ("mysql+pymysql://me:pl4n?ted@pl4nted:7@host:1/db", "an @"),
        ("mariadb+pymysql://me:pl4nted@pl4nted@host/db", "an @"),
        ("postgresql://me:pl4nted xyzzy@host/db", "a space"),
    ],
)
@pytest.mark.parametrize("who", [*FIRST, "a check"])
def test_a_password_that_nobody_quoted_is_refused_and_no_part_of_it_shown(who: str, url: str, what: str) -> None:
    ask = {**FIRST, "a check": server.check_address}[who]
    with pytest.raises(ConfigError, match=rf"://\.\.\. cannot be used: {what} in .* is to be quoted") as error:
        ask(url)
    assert not re.search("pl4n|xyzzy|host", str(error.value))


@pytest.mark.parametrize(
    "url",
    [
        "mssql+pyodbc:///?odbc_connect=DRIVER={ODBC Driver 17};UID=me@host;PWD=word",
        "mysql+pymysql://host/db?ssl_ca=/home/a b/c@d.pem",
        "postgresql://me:word@host/db?application_name=a b@c",
    ],
)
def test_a_space_or_an_at_behind_the_password_is_none_of_it(url: str) -> None:
    databases.check_spelling("tracking.mlflow", url)
    assert sqlalchemy.engine.make_url(url).query


@pytest.mark.parametrize("url", ["postgresql:/me:pl4nted@host/db", "MySQL+pymysql//me:pl4nted@host/db"])
@pytest.mark.parametrize("who", [*FIRST, "a check"])
def test_an_address_with_a_slash_or_colon_too_few_is_refused_and_no_password_shown(who: str, url: str) -> None:
    ask = {**FIRST, "a check": server.check_address}[who]
    with pytest.raises(ConfigError, match=r"= (postgresql|mysql)\.\.\. cannot be used: :// is expected") as error:
        ask(url)
    assert "pl4n" not in str(error.value)
    server.check_address("mysql/runs")  # a folder


def test_a_study_makes_the_folder_of_its_file_once_it_begins() -> None:
    with pytest.raises(sqlalchemy.exc.OperationalError):
        opened("sqlite:///new/folder/study.db", begun=True)
    assert not Path("new").exists()
    opened("sqlite:///new/folder/study.db").enqueue_trial({"x": 1.0})
    assert len(opened("sqlite:///new/folder/study.db", begun=True).trials) == 1


def test_a_new_study_opens_its_database_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    connects: list[object] = []
    for module, name, found in (
        (steps, "_examine", None),
        (steps, "_work_all", None),
        (steps, "conclude", "concluded"),
        (tune_worker, "prepare_default", None),
        (tune_worker, "searched", ({}, None)),
        (tune_space, "defaults", {}),
    ):
        monkeypatch.setattr(module, name, lambda *_, found=found: found)
    config = Config(run={"store": str(tmp_path)}, tracking={"mlflow": None}, tune={"storage": "sqlite:///study.db"})
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", (count := lambda *_: connects.append(None)))
    try:
        opened("sqlite:///another.db").enqueue_trial({})
        once = len(connects)
        assert steps.tune(config, "a") == "concluded"
    finally:
        sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", count)
    assert len(connects) == 2 * once
    assert len(tune_storage.open_study(config, tmp_path, "a").trials) == 1


def test_a_study_s_database_that_is_away_stops_the_worker_and_costs_the_trial_no_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, away = tmp_path / "study.db", tmp_path / "away.db"

    def leave() -> None:
        file.rename(away)
        file.mkdir()

    def come_back() -> None:
        file.rmdir()
        away.rename(file)

    interrupted_and_resumed(f"sqlite:///{file}", tmp_path, monkeypatch, leave, come_back)
