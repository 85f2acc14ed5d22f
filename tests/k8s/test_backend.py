"""Runs whose clients are pods, on a fake cluster over a real HTTP S3 server, with both lifetimes of pods."""

from __future__ import annotations

import base64
import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.algorithms import FlexFL
from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.core.errors import ConfigError, EnvironmentFailure, Stopped
from fl_engine.core.types import RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of
from fl_engine.remote.kubernetes import controller
from fl_engine.remote.kubernetes.provisioner import Pods
from fl_engine.remote.messages import Message
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage.s3 import open_store
from fl_engine.testing.tiny import tiny_fleet, tiny_site
from fl_engine.training import memory
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile
from flexfleet.worker.mailbox import WorkerMailbox
from tests.k8s.fake import leftovers, telling
from tests.k8s.pods import (
    BOUND,
    EVERYBODY,
    LIFETIMES,
    PACKED,
    Expected,
    Killed,
    Pod,
    Remote,
    Rounds,
    Rows,
    class_of,
    jobs_of,
    killed,
    model,
)  # fmt: skip

ROOT = Path(__file__).parents[2]
MIB = 2**20
lifetimes = pytest.mark.parametrize("lifetime", LIFETIMES)


def store_of(remote: Remote, name: str) -> Any:
    return open_store(f"{remote[1].partition('=')[2]}/{name}")


def executed(pods: type[Pod]) -> list[tuple[int, int]]:
    return [order for pod in pods.all for order in pod.orders]


def killed_at_work(patch: pytest.MonkeyPatch, pods: type[Pod], go: threading.Event) -> None:
    """Kill the coordinator when a pod is at work. Pods wait for `go`."""
    began = threading.Event()

    def at_work(pod: Pod, given: Any) -> None:
        began.set()
        go.wait(60)

    pods.at_work = staticmethod(at_work)
    patch.setattr(Pods, "need", lambda *_: killed() if began.is_set() else None)


@pytest.mark.parametrize(("lifetime", "jobs"), [("run", 1), ("round", 2)])
def test_pods_give_the_bits_of_one_process_and_leave_nothing(
    cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, lifetime: str, jobs: int
) -> None:
    """The pods are new interpreters of their own command."""
    cluster.python = sys.executable if lifetime == "run" else cluster.python
    cluster.slots = threading.Semaphore(3)
    assert model(rounds("plain", *remote, f"kubernetes.lifetime={lifetime}", "rounds.stop=2")) == expected(2)
    made = jobs_of(cluster)
    assert [job["spec"]["completions"] for job in made] == [3] * jobs
    assert len(cluster.logs) >= 3 * jobs - 3 * (lifetime == "run"), "no pod started again"
    assert not leftovers(cluster) and store_of(remote, "plain").list("agents/") == []
    role = next(d for d in yaml.safe_load_all((ROOT / "k8s/base/role.yaml").read_text()) if d["kind"] == "Role")
    allowed = {(verb, kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    assert set(cluster.calls) <= allowed


@lifetimes
def test_node_of_each_client_gets_its_orders_and_its_secret_only(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected, lifetime: str
) -> None:
    """Root on a node can read each Secret that its pods mount."""
    out = rounds("bound", *remote, *BOUND, "rounds.stop=2", f"kubernetes.lifetime={lifetime}")
    assert model(out) == expected(2)
    hosts, secrets = {}, {each["metadata"]["name"]: each["stringData"] for each in telling(cluster.created)}
    for job in jobs_of(cluster):
        name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
        hosts[name] = spec["nodeSelector"]["kubernetes.io/hostname"]
        assert job["spec"]["completions"] == len(secrets[name]) == 1
        assert [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume] == [name]
    assert len(set(hosts.values())) == len(hosts) or lifetime == "round", "a client asked again has its pod still"
    for pod in pods.all:
        assert {f"pi-{client}" for _, client in pod.orders} == {hosts[pod.name.rsplit("-", 2)[0]]}


def test_pod_holds_as_many_orders_as_it_may(cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote) -> None:
    held = list[int]()
    pods.at_work = staticmethod(lambda pod, given: held.append(len(given.clients)))
    assert model(rounds("packed", *remote, *PACKED)) == model(rounds("here", *EVERYBODY))
    assert [job["spec"]["completions"] for job in jobs_of(cluster)] == [3] and held == [2, 2, 2]


@lifetimes
def test_restarted_coordinator_finds_its_pods_and_their_orders(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected, lifetime: str
) -> None:
    go, sets = threading.Event(), (*remote, f"kubernetes.lifetime={lifetime}")
    with pytest.MonkeyPatch.context() as patch:
        killed_at_work(patch, pods, go)
        with pytest.raises(Killed):
            rounds("again", *sets)
    before = len(jobs_of(cluster))
    go.set()
    assert model(rounds("again", *sets, resume=True)) == expected(1)
    assert len(jobs_of(cluster)) == before and len(pods.all) == 3, "no pod started twice"
    assert len(executed(pods)) == len(set(executed(pods))) == 3, "no order was executed twice"


def test_job_grows_with_the_need_for_pods(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    go = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        killed_at_work(patch, pods, go)
        with pytest.raises(Killed):
            rounds("grows", *remote, "kubernetes.parallelism=1")
    threading.Timer(2, go.set).start()
    assert model(rounds("grows", *remote, resume=True)) == expected(1)
    (job,) = jobs_of(cluster)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3 <= len(pods.all)


@pytest.mark.long
def test_run_resumes_elsewhere_with_its_store_and_the_cluster(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """No object of the store holds its key, and a finished run needs none."""
    keys = list[bytes]()

    def at_work(pod: Pod, given: Any) -> None:
        secrets = [o for (_, name), o in list(cluster.objects.items()) if name.endswith("-keys")]
        keys.extend(base64.b64decode(secret["data"]["key"]) for secret in secrets)

    pods.at_work = staticmethod(at_work)
    out, store = rounds("long", *remote), store_of(remote, "long")
    assert keys and not [k for k in store.list("") if keys[0] in store.get(k)]
    assert not cluster.objects
    shutil.rmtree(out)
    with pytest.raises(ConfigError):
        rounds("long", *remote)
    assert model(rounds("long", *remote, "rounds.stop=2", resume=True)) == expected(2)


@pytest.mark.parametrize("what", ["store", "cluster", "role"])
def test_run_without_a_store_or_cluster_is_refused(
    cluster: Any, rounds: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    if what == "store":
        remote = remote[:1]
    elif what == "cluster":
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    else:
        cluster.faults[:] = [403]
    with pytest.raises(ConfigError if what == "store" else EnvironmentFailure) as error:
        rounds("refused", *remote)
    assert {"store": "run.remote", "cluster": "no cluster", "role": "role.yaml"}[what] in str(error.value)


@pytest.mark.long
def test_pod_gets_the_memory_that_its_largest_sub_model_needs(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks
) -> None:
    sets = ("kubernetes.pools={weak: {memory: auto}, medium: {memory: auto}}", "kubernetes.lifetime=round")
    rounds("auto", *remote, *PACKED, *sets)
    (row,) = rows(remote, "auto")
    shares = {level.name: level.share for level in PoolFile.read(prepared / "pool" / "pool.json").levels}
    needs = {line["client"]: 40 + 60 * shares[line["sent"]] for line in row.clients}
    for job in jobs_of(cluster):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        asked = container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"] == asked
        if class_of(job) == "strong":
            assert asked == "1Gi"
            continue
        names = {f"{job['metadata']['name']}-{i}-0" for i in range(job["spec"]["completions"])}
        clients = [client for pod in pods.all if pod.name in names for _, client in pod.orders]
        most = sum(sorted(map(needs.__getitem__, clients))[-2:])
        assert asked == f"{math.ceil(1.25 * (100 + most) - 1e-4)}Mi"


ROOM = "kubernetes.pools={weak: {memory: 1000Mi}, medium: {memory: 1000Mi}, strong: {memory: 1000Mi}}"
LOOKS = ("kubernetes.observe=cgroup", ROOM, *EVERYBODY)


@pytest.mark.long
def test_order_that_kills_its_pod_is_trained_one_level_lower(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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

    pods.at_work = staticmethod(at_work)
    rounds("killed", *remote, *LOOKS, "kubernetes.clients_per_pod=2", "kubernetes.attempts=3")
    assert told == [(2, 0), (1, 0), (1, 1), (1, 2)]
    (row,) = rows(remote, "killed")
    pool = PoolFile.read(prepared / "pool" / "pool.json").pool()
    free = {line["client"]: line["free"] for line in row.clients}
    assert free.pop(bad) == memory.free(900 * MIB, peaks, pool, 2)
    assert set(free.values()) <= {memory.free(900 * MIB, peaks, pool), memory.free(450 * MIB, peaks, pool)}


@pytest.mark.long
def test_secret_is_renewed_for_pods_that_start_later(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It has fresh URLs, and the keys that the pods have."""
    monkeypatch.setattr(controller, "RENEW_S", 0.1)
    gone = list[Pod]()

    def at_work(pod: Pod, given: Any) -> None:
        if not gone:
            time.sleep(1.5)  # URLs differ by the second
            gone.append(pod)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("renewed", *remote)) == expected(1)
    first, *_, last = (json.loads(secret["stringData"]["0"]) for secret in telling(cluster.created))
    assert first["key"] == last["key"] and first["message"] != last["message"]


@pytest.mark.long
@pytest.mark.parametrize("together", [1, 100])
def test_secrets_and_messages_hold_the_longest_urls(
    cluster: Any, pods: type[Pod], s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Temporary credentials sign each URL with their token, and a form holds it twice."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "+/" * 750)
    seen, read = list[int](), WorkerMailbox.read

    def noted(mailbox: WorkerMailbox) -> Message:
        message = read(mailbox)
        seen.extend([] if message.lease is None else [len(message.lease.assignment.clients)])
        return message

    monkeypatch.setattr(WorkerMailbox, "read", noted)
    cluster.script = lambda job, index, before: "run" if together > 1 else "hang"
    site = tiny_site(FlexFL(), fleet=tiny_fleet(200))
    mailbox = Mailbox(open_store(f"s3://runs/{tmp_path.name}"), site.rules, key_of(b"k" * 32))
    orders = tuple(WorkOrder(0, client, SubmodelSpec(), {}, client, 0) for client in range(200))
    done: Callable[[], bool] = lambda: bool(seen) if together > 1 else bool(telling(cluster.created))  # noqa: E731
    options = KubernetesConfig(image="i", clients_per_pod=together)
    around = Surroundings(site, mailbox, ("cpu",), "long-name", options, should_stop=done)
    with pytest.raises(Stopped), BACKENDS["kubernetes"](around) as backend:
        list(backend.run(FlexFL(), RoundPlan(0, orders)))
    assert max(seen) == 100 if together > 1 else 50 < len(telling(cluster.created)[0]["stringData"]) < 200
