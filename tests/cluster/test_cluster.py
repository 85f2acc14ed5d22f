"""Clients as pods of a real cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.rounds.run import Run
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import Store
from fl_engine.training.memory import Peaks
from flexfleet.config import Config, load_config
from tests.k8s.pods import failures, model

Api = Callable[..., Any]
Model = Callable[..., bytes]
Rounds = Callable[..., Path]
Settings = tuple[str, ...]


def store_of(settings: Settings, name: str) -> Store:
    remote = next(s.partition("=")[2] for s in settings if s.startswith("run.remote="))
    return open_store(f"{remote}/{name}")


def rows(settings: Settings, name: str) -> list[Row]:
    return Checkpoints(store_of(settings, name)).rows()


def running(api: Api, namespace: str) -> list[Any]:
    pods = api("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    return [pod for pod in pods if pod["status"].get("phase") == "Running"]


@contextmanager
def beside(watch: Callable[[], bool], seconds: float = 300) -> Iterator[None]:
    """Call `watch` twice a second until it returns True. The test fails if it never does."""
    end, done, stop = time.monotonic() + seconds, threading.Event(), threading.Event()

    def look() -> None:
        while time.monotonic() < end and not stop.wait(0.5):
            if watch():
                done.set()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert done.is_set(), "what the test waited for did not happen"


def test_run_has_the_bits_of_one_process_and_leaves_nothing(
    rounds: Rounds, settings: Settings, expected: Model, cluster: Cluster
) -> None:
    """All nodes must be of one kind; otherwise the log reports the difference."""
    out = rounds("plain")
    assert [row.metrics["clients_trained"] for row in rows(settings, "plain")] == [3.0, 3.0, 3.0]
    assert model(out) == expected()
    run = jobs.run_label("plain", store_of(settings, "plain").uri())
    assert cluster.select("jobs", {jobs.RUN: run}) == []
    assert cluster.get("secrets", f"{run}-keys") is None


def test_run_on_pods_can_be_forked_traced_and_deleted(settings: Settings, cluster: Cluster, tmp_path: Path) -> None:
    remote = next(each for each in settings if each.startswith("run.remote="))
    own = (*settings, f"{remote}-commands", f"run.store={tmp_path}", "run.keep=all")

    def flexfleet(*argv: str, sets: tuple[str, ...] = own) -> Any:
        words = [word for each in sets for word in ("--set", each)]
        program = [sys.executable, "-m", "flexfleet.cli.main", *argv, *words]
        done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first = flexfleet("run", "--run-id", "first", "--json")
    second = flexfleet("fork", str(tmp_path / "first"), "--at", "2", "--run-id", "second", "--json", sets=())
    assert second["model_sha256"] == first["model_sha256"]
    traced = flexfleet("trace", str(tmp_path / "first"), "--out", str(tmp_path / "trace.csv"), "--json", sets=())
    assert traced["clients"] > 0
    assert flexfleet("gc", "--keep", "first,second", "--dry-run", "--json")["entries"] == []
    assert flexfleet("gc", "--keep", "first", "--json")["bytes"] > 0
    assert store_of(own[-3:], "second").list("") == [] != store_of(own[-3:], "first").list("")
    label = jobs.run_label("second", store_of(own[-3:], "second").uri())
    assert cluster.get("configmaps", label) is None is cluster.get("secrets", f"{label}-keys")


def test_killed_pod_changes_no_bit(rounds: Rounds, expected: Model, namespace: str, api: Api) -> None:
    def kill() -> bool:
        pods = running(api, namespace)
        for pod in pods[:1]:
            path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
            api("DELETE", path, {"gracePeriodSeconds": 0}, missing=404)
        return bool(pods)

    with beside(kill):
        out = rounds("pod-killed", "rounds.stop=1")
    assert model(out) == expected("rounds.stop=1")


def test_killed_coordinator_continues_with_its_jobs(
    rounds: Rounds, settings: Settings, prepared: Callable[[Config], Path], expected: Model,
    tmp_path: Path, namespace: str, api: Api,
) -> None:  # fmt: skip
    config = load_config(None, settings)
    inputs, out = prepared(config), tmp_path / "killed"
    sets = [word for s in settings for word in ("--set", s)]
    command = [
        sys.executable, "-m", "flexfleet.pipeline.federate", "--partition", str(inputs / "partition"), "--pool",
        str(inputs / "pool"), "--out", str(out), *sets,
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    while process.poll() is None and not running(api, namespace):
        time.sleep(0.5)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert model(rounds("killed", resume=True)) == expected()


def test_pod_killed_for_memory_trains_a_smaller_sub_model(
    rounds: Rounds, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured peaks are far too low, so that every pod tries the full model. The limit is below what torch
    takes."""
    from flexfleet.pipeline import federate as step

    def next_to_nothing(run: Run, initial: Any) -> Peaks:
        return Peaks(1, (2,) * len(run.site.pool))

    monkeypatch.setattr(step, "peaks_of", next_to_nothing)
    pools = "{weak: {memory: 64Mi}, medium: {memory: 2Gi}, strong: {memory: 2Gi}}"
    sets = ("kubernetes.observe=cgroup", f"kubernetes.pools={pools}", "training.fraction=1.0", "rounds.stop=1")
    rounds("oom", *sets, "kubernetes.quorum=0.1")
    (row,) = rows(settings, "oom")
    said = failures(row).values()
    assert said and all("OOMKilled" in failure for failure in said)
    assert row.metrics["clients_trained"] > 0


def test_pool_without_nodes_is_named(rounds: Rounds, settings: Settings) -> None:
    pool = "{weak: {arch: arm64, device_type: rpi4, taint: flexfleet.io/edge, selector: {flexfleet.io/none: x}}}"
    sets = (f"kubernetes.pools={pool}", "run.patience_s=20", "kubernetes.quorum=0.1")
    rounds("nowhere", *sets, "training.fraction=1.0", "rounds.stop=1")
    (row,) = rows(settings, "nowhere")
    said = failures(row).values()
    assert said and all("weak" in failure and "Unschedulable" in failure for failure in said)


def test_role_grants_no_more_than_the_backend_calls(namespace: str, api: Api) -> None:
    def may(verb: str, resource: str, where: str, group: str = "", sub: str = "") -> bool:
        asked = {"namespace": where, "verb": verb, "group": group, "resource": resource, "subresource": sub}
        user = f"system:serviceaccount:{namespace}:flexfleet-coordinator"
        about = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        review = {**about, "spec": {"user": user, "resourceAttributes": asked}}
        answer = api("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    assert may("list", "events", namespace)
    for verb in ("create", "delete", "list", "patch"):
        assert may(verb, "jobs", namespace, "batch")
        assert not may(verb, "jobs", "default", "batch")
    assert may("get", "secrets", namespace) and not may("list", "secrets", namespace), "by name: its own runs' keys"
    assert not may("get", "secrets", "default")
    assert not may("create", "pods", namespace) and not may("create", "pods", namespace, sub="exec")
