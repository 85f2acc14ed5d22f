"""Rounds during faults of pods, of their nodes and of the Kubernetes API."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError, Stopped
from tests.k8s.fake import leftovers
from tests.k8s.pods import BOUND, EVERYBODY, PACKED, Drained, Pod, Runs, failures, model

WATCHED = "kubernetes.attempts=1"


class Every:
    """A watcher that calls `then` after each round."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def update(self, *_: Any) -> None:
        pass

    def round(self, *_: Any) -> bool:
        self._then()
        return False


@pytest.mark.parametrize(("quorum", "befalls"), [(1.0, "OOMKilled"), (0.5, "OOMKilled"), (0.5, "no data here")])
def test_assignment_that_ends_every_pod_fails_its_client_only(runs: Runs, quorum: float, befalls: str) -> None:
    """Two clients share a pod. Below the quorum the run stops, and names the reason."""
    bad = list[int]()

    def at_work(pod: Pod, given: Any) -> None:
        bad[:] = bad or [given.clients[-1]]
        if bad[0] in given.clients and befalls == "OOMKilled":
            pod.kill()
        elif bad[0] in given.clients:
            raise ClientError(befalls)

    runs.at_work(at_work)
    sets = (*PACKED, f"kubernetes.quorum={quorum}")
    if quorum == 1.0:
        with pytest.raises(Stopped, match=befalls):
            runs.start("bad", *sets)
        runs.at_work(lambda *_: None)
        assert model(runs.start("bad", *sets, resume=True)) == model(runs.alone("here", *EVERYBODY))
        return
    runs.start("bad", *sets)
    (row,) = runs.rows("bad")
    found = failures(row)
    assert list(found) == bad and befalls in found[bad[0]] and len(row.clients) == 6
    assert runs.executed().count((0, bad[0])) == 3, "once together, and twice alone"


def test_drained_pods_give_an_assignment_back_without_an_attempt(runs: Runs) -> None:
    """The pods of one index lose the same assignment three times."""
    given_back = list[tuple[str, int]]()

    def at_work(pod: Pod, given: Any) -> None:
        client = given.clients[0]
        if all(client == other for _, other in given_back) and len(given_back) < 3:
            given_back.append((pod.mailbox.device.name, client))
            raise Drained

    runs.at_work(at_work)
    runs.cluster.script = lambda job, index, before: "run" if before >= 3 else "vanish"
    assert model(runs.start("given", WATCHED)) == runs.expected(1)
    assert len(given_back) == 3


@pytest.mark.parametrize("node", ["is lost", "has the data"])
def test_assignment_of_a_silent_pod_goes_to_another(runs: Runs, caplog: Any, node: str, short_lease: None) -> None:
    hung = list[Pod]()

    def at_work(pod: Pod, given: Any) -> None:
        if not hung:
            hung.append(pod)
            if node == "is lost":
                runs.cluster.lose(pod.name)
            pod.hang()

    runs.at_work(at_work)
    assert model(runs.start("hung", WATCHED, *(BOUND if node == "has the data" else ()))) == runs.expected(1)
    assert "no heartbeat for" in caplog.text and runs.executed().count(hung[0].assignments[0]) == 2


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not repeat requests to the API."""
    monkeypatch.setattr("fl_engine.remote.kubernetes.cluster.RETRY_S", 0.0)


def test_round_continues_without_the_api(runs: Runs, hasty: None) -> None:
    """The API breaks off all connections from the first assignment to the end of the round."""
    away, back = threading.Event(), list[bool]()

    def at_work(pod: Pod, given: Any) -> None:
        if not away.is_set():
            away.set()
            runs.cluster.faults[:] = [0] * 100_000

    def answers() -> None:
        back.append(bool(runs.cluster.faults))
        runs.cluster.faults.clear()

    runs.at_work(at_work)
    sets = ("rounds.stop=2", "run.patience_s=0.5")
    assert model(runs.start("away", *sets, watcher=Every(answers))) == runs.expected(2)
    assert back == [True, False] and not leftovers(runs.cluster)


def test_deleted_objects_are_made_anew(runs: Runs) -> None:
    """The run's ConfigMap is deleted with all that it owns. Objects with its old UID would be deleted too."""
    deleted = threading.Event()

    def at_work(pod: Pod, given: Any) -> None:
        with runs.cluster.lock:
            if not deleted.is_set():
                deleted.set()
                for name in [name for kind, name in runs.cluster.objects if kind == "configmaps"]:
                    runs.cluster._delete("configmaps", name)

    runs.at_work(at_work)
    assert model(runs.start("deleted")) == runs.expected(1)
    assert 2 <= len(runs.jobs()) <= 4 and not leftovers(runs.cluster)


class Ends:
    """A pod's process that ends with this code before its first heartbeat."""

    def __init__(self, code: int, command: list[str], env: dict[str, str], log: Path) -> None:
        log.touch()
        Path(env["FLEXFLEET_TERMINATION_LOG"]).write_text("no message" if code else "")
        self.code = code
        self._until = time.monotonic() + 0.2

    def poll(self) -> int | None:
        return self.code if time.monotonic() > self._until else None

    def kill(self) -> None:
        self._until = 0.0


@pytest.mark.parametrize(
    ("code", "how", "said"), [(0, "run", "ended"), (6, "run", "no message"), (6, "vanish", "Disrupted")]
)
def test_pods_that_end_before_a_heartbeat_are_given_up(runs: Runs, code: int, how: str, said: str) -> None:
    """They end by themselves, fail, or are evicted, again and again."""
    runs.cluster.start, runs.cluster.slots = partial(Ends, code), threading.Semaphore(100)
    runs.cluster.script = lambda job, index, before: how
    began, late = time.monotonic(), threading.Timer(45, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()  # so that the test ends
    patience = 600 if said == "no message" else 3
    try:
        with pytest.raises(Stopped, match=said):
            runs.start("ends", f"run.patience_s={patience}")
    finally:
        late.cancel()
    assert time.monotonic() < began + 40
