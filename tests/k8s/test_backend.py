"""Runs whose clients are pods, on a fake cluster over a real HTTP S3 server, with both lifetimes of pods."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.remote.kubernetes import provisioner
from fl_engine.remote.kubernetes.provisioner import Pods
from fl_engine.training import memory
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from tests.k8s.fake import leftovers, telling
from tests.k8s.pods import BOUND, EVERYBODY, LIFETIMES, Killed, Pod, Runs, killed, model

ROOT = Path(__file__).parents[2]
MIB = 2**20
lifetimes = pytest.mark.parametrize("lifetime", LIFETIMES)


def killed_at_work(patch: pytest.MonkeyPatch, runs: Runs, go: threading.Event) -> None:
    """Kill the coordinator when a pod is at work. Pods wait for `go`."""
    began = threading.Event()

    def at_work(pod: Pod, given: Any) -> None:
        began.set()
        go.wait(60)

    runs.at_work(at_work)
    patch.setattr(Pods, "need", lambda *_: killed() if began.is_set() else None)


@pytest.mark.parametrize(("lifetime", "jobs"), [("run", 1), ("round", 2)])
def test_pods_give_the_bits_of_one_process_and_leave_nothing(in_processes: Runs, lifetime: str, jobs: int) -> None:
    """The pods are new interpreters of their own command."""
    runs = in_processes
    runs.cluster.python = sys.executable if lifetime == "run" else runs.cluster.python
    runs.cluster.slots = threading.Semaphore(3)
    assert model(runs.start("plain", f"kubernetes.lifetime={lifetime}", "rounds.stop=2")) == runs.expected(2)
    made = runs.jobs()
    assert [job["spec"]["completions"] for job in made] == [3] * jobs
    assert len(runs.cluster.logs) >= 3 * jobs - 3 * (lifetime == "run"), "no pod started again"
    assert not leftovers(runs.cluster) and runs.store("plain").list("agents/") == []
    role = next(d for d in yaml.safe_load_all((ROOT / "k8s/base/role.yaml").read_text()) if d["kind"] == "Role")
    allowed = {(verb, kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    assert set(runs.cluster.calls) <= allowed


@lifetimes
def test_node_of_each_client_gets_its_assignments_and_its_secret_only(runs: Runs, lifetime: str) -> None:
    """Root on a node can read each Secret that its pods mount."""
    out = runs.start("bound", *BOUND, "rounds.stop=2", f"kubernetes.lifetime={lifetime}")
    assert model(out) == runs.expected(2)
    hosts, secrets = {}, {each["metadata"]["name"]: each["stringData"] for each in telling(runs.cluster.created)}
    for job in runs.jobs():
        name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
        hosts[name] = spec["nodeSelector"]["kubernetes.io/hostname"]
        assert job["spec"]["completions"] == len(secrets[name]) == 1
        assert [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume] == [name]
    assert len(set(hosts.values())) == len(hosts) or lifetime == "round", "a client asked again has its pod still"
    for pod in runs.pods.all:
        assert {f"pi-{client}" for _, client in pod.assignments} == {hosts[pod.name.rsplit("-", 2)[0]]}


@lifetimes
def test_restarted_coordinator_finds_its_pods_and_their_assignments(runs: Runs, lifetime: str) -> None:
    go, sets = threading.Event(), (f"kubernetes.lifetime={lifetime}",)
    with pytest.MonkeyPatch.context() as patch:
        killed_at_work(patch, runs, go)
        with pytest.raises(Killed):
            runs.start("again", *sets)
    before = len(runs.jobs())
    go.set()
    assert model(runs.start("again", *sets, resume=True)) == runs.expected(1)
    assert len(runs.jobs()) == before and len(runs.pods.all) == 3, "no pod started twice"
    assert len(runs.executed()) == len(set(runs.executed())) == 3, "no order was executed twice"


def test_job_grows_with_the_need_for_pods(runs: Runs) -> None:
    go = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        killed_at_work(patch, runs, go)
        with pytest.raises(Killed):
            runs.start("grows", "kubernetes.parallelism=1")
    threading.Timer(2, go.set).start()
    assert model(runs.start("grows", resume=True)) == runs.expected(1)
    (job,) = runs.jobs()
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3 <= len(runs.pods.all)


def test_run_without_an_s3_store_is_refused(runs: Runs, tiny: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check(Resolved.load(None, (*tiny, runs.remote[0])))
    assert error.value.path == "run.remote"


@pytest.mark.parametrize("what", ["cluster", "role"])
def test_run_without_a_cluster_is_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    if what == "cluster":
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    else:
        runs.cluster.faults[:] = [403]
    with pytest.raises(EnvironmentFailure) as error:
        runs.start("refused")
    assert {"cluster": "no cluster", "role": "role.yaml"}[what] in str(error.value)


ROOM = "kubernetes.pools={weak: {memory: 1000Mi}, medium: {memory: 1000Mi}, strong: {memory: 1000Mi}}"
LOOKS = ("kubernetes.observe=cgroup", ROOM, *EVERYBODY)


@pytest.mark.long
def test_assignment_that_kills_its_pod_is_trained_one_level_lower(
    runs: Runs, prepared: Path, peaks: Peaks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients share a pod at first. The other client's sub-model does not get smaller."""
    for file, mib in (("memory.max", 1000), ("memory.current", 100)):
        (tmp_path / file).write_text(str(mib * MIB))
    for variable in ("FLEXFLEET_CGROUP", "FLEXFLEET_PROC"):
        monkeypatch.setenv(variable, str(tmp_path))
    bad, told = 5, list[tuple[int, int]]()

    def at_work(pod: Pod, given: Any) -> None:
        if bad not in given.clients:
            assert given.failures == 0
            return
        told.append((len(given.clients), given.failures))
        if given.failures < 2:
            pod.kill()

    runs.at_work(at_work)
    runs.start("killed", *LOOKS, "kubernetes.clients_per_pod=2", "kubernetes.attempts=3")
    assert told == [(2, 0), (1, 0), (1, 1), (1, 2)]
    (row,) = runs.rows("killed")
    pool = PoolFile.read(prepared / "pool" / "pool.json").pool()
    free = {line["client"]: line["free"] for line in row.clients}
    assert free.pop(bad) == memory.free(900 * MIB, peaks, pool, 2)
    assert set(free.values()) <= {memory.free(900 * MIB, peaks, pool), memory.free(450 * MIB, peaks, pool)}


@pytest.mark.long
def test_secret_is_renewed_for_pods_that_start_later(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has fresh URLs, and the keys that the pods have."""
    monkeypatch.setattr(provisioner, "RENEW_S", 0.1)
    gone = list[Pod]()

    def at_work(pod: Pod, given: Any) -> None:
        if not gone:
            time.sleep(1.5)  # URLs differ by the second
            gone.append(pod)
            pod.kill()

    runs.at_work(at_work)
    assert model(runs.start("renewed")) == runs.expected(1)
    first, *_, last = (json.loads(secret["stringData"]["0"]) for secret in telling(runs.cluster.created))
    assert first["key"] == last["key"] and first["message"] != last["message"]
