"""The checks of the first tasks: can the run store, MLflow and the DVC remote be used?"""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure, Refused, SeveralErrors, Unreachable
from fl_engine.storage.s3 import S3Store
from flexfleet.pipeline import reachable
from flexfleet.pipeline.reachable import check_form, unusable
from tests.harness.moto_server import moto


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    given = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    with moto() as endpoint:
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **given}.items():
            monkeypatch.setenv(name, value)
        boto3.session.Session().client("s3").create_bucket(Bucket="runs")
        yield "s3://runs/all"


@contextmanager
def answering(status: int, body: str, seen: list[Any] | None = None) -> Iterator[str]:
    """The address of a server that answers every request so, and notes path and login in `seen`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_usable_places_have_no_errors_and_keep_no_probe(bucket: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    with answering(200, "{}", seen) as mlflow:
        assert unusable(bucket, mlflow, f"{tmp_path}/dvc") == []
    probes = [key for key in S3Store("s3://runs").list("") if "probe" in key]
    assert not probes and list((tmp_path / "dvc").iterdir()) == []
    assert seen == [("/api/2.0/mlflow/experiments/search?max_results=1", None)]


def test_missing_bucket_names_run_remote(bucket: str) -> None:
    (error,) = unusable("s3://no-such-bucket/runs", None, None)
    assert isinstance(error, Refused) and str(error).startswith("run.remote")


def test_folder_that_cannot_be_written_names_run_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (error,) = unusable(f"{tmp_path}/file/runs", None, None)
    assert isinstance(error, EnvironmentFailure) and str(error).startswith("run.store")


def test_all_unusable_places_are_reported(bucket: str) -> None:
    found = unusable("s3://no-such-bucket/runs", "http://127.0.0.1:9", "s3://no-such-remote/dvc")
    assert [str(error).split()[0] for error in found] == ["run.remote", "publish.dvc", "tracking.mlflow"]
    assert isinstance(found[2], Unreachable)


def test_silent_server_is_given_up_at_the_deadline(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "DEADLINE_S", 1.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    began = time.monotonic()
    found = unusable("s3://runs/all", f"http://127.0.0.1:{silent}", None)
    assert time.monotonic() - began < 5
    assert [(type(error), str(error).split()[0]) for error in found] == [
        (Unreachable, "run.remote"), (Unreachable, "tracking.mlflow"),
    ]  # fmt: skip


def test_mlflow_is_asked_with_the_login_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    with answering(200, "{}", seen) as mlflow:
        assert unusable(None, mlflow, None) == []
    assert seen[0][1] == f"Basic {base64.b64encode(b'me:secret').decode()}"


@pytest.mark.parametrize(("status", "body"), [(401, ""), (404, "{}"), (200, "<html>")])
def test_server_that_is_not_the_users_mlflow_is_refused(status: int, body: str) -> None:
    with answering(status, body) as mlflow:
        (error,) = unusable(None, mlflow, None)
    assert isinstance(error, Refused) and str(error).startswith("tracking.mlflow")


def form(**given: Any) -> dict[str, Any]:
    return {"store_uri": "", "mlflow_uri": "", "advanced": {}, **given}


def test_empty_store_uri_is_refused_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXFLEET_S3_STORE", raising=False)
    with pytest.raises(ConfigError, match="store_uri"):
        check_form(form(), lambda store: store)


def test_empty_store_uri_is_the_platforms_bucket(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_S3_STORE", bucket)
    assert check_form(form(), lambda store: store) == bucket


def test_faults_of_form_and_places_are_one_error(bucket: str, tmp_path: Path) -> None:
    def refuse(store: str) -> None:
        raise ConfigError("algorithm.name is wrong")

    given = form(store_uri=str(tmp_path), advanced={"publish.dvc": "s3://no-such-remote/dvc"})
    with pytest.raises(SeveralErrors) as found:
        check_form(given, refuse)
    assert found.value.exit_code == ConfigError.exit_code
    assert [str(error).split()[0] for error in found.value.errors] == ["algorithm.name", "publish.dvc"]


def test_address_with_a_password_is_not_asked(tmp_path: Path) -> None:
    seen: list[Any] = []
    with answering(200, "{}", seen) as mlflow, pytest.raises(ConfigError, match="mlflow_uri"):
        check_form(form(mlflow_uri=mlflow.replace("://", "://me:pw@")), lambda store: store)
    assert seen == []
