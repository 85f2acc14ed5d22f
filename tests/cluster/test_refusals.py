"""What a real cluster takes away, holds back and refuses: a node, room, pods that its rules do not allow."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from fl_engine.core.errors import Stopped
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster
from tests.cluster.test_cluster import Api, Model, Rounds, beside, running
from tests.k8s.pods import model

CONTROL = "node-role.kubernetes.io/control-plane"


def jobs_of(cluster: Cluster, run: str) -> list[Any]:
    """Return the Jobs that a run has left."""
    every = cluster.select("jobs", {"app.kubernetes.io/part-of": "flexfleet"})
    return [job for job in every if job["metadata"]["name"].startswith(f"{run}-")]


def ready(api: Api, node: str) -> bool:
    conditions = api("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def test_lost_node_costs_minutes_not_the_deadline(
    rounds: Rounds, expected: Model, namespace: str, api: Api, request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    lose, restore = (request.config.getoption(name) for name in ("--lose-node", "--restore-node"))
    if lose is None or restore is None:
        pytest.skip("no command makes a node vanish: --lose-node, --restore-node")
    nodes = {n["metadata"]["name"]: n["metadata"]["labels"] for n in api("GET", "/api/v1/nodes")["items"]}
    workers = {name for name, labels in nodes.items() if CONTROL not in labels}
    if len(nodes) < 2 or not workers:
        pytest.skip("the cluster has one node: lost, nothing is left")
    lost: list[str] = []

    def watch() -> bool:
        on = {pod["spec"]["nodeName"] for pod in running(api, namespace)} & workers
        if on:
            lost.append(min(on))
            subprocess.run(["sh", "-c", lose], check=True, env=os.environ | {"NODE": lost[0]})
        return bool(on)

    started = time.monotonic()
    try:
        with beside(watch):
            out = rounds("lost", "rounds.stop=1", "training.fraction=1.0", "kubernetes.deadline_s=1200")
        assert time.monotonic() - started < 600
        assert "no heartbeat" in caplog.text or "is lost" in caplog.text
        assert model(out) == expected("rounds.stop=1", "training.fraction=1.0")
    finally:
        for node in lost:
            subprocess.run(["sh", "-c", restore], check=True, env=os.environ | {"NODE": node})
            end = time.monotonic() + 300
            while not ready(api, node):
                assert time.monotonic() < end, f"{node} did not come back"
                time.sleep(2)


def test_quota_of_one_pod_is_waited_for(
    rounds: Rounds, expected: Model, namespace: str, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    where = f"/api/v1/namespaces/{namespace}/resourcequotas"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    api("POST", where, quota)
    try:
        sets = ("rounds.stop=1", "training.fraction=1.0")
        out = rounds("queue", *sets, "run.patience_s=90", "kubernetes.attempts=1")
    finally:
        api("DELETE", f"{where}/one")
    assert "exceeded quota" in caplog.text
    assert model(out) == expected(*sets)


def test_refusal_of_pod_security_is_named_and_its_job_stays(
    rounds: Rounds, namespace: str, api: Api, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    level = "pod-security.kubernetes.io"
    where = f"/api/v1/namespaces/{namespace}"
    before = api("GET", where)["metadata"]["labels"]
    changed = {f"{level}/enforce": "restricted", f"{level}/warn": "restricted"}
    api("PATCH", where, {"metadata": {"labels": changed}})
    started = time.monotonic()
    try:
        with pytest.raises(Stopped, match="violates PodSecurity"):
            rounds("refused", "rounds.stop=1", "kubernetes.data=host:/tmp")
    finally:
        api("PATCH", where, {"metadata": {"labels": {name: before.get(name) for name in changed}}})
    assert time.monotonic() - started < 120
    assert "the Kubernetes API warns: would violate PodSecurity" in caplog.text
    left = jobs_of(cluster, "refused")
    assert left
    for job in left:
        cluster.delete("jobs", job["metadata"]["name"])


def test_run_stops_while_waiting_and_secrets_go_with_jobs(
    rounds: Rounds, namespace: str, api: Api, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[float] = []

    def watch() -> bool:
        if api("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return bool(sent)

    pool = "{weak: {selector: {flexfleet.io/none: x}}}"
    with beside(watch), pytest.raises(Stopped):
        rounds("stopped", f"kubernetes.pools={pool}", "training.fraction=1.0", "rounds.stop=1")
    assert time.monotonic() - sent[0] < 30
    assert f"kubectl -n {namespace} delete jobs,configmaps -l {jobs.RUN}=stopped-" in caplog.text
    left = [job["metadata"]["name"] for job in jobs_of(cluster, "stopped")]
    assert left
    for name in left:
        cluster.delete("jobs", name)
    end = time.monotonic() + 60
    while any(api("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}", missing=404) for name in left):
        assert time.monotonic() < end, "a Secret outlived its Job"
        time.sleep(1)
