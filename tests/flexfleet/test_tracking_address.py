"""Addresses of MLflow: wrong ones are refused before anything trains, and outages are told from refusals."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest
import requests

from fl_engine.core.errors import ConfigError, Refused, Unreachable, UnreachableAddress
from flexfleet.tracking import server
from flexfleet.tracking.server import address, check_address
from flexfleet.tracking.trackers import MLflow

pytestmark = pytest.mark.usefixtures("own_folder")


def test_address_is_tried_before_anything_trains(flexfleet: Any, quick: Sequence[str]) -> None:
    done = flexfleet("run", "--run-id", "a", sets=[*quick, "tracking.mlflow=nonsense://x"])
    assert done.code == 2 and "tracking.mlflow" in done.err and not Path("runs").exists()


@pytest.mark.parametrize(("is_http", "error"), [(True, ConfigError), (False, UnreachableAddress)])
def test_server_without_mlflow_is_found_within_seconds(is_http: bool, error: type[ConfigError]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as found:
        if is_http:
            threading.Thread(target=found.handle_request, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ConfigError) as raised:
            server.check_server(f"http://127.0.0.1:{found.server_port}")
    assert type(raised.value) is error and raised.value.path == "tracking.mlflow"
    assert "\n" not in str(raised.value) and time.monotonic() - began < 10


def test_server_that_does_not_answer_ends_a_job_for_another_try(flexfleet: Any, quick: Sequence[str]) -> None:
    """A pod may start before MLflow's. Its Job (k8s/overlays/kind/run.yaml) ends for good only with exit code 2."""
    done = flexfleet("run", "--run-id", "a", sets=[*quick, "tracking.mlflow=http://127.0.0.1:9"])
    assert done.code == 6 and "tracking.mlflow" in done.err


def test_file_that_is_not_a_database_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is no database, and it is long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match=r"tracking\.mlflow"):
        MLflow(f"sqlite:///{tmp_path / 'mlflow.db'}", "experiment", "name", {})


@pytest.mark.parametrize(
    "uri",
    [
        "sqlit:///a.db",
        "http://",
        "http://me:pw@host:5000/#/experiments/3",
        "http://me:pw#pw@host:5000",
        "mlflow.x:5000",
    ],
)
def test_malformed_address_is_refused_without_its_password(uri: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_address(uri)
    assert error.value.path == "tracking.mlflow" and "pw" not in str(error.value)


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///new/a.db", "sqlite:///:memory:", "sqlite:///a.db?mode=rw", "HTTP://host:5000",
        "https://me:pw@host/x", "postgresql+psycopg2://host/x", "databricks", "new/mlruns", "./new:1",
    ],
)  # fmt: skip
def test_address_is_checked_without_writing(uri: str, tmp_path: Path) -> None:
    check_address(uri)
    assert list(tmp_path.iterdir()) == []


def test_sqlite_file_has_its_whole_path(tmp_path: Path) -> None:
    assert address("sqlite:///../mlflow.db?timeout=9") == f"sqlite:///{tmp_path.parent}/mlflow.db?timeout=9"


@pytest.mark.parametrize(
    ("cause", "is_away"),
    [
        (requests.exceptions.ConnectionError("refused"), True),
        (requests.exceptions.ChunkedEncodingError("Response ended prematurely"), True),
        (requests.exceptions.RetryError("too many 503 error responses"), True),
        (requests.exceptions.SSLError("certificate verify failed"), False),
        (requests.exceptions.InvalidURL("no host"), False),
    ],
)
def test_transport_errors_are_outages_if_a_retry_can_help(cause: Exception, is_away: bool) -> None:
    error = mlflow.MlflowException("API request failed")
    error.__cause__ = cause
    with pytest.raises(Unreachable if is_away else Refused), server.explained("http://nowhere", "it"):
        raise error
