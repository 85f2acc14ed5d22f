"""Commands refuse what cannot work before the first round, and take over a run without a committed round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.text import path_of
from fl_engine.storage.s3 import S3Store
from flexfleet.config import load_config
from flexfleet.config.parameters import check_space
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_folder import check_writable
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from flexfleet.tracking import dvc_remote
from tests.harness.moto_server import KEYS
from tests.harness.prepared import prepare
from tests.harness.web import answering

KUBERNETES = "run.backend=kubernetes"
TABLE = (
    "dataset={name: fl_engine.testing.kinds:TABLE, train_samples: null, test_samples: null}",
    "model={name: fl_engine.testing.kinds:TinyMLP}",
)


@pytest.mark.parametrize(
    ("sets", "path"),
    [
        (["tune.space={algorithm.kd_weigth: {low: 0, high: 1}}"], "tune.space"),
        (["tune.space={run.strategy: {choices: [single]}}"], "tune.space"),
        (["tune.seeds=[]"], "tune.seeds"),
        (["tune.storage=studies"], "tune.storage"),
        (["tune.storage=oracl://host/studies"], "tune.storage"),
        (["run.remote=s3"], "run.remote"),
        (["run.remote=s3://My_Bucket/runs"], "run.remote"),
        (["run.secrets=s3://b/keys"], "run.secrets"),
        (["publish.dvc=s3://.b./dvc"], "publish.dvc"),
        (["agents.endpoint=minio:9000"], "agents.endpoint"),
        (["kubernetes.endpoint=http://"], "kubernetes.endpoint"),
        ([KUBERNETES, "run.remote=s3://runs/all"], "kubernetes.image"),
        ([*TABLE, "rounds.faults=backdoor=0.1"], "rounds.faults"),
    ],
)
def test_check_refuses_impossible_value(flexfleet: Any, quick: Sequence[str], sets: list[str], path: str) -> None:
    done = flexfleet("check", "--json", sets=[*quick, *sets])
    assert (done.code, done.json["error"]["path"]) == (2, path)


def test_run_refuses_what_check_refuses(flexfleet: Any, quick: Sequence[str], own_folder: None) -> None:
    done = flexfleet("run", "--json", "--run-id", "a", sets=[*quick, "tune.storage=studies"])
    assert (done.code, done.json["error"]["path"]) == (2, "tune.storage")
    assert not Path("runs").exists()


def test_space_of_another_algorithm_is_accepted() -> None:
    check_space(load_config(None, ["algorithm.name=all_large", "tune.space={algorithm.gammas.0: {low: 0, high: 1}}"]))


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    check_writable("run.store", tmp_path / "new" / "runs")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFailure) as found:
        check_writable("run.store", tmp_path / "file" / "runs")
    assert found.value.path == "run.store"


def test_home_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(None, {"run.store": "$HOME/runs", "tracking.mlflow": "sqlite:///${HOME}/m.db"})
    assert (config.run.store, config.tracking.mlflow) == (f"{tmp_path}/runs", f"sqlite:///{tmp_path}/m.db")
    assert str(path_of("$HOMES/a")) == "$HOMES/a"


@pytest.mark.parametrize(("status", "body"), [(404, "<html>"), (200, "<html>"), (301, "")])
def test_web_server_is_not_taken_for_s3(monkeypatch: pytest.MonkeyPatch, status: int, body: str) -> None:
    page = answering(status, body, **{"Content-Type": "text/html"})
    with page as server, pytest.raises(EnvironmentFailure, match=r"^AWS_ENDPOINT_URL"):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        S3Store("s3://runs/all", hasty=True).list("")


def test_dvc_remote_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Repo.init(str(tmp_path), no_scm=True).close()
    (tmp_path / ".dvc" / "config").write_text("['remote \"mine\"']\n    url = ../pushed\n[core]\n    no_scm = true\n")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    (tmp_path / "file").write_text("content")
    dvc_remote.check("mine")
    pointers = dvc_remote.push({"file": tmp_path / "file"}, "mine")
    assert dvc_remote.place_of("mine") == str(tmp_path / "pushed") and not Path("mine").exists()
    dvc_remote.pull(pointers, dvc_remote.place_of("mine"), tmp_path / "back")
    assert (tmp_path / "back" / "file").read_text() == "content"
    with pytest.raises(ConfigError, match="'mine'"):
        dvc_remote.check("mind")
    dvc_remote.check("./mind")


def test_run_without_a_round_starts_again_with_other_settings(quick: Sequence[str], tmp_path: Path) -> None:
    def run(*sets: str, watcher: Any = None) -> RunFile:
        resolved = Resolved.load(None, [*quick, *sets])
        prepare(resolved, tmp_path)
        federate(resolved, tmp_path / "partition", tmp_path / "pool", tmp_path / "a", Attempt(watcher=watcher))
        return RunFile.read(tmp_path / "a" / "run.json")

    class Dying:
        def update(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("rounds.keep_updates=true", watcher=Dying())
    assert list((tmp_path / "a" / "rounds").iterdir())
    assert run("training.lr=0.01").config["training"]["lr"] == 0.01
    with pytest.raises(ConfigError):
        run("training.lr=0.02")
