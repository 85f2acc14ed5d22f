"""Pods that stay for the run (kubernetes.lifetime=run) and are lost: who gets their orders, and what starts instead.
They are threads here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.agents.backend import Agents
from fl_engine.backends.kubernetes import jobs, lasting, standing, waiting
from fl_engine.core.errors import ClientError, Stopped
from fl_engine.storage.checkpoints import Row
from tests.k8s import kueue
from tests.k8s.fake import telling
from tests.k8s.staying import EVERYBODY, SHARED, STAY, Drained, Killed, Staying, jobs_of, model

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]


def test_pods_that_are_killed_again_and_again_end_no_index(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Each order's first pod is killed, nine times in all: more than a Job of a round would bear."""
    seen = set[tuple[int, int]]()

    def at_work(pod: Staying, told: Any) -> None:
        order = (told.round, told.clients[0])
        if order not in seen:
            seen.add(order)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("killed", *remote, *STAY, "kubernetes.lease_s=5")) == expected(3)
    assert len(seen) == 9 and len(jobs_of(cluster)) == 3, "the Jobs stay what they were"


def test_a_pod_that_is_killed_with_several_orders_loses_them_to_others(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote
) -> None:
    """Each pod once in the first round, with both of its orders: none has failed yet."""
    killed = set[str]()

    def at_work(pod: Staying, told: Any) -> None:
        if pod.line.known.name not in killed and len(told.clients) == 2:
            killed.add(pod.line.known.name)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    sets = (*SHARED, "kubernetes.attempts=1", "kubernetes.lease_s=5")
    assert model(rounds("killed", *remote, *sets)) == model(rounds("here", *EVERYBODY))
    assert len(killed) == 3 == len(jobs_of(cluster))


@pytest.mark.parametrize("befalls", ["killed", "exit 42"])
def test_an_order_that_spoils_its_pod_does_not_take_those_that_share_it(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows, befalls: str
) -> None:
    """Whatever holds it is killed, as for its memory, or says that trying again will not help."""
    bad: list[int] = []

    def at_work(pod: Staying, told: Any) -> None:
        bad[:] = bad or [told.clients[-1]]
        if bad[0] in told.clients and befalls == "killed":
            pod.kill()
        elif bad[0] in told.clients:
            raise ClientError("no data here")

    pods.at_work = staticmethod(at_work)
    sets = (*SHARED, "rounds.stop=1", "kubernetes.quorum=0.5", "kubernetes.lease_s=5")
    rounds("bad", *remote, *sets)
    (row,) = rows(remote, "bad")
    assert [line["client"] for line in row.clients if "failure" in line] == bad
    assert len(row.clients) == 6


def test_a_pod_that_is_drained_uses_up_no_attempt(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    cluster.script = lambda job, index, before: "run" if before >= 3 else "evict"
    sets = (*STAY, "rounds.stop=1", "kubernetes.attempts=1")
    assert model(rounds("drained", *remote, *sets)) == expected(1)
    assert len(jobs_of(cluster)) == 3


def test_an_order_that_drained_pods_give_back_uses_up_no_attempt(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Three times the same one, to the pod of the same index."""
    given_back: list[tuple[str, int]] = []

    def at_work(pod: Staying, told: Any) -> None:
        client = told.clients[0]
        if all(client == other for _, other in given_back) and len(given_back) < 3:
            given_back.append((pod.line.known.name, client))
            raise Drained

    pods.at_work = staticmethod(at_work)
    cluster.script = lambda job, index, before: "run" if before >= 3 else "vanish"
    sets = (*STAY, "rounds.stop=1", "kubernetes.attempts=1", "kubernetes.lease_s=3")
    assert model(rounds("given", *remote, *sets)) == expected(1)
    assert len(given_back) == 3 and len(set(given_back)) == 1


def test_an_order_that_a_pod_gives_back_again_and_again_is_its_client_s_failure(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    """To each pod of its index, which says that it was ended. No other one may have the order. Where the coordinator is
    slow to look, several pods meet one loan of it."""
    bad, loans = list[int](), set[str | None]()
    cluster.script = lambda job, index, before: "vanish"

    def at_work(pod: Staying, told: Any) -> None:
        bad[:] = bad or [told.clients[0]]
        if told.clients[0] == bad[0]:
            loans.add(pod.line.loan)
            raise Drained

    pods.at_work = staticmethod(at_work)
    bound = ("kubernetes.placement=device", "kubernetes.hostname=pi-{client}", "kubernetes.quorum=0.5")
    rounds("gone", *remote, *STAY, "rounds.stop=1", "kubernetes.attempts=1", "kubernetes.lease_s=3", *bound)
    (row,) = rows(remote, "gone")
    assert [line["client"] for line in row.clients if "failure" in line] == bad
    assert None not in loans and len(loans) == waiting.LOST_NODES + 1


def test_an_order_of_a_pod_that_a_queue_has_stopped_for_others_uses_up_no_attempt(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected, in_a_queue: str
) -> None:
    """Though the Job is suspended for longer than the lease. It stays, and its pod says that it was killed for as long
    as it takes to end."""
    cluster.grace_s, stopped, since = 1.0, list[str](), list[float]()

    def at_work(pod: Staying, told: Any) -> None:
        with cluster.lock:
            if not stopped:
                stopped.extend(kueue.preempt(cluster, cluster.objects["jobs", pod.name.rsplit("-", 2)[0]]))
                since.append(time.monotonic())
        if pod.name in stopped:
            pod.dead.wait(60)

    pods.at_work = staticmethod(at_work)
    cluster.admits = lambda job: not since or time.monotonic() > since[0] + 8
    sets = (*STAY, "rounds.stop=1", "kubernetes.attempts=1", "kubernetes.lease_s=5", in_a_queue)
    assert model(rounds("stopped", *remote, *sets)) == expected(1)
    assert len(stopped) == 1 and len(jobs_of(cluster)) == 3


@pytest.mark.parametrize("how", ["unreachable", "terminating"])
def test_the_pods_of_a_lost_node_come_back_elsewhere(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    how: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(waiting, "TERMINATING_S", 0.5)
    monkeypatch.setattr(lasting, "GONE_S", 0.1)  # the pod stays as long as its node is lost
    first: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        first[:] = first or [job["metadata"]["name"]]
        return how if job["metadata"]["name"] == first[0] else "run"

    cluster.script = script
    sets = (*STAY, "rounds.stop=2", "kubernetes.attempts=1", "kubernetes.pending_s=3600")
    assert model(rounds("node", *remote, *sets)) == expected(2)
    assert len(jobs_of(cluster)) == 4, "the one of the lost node's pod, anew"


def test_a_pod_that_hangs_is_replaced_and_its_order_goes_to_another(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected, caplog: Any
) -> None:
    hung: list[Staying] = []

    def at_work(pod: Staying, told: Any) -> None:
        if not hung:
            hung.append(pod)
            pod.hang()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("hung", *remote, *STAY, "rounds.stop=1", "kubernetes.lease_s=1.5")) == expected(1)
    assert "is silent for" in caplog.text and len(jobs_of(cluster)) == 4
    assert sum(order == hung[0].orders[0] for pod in pods.all for order in pod.orders) == 2


def test_a_secret_is_renewed_for_pods_that_start_again(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the keys that the pods have."""
    monkeypatch.setattr(standing, "RENEW_S", 0.1)
    killed: list[Staying] = []

    def at_work(pod: Staying, told: Any) -> None:
        if not killed:
            time.sleep(1.0)  # the URLs of the second are others
            killed.append(pod)
            pod.kill()

    pods.at_work = staticmethod(at_work)
    assert model(rounds("renewed", *remote, *STAY, "rounds.stop=1")) == expected(1)
    first, *_, last = (
        json.loads(secret["stringData"]["0"])
        for secret in telling(cluster.created)
        if killed[0].name.startswith(secret["metadata"]["name"])
    )
    assert first["key"] == last["key"] and first["letter"] != last["letter"]
    (again,) = (pod for pod in pods.all if pod is not killed[0] and pod.line.known.name == killed[0].line.known.name)
    assert again.line.known.invited == killed[0].line.known.invited and len(jobs_of(cluster)) == 3


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_an_order_that_kills_every_pod_is_its_client_s_failure(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, rows: Rows, quorum: float
) -> None:
    """Or the run stops, where the quorum misses it. The pods that it killed are there for the others."""
    bad: list[int] = []

    def at_work(pod: Staying, told: Any) -> None:
        bad[:] = bad or [told.clients[0]]
        if told.clients[0] == bad[0]:
            pod.kill()

    pods.at_work = staticmethod(at_work)
    sets = (*STAY, "rounds.stop=1", f"kubernetes.quorum={quorum}", "kubernetes.lease_s=5")
    if quorum == 1.0:
        with pytest.raises(Stopped, match=r"2 of 3 clients have answered, 3 are needed \(kubernetes.quorum\): .*-0 "):
            rounds("bad", *remote, *sets)
        return
    rounds("bad", *remote, *sets)
    (row,) = rows(remote, "bad")
    assert [line["client"] for line in row.clients if "failure" in line] == bad
    assert sum(order == (0, bad[0]) for pod in pods.all for order in pod.orders) >= 2
    assert len(jobs_of(cluster)) == 3


@pytest.mark.parametrize("coordinator", ["gone", "there"])
def test_pods_that_an_order_kills_do_not_start_for_ever(
    cluster: Any, pods: type[Staying], rounds: Rounds, remote: Remote, expected: Expected,
    monkeypatch: pytest.MonkeyPatch, coordinator: str,
) -> None:  # fmt: skip
    """Without a coordinator nobody takes the order back. With one, the Job is made anew where its pods ended."""
    monkeypatch.setattr(jobs, "FAILURES", 3)
    began = threading.Event()

    def at_work(pod: Staying, told: Any) -> None:
        began.set()
        if coordinator == "gone" or len(jobs_of(cluster)) == 3:
            pod.kill()

    def killed(*_: Any) -> Any:
        if began.is_set():
            raise Killed
        return iter(())

    pods.at_work = staticmethod(at_work)
    if coordinator == "there":
        cluster.script = lambda job, index, before: "oom" if len(jobs_of(cluster)) == 3 else "run"
        assert model(rounds("kills", *remote, *STAY, "rounds.stop=1")) == expected(1)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agents, "_answered", killed)
        with pytest.raises(Killed):
            rounds("kills", *remote, *STAY)
    until = time.monotonic() + 20
    while not any("over" in job for (kind, _), job in cluster.objects.items() if kind == "jobs"):
        assert time.monotonic() < until, "those of the order are started still"
        time.sleep(0.1)


@pytest.mark.parametrize(("code", "how"), [(0, "run"), (1, "run"), (1, "vanish")], ids=["well", "badly", "evicted"])
def test_pods_that_end_before_they_take_an_order_are_not_waited_for_without_end(
    cluster: Any, rounds: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch, code: int, how: str
) -> None:
    """Each time others start in their stead: they cannot read letters and end (0), something kills them (1), or their
    nodes evict them."""
    monkeypatch.setattr(lasting, "GRACE_S", 0)
    began, ended = time.monotonic(), threading.Event()

    class Ends:
        def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
            log.write_text("no letter")
            self._started = time.monotonic()
            if self._started > began + 60 and not ended.is_set():  # so that the test ends
                ended.set()
                os.kill(os.getpid(), signal.SIGTERM)

        def poll(self) -> int | None:
            return code if time.monotonic() > self._started + 0.3 else None

        def kill(self) -> None:
            self._started = 0.0

    def script(job: Any, index: int, before: int) -> str:
        time.sleep(0.5 if before else 0.0)  # as the Job controller waits before it makes another one
        return how

    cluster.start, cluster.slots, cluster.script = Ends, threading.Semaphore(100), script
    said = "ended well, but left no update" if code == 0 else "Disrupted" if how == "vanish" else "no letter"
    first, often = r"no device has taken an order for \d+ s; 3 of 3 clients .*strong: ", "kubernetes.pending_s=2"
    if said == "no letter":  # by themselves: however long pods may wait for room
        first, often = "no pod takes orders: .*: Error .*", "kubernetes.pending_s=600"
    with pytest.raises(Stopped, match=rf"{first}.*{said}"):
        rounds("ends", *remote, *STAY, often, f"kubernetes.attempts={1 if said != 'no letter' else 2}")
    assert time.monotonic() < began + 25
