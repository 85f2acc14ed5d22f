"""Rounds during faults of pods, of their nodes and of the Kubernetes API."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError, EnvironmentFailure, Stopped
from tests.k8s import kueue
from tests.k8s.fake import leftovers
from tests.k8s.pods import (
    BOUND,
    EVERYBODY,
    PACKED,
    Drained,
    Expected,
    Pod,
    Remote,
    Rounds,
    Rows,
    failures,
    jobs_of,
    model,
)  # fmt: skip

WATCHED = "kubernetes.attempts=1"


def orders_of(pods: type[Pod]) -> list[tuple[int, int]]:
    return sorted(order for pod in pods.all for order in pod.orders)


class Every:
    """A watcher that calls `then` after each round."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def update(self, *_: Any) -> None:
        pass

    def round(self, *_: Any) -> bool:
        self._then()
        return False


def test_orders_of_killed_pods_go_to_others(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """The first pod of each order is killed."""
    seen = set[tuple[int, int]]()

    def at_work(pod: Pod, given: Any) -> None:
        order = given.round, given.clients[0]
        if order not in seen:
            seen.add(order)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("killed", *remote, "rounds.stop=2")) == expected(2)
    assert len(seen) == 6 and len(jobs_of(cluster)) == 1


@pytest.mark.parametrize(("quorum", "befalls"), [(1.0, "OOMKilled"), (0.5, "OOMKilled"), (0.5, "no data here")])
def test_order_that_ends_every_pod_fails_its_client_only(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, rows: Rows, quorum: float, befalls: str
) -> None:
    """Two clients share a pod. Below the quorum the run stops, and names the reason."""
    bad = list[int]()

    def at_work(pod: Pod, given: Any) -> None:
        bad[:] = bad or [given.clients[-1]]
        if bad[0] in given.clients and befalls == "OOMKilled":
            pod.kill()
        elif bad[0] in given.clients:
            raise ClientError(befalls)

    pods.at_work = staticmethod(at_work)
    sets = (*remote, *PACKED, f"kubernetes.quorum={quorum}")
    if quorum == 1.0:
        with pytest.raises(Stopped, match=befalls):
            rounds("bad", *sets)
        pods.at_work = staticmethod(lambda *_: None)
        assert model(rounds("bad", *sets, resume=True)) == model(rounds("here", *EVERYBODY))
        return
    rounds("bad", *sets)
    (row,) = rows(remote, "bad")
    found = failures(row)
    assert list(found) == bad and befalls in found[bad[0]] and len(row.clients) == 6
    assert orders_of(pods).count((0, bad[0])) == 3, "once together, and twice alone"


def test_eviction_uses_up_no_attempt(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    cluster.script = lambda job, index, before: "run" if before >= 3 else "evict"
    assert model(rounds("evicted", *remote, WATCHED)) == expected(1)
    assert len(jobs_of(cluster)) == 1


def test_drained_pods_give_an_order_back_without_an_attempt(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """The pods of one index lose the same assignment three times."""
    given_back = list[tuple[str, int]]()

    def at_work(pod: Pod, given: Any) -> None:
        client = given.clients[0]
        if all(client == other for _, other in given_back) and len(given_back) < 3:
            given_back.append((pod.mailbox.device.name, client))
            raise Drained

    pods.at_work = staticmethod(at_work)
    cluster.script = lambda job, index, before: "run" if before >= 3 else "vanish"
    assert model(rounds("given", *remote, WATCHED)) == expected(1)
    assert len(given_back) == 3


def test_preempted_job_keeps_its_orders_without_an_attempt(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected, in_a_queue: str,
    short_lease: None,
) -> None:  # fmt: skip
    """Its queue suspends it for longer than a lease, and its pods take a while to end."""
    cluster.grace_s, stopped, since = 1.0, list[str](), list[float]()

    def at_work(pod: Pod, given: Any) -> None:
        with cluster.lock:
            if not stopped:
                stopped.extend(kueue.preempt(cluster, cluster.objects["jobs", pod.name.rsplit("-", 2)[0]]))
                since.append(time.monotonic())
        if pod.name in stopped:
            pod.dead.wait(60)

    pods.at_work = staticmethod(at_work)
    cluster.admits = lambda job: not since or time.monotonic() > since[0] + 5
    assert model(rounds("stopped", *remote, WATCHED, in_a_queue)) == expected(1)
    assert stopped and len(jobs_of(cluster)) == 1


@pytest.mark.parametrize("node", ["is lost", "has the data"])
def test_order_of_a_silent_pod_goes_to_another(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected, caplog: Any, node: str,
    short_lease: None,
) -> None:  # fmt: skip
    hung = list[Pod]()

    def at_work(pod: Pod, given: Any) -> None:
        if not hung:
            hung.append(pod)
            if node == "is lost":
                with cluster.lock:
                    cluster._lose(cluster.objects["pods", pod.name], "unreachable")
            pod.hang()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("hung", *remote, WATCHED, *(BOUND if node == "has the data" else ()))) == expected(1)
    assert "silent for" in caplog.text and orders_of(pods).count(hung[0].orders[0]) == 2


def test_orders_are_executed_without_the_pod_of_a_lost_node(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """The pod returns between the rounds."""
    first = list[int]()

    def script(job: Any, index: int, before: int) -> str:
        first.append(index)
        return "terminating" if len(first) == 1 else "run"

    cluster.script = script
    out = rounds("node", *remote, WATCHED, "rounds.stop=3", watcher=Every(cluster.back.set))
    assert model(out) == expected(3)
    assert len(orders_of(pods)) == len(set(orders_of(pods))) == 9 and len(jobs_of(cluster)) == 1


def test_pod_that_is_not_ready_continues_its_assignment(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Its node is called NotReady, or a probe fails, while its container runs."""
    cluster.script = lambda job, index, before: "not-ready"
    assert model(rounds("unready", *remote, WATCHED)) == expected(1)
    assert len(pods.all) == len(orders_of(pods)) == 3 and len(jobs_of(cluster)) == 1
    assert cluster.calls["delete", "jobs"] == 0


def test_container_of_a_service_mesh_delays_no_round(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """It never ends, so its pod remains."""
    cluster.mesh = True
    assert model(rounds("mesh", *remote, "rounds.stop=2")) == expected(2)
    assert not leftovers(cluster)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry requests to the API soon."""
    monkeypatch.setattr("fl_engine.remote.kubernetes.cluster.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("fl_engine.remote.kubernetes.cluster.LONGEST_WAIT_S", 0.05)


def test_round_continues_without_the_api(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected, hasty: None
) -> None:
    """The API breaks off all connections from the first assignment to the end of the round."""
    away, back = threading.Event(), list[bool]()

    def at_work(pod: Pod, given: Any) -> None:
        if not away.is_set():
            away.set()
            cluster.faults[:] = [0] * 100_000

    def answers() -> None:
        back.append(bool(cluster.faults))
        cluster.faults.clear()

    pods.at_work = staticmethod(at_work)
    sets = (*remote, "rounds.stop=2", "run.patience_s=0.5")
    assert model(rounds("away", *sets, watcher=Every(answers))) == expected(2)
    assert back == [True, False] and not leftovers(cluster)


def test_run_without_pods_and_api_stops(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, hasty: None
) -> None:
    def script(job: Any, index: int, before: int) -> str:
        cluster.faults[:] = [503] * 100_000
        return "hang"

    cluster.script, began = script, time.monotonic()
    with pytest.raises((EnvironmentFailure, Stopped), match="Kubernetes API"):
        rounds("away", *remote, "run.patience_s=1.5")
    assert time.monotonic() < began + 30


def test_deleted_objects_are_made_anew(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """The run's ConfigMap is deleted with all that it owns. Objects with its old UID would be deleted too."""
    deleted = threading.Event()

    def at_work(pod: Pod, given: Any) -> None:
        with cluster.lock:
            if not deleted.is_set():
                deleted.set()
                for name in [name for kind, name in cluster.objects if kind == "configmaps"]:
                    cluster._delete("configmaps", name)

    pods.at_work = staticmethod(at_work)
    assert model(rounds("deleted", *remote)) == expected(1)
    assert 2 <= len(jobs_of(cluster)) <= 4 and not leftovers(cluster)


class Ends:
    """A pod's process that ends before its first heartbeat."""

    code = 0

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        log.touch()
        Path(env["FLEXFLEET_TERMINATION_LOG"]).write_text("no message" if self.code else "")
        self._until = time.monotonic() + 0.2

    def poll(self) -> int | None:
        return self.code if time.monotonic() > self._until else None

    def kill(self) -> None:
        self._until = 0.0


@pytest.mark.parametrize(
    ("code", "how", "said"), [(0, "run", "ended"), (6, "run", "no message"), (6, "vanish", "Disrupted")]
)
def test_pods_that_end_before_a_heartbeat_are_given_up(
    cluster: Any, rounds: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch, code: int, how: str, said: str,
) -> None:  # fmt: skip
    """They end by themselves, fail, or are evicted, again and again."""
    monkeypatch.setattr("fl_engine.remote.kubernetes.controller.POLL_S", 0.1)
    monkeypatch.setattr(Ends, "code", code)
    cluster.start, cluster.slots = Ends, threading.Semaphore(100)
    cluster.script = lambda job, index, before: how
    began, late = time.monotonic(), threading.Timer(45, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()  # so that the test ends
    patience = 600 if said == "no message" else 3
    try:
        with pytest.raises(Stopped, match=said):
            rounds("ends", *remote, f"run.patience_s={patience}")
    finally:
        late.cancel()
    assert time.monotonic() < began + 40
