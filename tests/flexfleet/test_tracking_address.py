"""The address of MLflow: what cannot be one is said before anything trains, and who cannot be reached is named."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import mlflow.store.db.utils
import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure, UnreachableAddress
from flexfleet.tracking import server
from flexfleet.tracking.server import address, check_address, client_of
from flexfleet.tracking.trackers import MLflow


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow tries again for two minutes."""
    monkeypatch.setattr(mlflow.store.db.utils.time, "sleep", lambda _: None)


@pytest.mark.parametrize(
    "uri",
    ["sqlite:////proc/nowhere/mlflow.db", "sqlite:///{tmp}", "nonsense://host/x", "/proc/nowhere", "sqlit:///a.db"],
)
def test_an_address_that_cannot_be_used_is_a_configuration_error(tmp_path: Path, uri: str, impatient: None) -> None:
    uri = uri.format(tmp=tmp_path)
    with pytest.raises(ConfigError, match=r"tracking\.mlflow") as error:
        MLflow(uri, "experiment", "name", {})
    assert uri in str(error.value)


def test_a_file_that_is_no_data_base_is_a_configuration_error(tmp_path: Path, impatient: None) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is no database, and it is long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match=r"tracking\.mlflow"):
        MLflow(f"sqlite:///{tmp_path / 'mlflow.db'}", "experiment", "name", {})


def test_an_address_is_tried_before_anything_trains(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = flexfleet("run", "--run-id", "a", sets=[*quick, "tracking.mlflow=nonsense://x"])
    assert done.code == 2 and "tracking.mlflow = 'nonsense://x' cannot be used" in done.err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    done = flexfleet("run", "--run-id", "a", sets=[*quick, "run.remote=s3://runs/x"])
    assert done.code == 6 and "s3://runs/x/a" in done.err and "credentials" in done.err
    assert not Path("runs").exists()


WRONG = {
    "sqlit:///a.db": r"the scheme 'sqlit' is none of .* \(did you mean 'sqlite'\?\)",
    "postgres://host/x": r"the scheme 'postgres' is none of .* \(did you mean 'postgresql'\?\)",
    "http://": "it names no host",
    "https://:5000": "it names no host",
    "http://me:pw@": "it names no host",
    "http://me:pw@:5000/x": "it names no host",
    "http://me:pw@host:5000/#/experiments/3": "it is of a page: .* before the #, http://host:5000/\n",
    "mlflow.flexfleet:5000": r".*begins with http:// .* as in http://mlflow\.flexfleet:5000; for a folder",
    "my_mlflow:5000": "a server's address begins with http://",
    "localhost:5000/": "a server's address begins with http://",
    "sqlite:///folder": "folder is a folder, the file of a database is expected",
    "sqlite:///file/a.db": "file is a file, a folder is expected",
    "file": "file is a file, a folder is expected; the file of a database is sqlite:///PATH",
    "file://file/below": "file is a file, a folder is expected",
    "x" * 300: "x+ cannot be looked at: File name too long",
    f"sqlite:///{'x' * 300}/a.db": "x+/a.db cannot be looked at: File name too long",
}
RIGHT = (
    "sqlite:///new/a.db", "sqlite:///file", "sqlite:///:memory:", "sqlite:///", "sqlite:///a.db?mode=rw", "folder",
    "HTTP://host:5000", "https://me:pw@host/x", "https://me:p@host?a=b", "postgresql+psycopg2://host/x",
    "databricks", "new/mlruns", "./new:1",
)  # fmt: skip


@pytest.fixture
def addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("uri", WRONG)
def test_a_check_refuses_what_cannot_be_an_address(
    flexfleet: Any, quick: Sequence[str], addresses: Path, uri: str
) -> None:
    done = flexfleet("check", sets=[*quick, f"tracking.mlflow={uri}"])
    shown = re.escape(uri.replace("me:pw@", ""))
    assert done.code == 2 and re.search(f"tracking.mlflow = '{shown}' cannot be used: {WRONG[uri]}", done.err)


@pytest.mark.parametrize("uri", ["sqlite:///closed/a.db", "closed/mlruns", "file://closed/mlruns"])
def test_a_check_refuses_what_it_may_not_look_at(addresses: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    stat = Path.stat

    def closed(path: Path, **kwargs: Any) -> os.stat_result:
        if path.parts[:-1] == ("closed",):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(ConfigError, match=r"closed/.* cannot be looked at: Permission denied"):
        check_address(uri)


@pytest.mark.parametrize("name", ["q?x", "p%41"])
def test_a_folder_that_no_address_can_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy opens `q` and `pA/mlflow.db`."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    told = rf"cannot be used: it is in .*{re.escape(name)}, and '(\?|%41)' means something else in an address"
    for ask in (check_address, client_of):
        with pytest.raises(ConfigError, match=told):
            ask("sqlite:///mlflow.db")
    assert [path.name for path in tmp_path.rglob("*")] == [name], "nothing is written"
    check_address("sqlite:///../mlflow.db")
    assert address("sqlite:///../mlflow.db?timeout=9") == f"sqlite:///{tmp_path}/mlflow.db?timeout=9"


@pytest.mark.parametrize("uri", RIGHT)
def test_a_check_asks_no_server_and_writes_nothing(addresses: Path, uri: str) -> None:
    check_address(uri)
    assert sorted(path.name for path in addresses.iterdir()) == ["file", "folder"]


def test_a_server_that_does_not_answer_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"tracking\.mlflow"):
        MLflow("http://127.0.0.1:9", "experiment", "name", {})


@pytest.mark.parametrize("wanted", [None, "false"])
def test_mlflow_is_imported_without_its_telemetry_unless_somebody_wants_it(
    wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Looking:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mlflow":
                found.append(os.environ.get("MLFLOW_DISABLE_TELEMETRY"))
                raise ImportError("is looked at only")

    found = list[str | None]()
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    if wanted is not None:
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", wanted)
    monkeypatch.delitem(sys.modules, "mlflow")
    monkeypatch.setattr(sys, "meta_path", [Looking(), *sys.meta_path])
    with pytest.raises(EnvironmentFailure, match="mlflow is not installed"):
        client_of("http://nowhere")
    assert found == [wanted or "true"]


@pytest.mark.parametrize(
    "said",
    [
        "('Connection broken: IncompleteRead(84 bytes read, 84 more expected)', IncompleteRead(84 bytes read))",
        "Response ended prematurely",
        "API request to endpoint /get-by-name failed with error code 520 != 200. Response body: '<html></html>'",
    ],
)
def test_half_an_answer_and_a_proxy_s_error_may_be_whole_at_another_try(said: str) -> None:
    with pytest.raises(UnreachableAddress), server.usable("http://nowhere"):
        raise mlflow.MlflowException(f"API request to http://nowhere/get-by-name failed with exception {said}")


@pytest.mark.parametrize(
    "cause",
    [
        "attempt to write a readonly database",
        "database or disk is full",
        "Disk quota exceeded",
        "a read-only transaction",
    ],
)
@pytest.mark.parametrize("of_server", ["", "BAD_REQUEST: "])
def test_a_database_that_takes_nothing_is_an_environment_error_that_says_why(cause: str, of_server: str) -> None:
    said = f"(raised as a result of Query-invoked autoflush; consider)\n(sqlite3.OperationalError) {cause}\n[SQL: ...]"
    with pytest.raises(EnvironmentFailure) as error, server.usable("sqlite:///a.db"):
        raise mlflow.MlflowException(of_server + said)
    assert str(error.value) == f"tracking.mlflow = 'sqlite:///a.db' cannot be used: (sqlite3.OperationalError) {cause}"


def test_an_address_that_cannot_be_used_is_said_without_sqlalchemy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow-skinny, which the image has, comes without."""
    monkeypatch.setitem(sys.modules, "sqlalchemy.exc", None)
    said = r"tracking\.mlflow = 'http://nowhere' cannot be used: refused"
    with pytest.raises(ConfigError, match=said), server.usable("http://nowhere"):
        raise ConnectionError("refused")


def test_a_password_with_a_hash_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"comes before the #, http://host:5000$"):
        server.check_address("http://me:pw#pw@host:5000")


def test_start_that_waits_for_a_server_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow's own retries take minutes, and say nothing. What can be done differs in a pod and on a terminal."""
    caplog.set_level(logging.WARNING, "flexfleet")
    monkeypatch.setattr(server, "SILENT_S", 0.05)
    end = time.monotonic() + 10
    with server.usable("http://me:word@mlflow:5000"):
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.01)
    assert caplog.messages == ["waiting for MLflow at http://mlflow:5000, 0 s so far"]
    caplog.clear()
    with server.usable("http://mlflow:5000"):
        pass
    time.sleep(0.1)
    assert caplog.messages == [], "it has answered"


def test_each_try_of_a_server_that_is_not_there_is_a_line_with_v_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """urllib3 warns of each, in words of its own; the run logs what it waits for."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

    def tried(level: int) -> int:
        caplog.clear()
        caplog.set_level(level, "flexfleet")
        with pytest.raises(UnreachableAddress):
            server.connect("http://127.0.0.1:9", "an experiment")
        return caplog.text.count("Retrying")

    assert tried(logging.INFO) == 0
    assert tried(logging.DEBUG) == 1
