"""The first task of a pipeline checks that the run store, MLflow and the DVC remote can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, SeveralErrors, Unreachable
from fl_engine.storage.s3 import S3Store
from flexfleet.pipeline.check import check_form, unusable
from tests.harness.moto_server import bucket as bucket  # a fixture
from tests.harness.web import answering


def test_usable_servers_have_no_errors_and_no_probe_stays(bucket: str, tmp_path: Path) -> None:
    with answering(200, "{}") as mlflow:
        assert unusable(bucket, mlflow.url, f"{tmp_path}/dvc") == []
    probes = [key for key in S3Store("s3://runs").list("") if "probe" in key]
    assert not probes and list((tmp_path / "dvc").iterdir()) == []


def test_all_unusable_servers_are_reported(bucket: str) -> None:
    found = unusable("s3://no-such-bucket/runs", "http://127.0.0.1:9", "s3://no-such-remote/dvc")
    assert [error.path for error in found] == ["run.remote", "publish.dvc", "tracking.mlflow"]
    assert isinstance(found[2], Unreachable)


@pytest.mark.parametrize(("status", "body"), [(401, ""), (404, "{}"), (200, "<html>")])
def test_server_that_is_not_the_users_mlflow_is_refused(status: int, body: str) -> None:
    with answering(status, body) as mlflow:
        (error,) = unusable(None, mlflow.url, None)
    assert error.path == "tracking.mlflow"


def form(**given: Any) -> dict[str, Any]:
    return {"store_uri": "", "mlflow_uri": "", "advanced": {}, **given}


def test_empty_store_uri_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXFLEET_S3_STORE", raising=False)
    with pytest.raises(ConfigError):
        check_form(form(), lambda store: store)


def test_empty_store_uri_is_the_platforms_bucket(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_S3_STORE", bucket)
    assert check_form(form(), lambda store: store) == bucket


def test_errors_of_form_and_servers_are_one_error(bucket: str, tmp_path: Path) -> None:
    def refuse(store: str) -> None:
        raise ConfigError("is wrong", path="algorithm.name")

    given = form(store_uri=str(tmp_path), advanced={"publish.dvc": "s3://no-such-remote/dvc"})
    with pytest.raises(SeveralErrors) as found:
        check_form(given, refuse)
    assert found.value.exit_code == ConfigError.exit_code
    assert [error.path for error in found.value.errors] == ["algorithm.name", "publish.dvc"]


def test_form_refuses_the_name_of_a_dvc_remote(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        check_form(form(store_uri=str(tmp_path), advanced={"publish.dvc": "mine"}), lambda store: store)
    assert found.value.path == "publish.dvc" and not Path("mine").exists()


def test_address_with_a_password_gets_no_request(tmp_path: Path) -> None:
    with answering(200, "{}") as mlflow, pytest.raises(ConfigError):
        check_form(form(mlflow_uri=mlflow.url.replace("://", "://me:pw@")), lambda store: store)
    assert mlflow.seen == []
