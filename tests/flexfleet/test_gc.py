"""`flexfleet gc`: what is kept, what is deleted, and what a killed deletion leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.storage import run_lock
from fl_engine.storage.run_lock import hold
from fl_engine.storage.s3 import S3Store
from flexfleet.files.run_folder import folder_lock
from tests.harness.moto_server import opened
from tests.k8s import fake


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def copies(finished: tuple[Path, Any]) -> Callable[..., None]:
    """Copy the finished run runs/a, with changes to its record, as if it had ended a number of days ago."""

    def copy(name: str, days: float = 0.0, config: dict[str, Any] | None = None, **changes: Any) -> Path:
        out = Path(shutil.copytree(finished[0], f"runs/{name}"))
        if config or changes:
            record = json.loads((out / "run.json").read_text()) | changes
            for section, values in (config or {}).items():
                record["config"][section] |= values
            (out / "run.json").write_text(json.dumps(record))
        for path in out.rglob("*"):
            os.utime(path, (time.time() - days * 86_400,) * 2)
        return out

    return copy


def test_dry_run_deletes_nothing_and_counts_all_bytes(copies: Any, flexfleet: Any) -> None:
    copies("b")
    before = contents(Path())
    found = flexfleet("gc", "--keep", "a", "--dry-run", "--json").json
    assert contents(Path()) == before
    assert found["bytes"] == sum(len(value) for path, value in before.items() if path.parts[1] == "b")
    assert {row["name"] for row in found["entries"]} == {"b"} and found["kept"] == {"a": "a"}
    assert {row["kind"] for row in found["entries"]} == {"files", "ledger"}


def test_ages_names_and_references_keep_runs(copies: Any, flexfleet: Any) -> None:
    for name in ("old", "named"):
        copies(name, days=40)
    copies("young", days=20, config={"model": {"init": "start"}})
    copies("start", days=40, config={"fleet": {"trace": {"name": "file", "path": "runs/deep/trace.csv"}}})
    copies("deep", days=40, forked={"run_id": "x-s0", "round": 1, "link": ""})
    copies("cmp/x-s0", days=40, run_id="x-s0")
    copies("study/trials/0", days=40)
    copies("study/trials/1", days=1)
    Path("runs/mine").mkdir()
    (Path("runs/mine") / "notes.txt").write_text("not a run")
    found = flexfleet("gc", "--keep", "named,30d", "--json").json
    assert {row["name"] for row in found["entries"]} == {"old"}
    assert (found["kept"]["deep"], found["kept"]["cmp"]) == ("start refers to it", "deep refers to it")
    assert {p.name for p in Path("runs").iterdir()} == {"a", "named", "young", "start", "deep", "cmp", "study", "mine"}


@pytest.mark.parametrize("keep", ["", "champoin", "12h", "b,,a"])
def test_keep_must_name_what_exists(copies: Any, flexfleet: Any, keep: str) -> None:
    before = contents(Path())
    done = flexfleet("gc", "--keep", keep)
    assert done.code == 2 and "--keep must list" in done.err
    assert flexfleet("gc").code == 2
    assert contents(Path()) == before


def test_run_in_use_is_skipped(copies: Any, flexfleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    copies("cmp/x-s0")
    with folder_lock(Path("runs/cmp/x-s0")):
        assert flexfleet("gc", "--keep", "a", "--json").json["entries"] == []
    assert "skipping cmp: runs/cmp/x-s0 is in use by another process" in caplog.text
    assert flexfleet("gc", "--keep", "a", "--json").json["entries"]


def test_killed_deletion_leaves_whole_runs(copies: Any, flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "c"):
        copies(name)
    rename, renamed = Path.rename, list[Path]()

    def dying(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        assert flexfleet("gc", "--keep", "a").code == 130
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert flexfleet("gc", "--keep", "a,c").code == 130
    assert [run["run_id"] for run in flexfleet("status", "--json").json["runs"]] == ["a", "c"]
    for name in ("a", "c"):
        flexfleet("verify", f"runs/{name}").ok()
    assert len([*Path("runs").glob(".gc-*")]) == 1
    flexfleet("gc", "--keep", "a,c").ok()
    assert {path.name for path in Path("runs").iterdir()} == {"a", "c"}


def test_ledgers_and_leases_in_a_bucket(copies: Any, flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(run_lock, "_alive", lambda pid: True)  # as if another process had the lock
    copies("b")
    with opened(monkeypatch, "ledgers"):
        stores = {name: S3Store(f"s3://ledgers/x/{name}") for name in ("b", "cmp/y-s0")}
        for store in stores.values():
            for path, value in contents(Path("runs/a/rounds")).items():
                store.put(str(path.relative_to("runs/a")), value)
            store.put("site/run.json", Path("runs/a/run.json").read_bytes())
        sets = ["run.remote=s3://ledgers/x"]
        with hold(stores["b"], heartbeat_s=0.01):
            found = flexfleet("gc", "--keep", "a", "--json", sets=sets).json
        assert {row["name"] for row in found["entries"]} == {"cmp"} and found["kept"]["b"] == "in use"
        assert not stores["cmp/y-s0"].list("") and stores["b"].list("rounds/")
        flexfleet("gc", "--keep", "a", sets=sets).ok()
        assert S3Store("s3://ledgers").list("") == [] and not Path("runs/b").exists()


def test_shared_files_and_other_models_stay(
    mlflow_uri: str,
    own_folder: None,
    no_drawings: None,
    flexfleet: Any,
    quick: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = [f"tracking.mlflow={mlflow_uri}", "publish.dvc=remote"]
    more = [*quick, *sets, "publish.models=true", "publish.onnx=false", "publish.name=m", "rounds.stop=1"]
    ran = [flexfleet("run", "--run-id", n, "--json", sets=[*more, f"seed={n}", "partition.seed=0"]).json for n in "12"]
    client = mlflow.MlflowClient(mlflow_uri)
    client.set_registered_model_alias("m", "champion", 1)
    pushed = contents(Path("remote"))
    found = flexfleet("gc", "--keep", "champion", "--json", sets=sets).json
    sizes = {row["kind"]: row["bytes"] for row in found["entries"]}
    assert found["kept"] == {"1": "champion"} and sizes["exports"] > 0 and sizes["mlflow"] > 0
    left = contents(Path("remote"))
    assert sizes["dvc"] == sum(len(value) for path, value in pushed.items() if path not in left) > 0
    other = client.create_run("0", tags={"dvc.remote": "remote"} | client.get_run(ran[0]["mlflow_run_id"]).data.tags)
    flexfleet("fetch", ran[0]["mlflow_run_id"], "--out", "back", sets=sets).ok()
    assert [version.run_id for version in client.search_model_versions("name = 'm'")] == [ran[0]["mlflow_run_id"]]
    assert client.get_run(ran[1]["mlflow_run_id"]).info.lifecycle_stage == "deleted"
    assert not client.list_artifacts(ran[1]["mlflow_run_id"]) and client.list_artifacts(ran[0]["mlflow_run_id"])
    assert flexfleet("gc", "--keep", "0d", sets=sets[:1]).code == 2
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert flexfleet("gc", "--keep", "0d", sets=sets).code == 130
    assert contents(Path("remote")) == left, "another machine's run refers to the files"
    client.delete_run(other.info.run_id)
    flexfleet("gc", "--keep", "0d", sets=sets).ok()
    assert contents(Path("remote")) == {} and not [*Path("runs").iterdir()]


def test_alias_that_no_model_has_keeps_nothing_and_is_refused(copies: Any, flexfleet: Any, caplog: Any) -> None:
    copies("b")
    assert flexfleet("gc", "--keep", "champion,30d", "--dry-run").code == 0
    assert "a deletion would be refused" in caplog.text
    done = flexfleet("gc", "--keep", "champion,30d")
    assert done.code == 2 and "champion" in done.err and Path("runs/b").exists()


def test_objects_of_ended_runs_in_the_cluster(
    copies: Any, flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies("b")
    with fake.serving(found := fake.Cluster(tmp_path / "cluster")) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for run in ("runs/a", "runs/b", "runs/removed/x", "elsewhere/c"):
            label = {"flexfleet.io/run": run.replace("/", "-"), "app.kubernetes.io/part-of": "flexfleet"}
            meta = {"name": run.replace("/", "-"), "namespace": "flexfleet-clients", "labels": label}
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"store": str(tmp_path / run)}}
            Cluster("flexfleet-clients").create("configmaps", body)
        flexfleet("gc", "--keep", "a", sets=["run.backend=kubernetes"]).ok()
        assert {name for kind, name in found.objects} == {"runs-a", "elsewhere-c"}
