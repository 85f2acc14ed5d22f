"""Clusters with less room than a round has pods, and namespaces that refuse some: on a clock that pods move."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.kubernetes import backend as kubernetes
from fl_engine.backends.kubernetes import jobs
from fl_engine.core.errors import Stopped
from fl_engine.storage.checkpoints import Row

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]
Rows = Callable[[Remote, str], list[Row]]

EVERYONE = ("training.fraction=1.0",)
"""Six clients."""
POD_S = 400.0
"""What each pod takes; `pending_s` is 600, so the third of a queue has waited for longer."""


class Clock:
    """The coordinator's: it goes on by a second with each look at the cluster, and with each pod that has ended."""

    def __init__(self) -> None:
        self._now, self._lock = 0.0, threading.Lock()

    def monotonic(self) -> float:
        return self._now

    def pass_(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds

    def sleep(self, _: float) -> None:
        self.pass_(1.0)
        time.sleep(0.05)


@pytest.fixture
def clock(quick_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(kubernetes, "time", made)

    class Slow(quick_cluster.start):  # type: ignore[misc]
        def poll(self) -> int | None:
            code: int | None = super().poll()
            if code is not None:
                made.pass_(POD_S)
            return code

    quick_cluster.start = Slow
    return made


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def attempts(cluster: Any) -> set[str]:
    return {job["metadata"]["name"][-3:] for job in cluster.created if job["kind"] == "Job"}


def here(cluster: Any) -> list[Any]:
    """Pods that take room."""
    with cluster.lock:
        pods = [o for (kind, _), o in cluster.objects.items() if kind == "pods"]
    return [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]


def test_a_queue_that_moves_is_waited_for(quick_cluster: Any, clock: Clock, rounds: Rounds, remote: Remote) -> None:
    quick_cluster.room = threading.Semaphore(1)
    out = rounds("queue", *remote, *EVERYONE, "kubernetes.attempts=1")
    assert clock.monotonic() > 4 * POD_S
    assert model(out) == model(rounds("here", *EVERYONE))


def test_a_quota_is_waited_for_and_named(
    quick_cluster: Any, clock: Clock, rounds: Rounds, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    said = "exceeded quota: clients, requested: pods=1, used: pods=1, limited: pods=1"
    turns = threading.Lock()
    first: list[tuple[str, int]] = []

    def refuse(job: Any, index: int) -> str:
        me = (job["metadata"]["name"], index)
        with turns:
            if first and first[-1] != me and not done(first[-1]):
                return said
            first.append(me)
            return ""

    def done(who: tuple[str, int]) -> bool:
        pod = quick_cluster.objects.get(("pods", f"{who[0]}-{who[1]}-0"))
        return pod is not None and pod["status"]["phase"] == "Succeeded"

    quick_cluster.refuse = refuse
    out = rounds("quota", *remote, *EVERYONE, "kubernetes.attempts=1")
    assert clock.monotonic() > 4 * POD_S
    assert model(out) == model(rounds("here", *EVERYONE))
    lines = [r.getMessage() for r in caplog.records if said in r.getMessage() and r.levelno == logging.WARNING]
    assert lines and "no pod was made" in lines[0]


def test_what_is_given_up_is_gone_before_its_clients_are_asked_again(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    quick_cluster.grace_s = 1.0
    queueing: list[str] = []

    def script(job: Any, index: int, before: int) -> str:
        if job["metadata"]["name"].endswith("-a0"):
            return "image"
        queueing.extend(p["metadata"]["name"] for p in here(quick_cluster) if "-a0-" in p["metadata"]["name"])
        return "run"

    quick_cluster.script = script
    assert model(rounds("again", *remote, "kubernetes.pending_s=1")) == expected(1)
    assert attempts(quick_cluster) == {"-a0", "-a1"} and queueing == []


def test_pods_at_a_time_can_be_capped(quick_cluster: Any, rounds: Rounds, remote: Remote) -> None:
    most: list[int] = []

    def script(job: Any, index: int, before: int) -> str:
        most.append(len(here(quick_cluster)))
        return "run"

    quick_cluster.script = script
    out = rounds("capped", *remote, *EVERYONE, "kubernetes.parallelism=3")
    made = [job["spec"] for job in quick_cluster.created if job["kind"] == "Job"]
    assert sum(spec["parallelism"] for spec in made) == 3 < sum(spec["completions"] for spec in made) == 6
    assert max(most) < 3, "besides the one that is made"
    assert model(out) == model(rounds("here", *EVERYONE))


def test_what_pod_security_refuses_is_named_within_seconds_and_its_job_stays_to_be_looked_at(
    quick_cluster: Any, clock: Clock, rounds: Rounds, remote: Remote, expected: Expected,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Once the settings are mended, the run goes on with Jobs that are made with them."""
    caplog.set_level("INFO", logger="flexfleet")
    said = 'violates PodSecurity "restricted:latest": hostPath volumes (volume "data")'

    def refuse(job: Any, index: int) -> str:
        return said if any("hostPath" in volume for volume in job["spec"]["template"]["spec"]["volumes"]) else ""

    quick_cluster.refuse = refuse
    with pytest.raises(Stopped) as stopped:
        rounds("refused", *remote, "kubernetes.data=host:/images")
    assert said in str(stopped.value) and said in caplog.text and clock.monotonic() < 60
    run = next(o["metadata"]["name"] for o in quick_cluster.created if o["kind"] == "ConfigMap")
    where = f"-l {jobs.RUN}={run},{jobs.ROUND}=0"
    assert str(stopped.value).endswith(f"kubectl -n flexfleet-clients describe jobs,pods {where}")
    with quick_cluster.lock:
        left = [o for (kind, _), o in quick_cluster.objects.items() if kind == "jobs"]
    assert left and all(o["metadata"]["labels"][jobs.ROUND] == "0" for o in left)
    again = rounds("refused", *remote, resume=True)
    assert model(again) == expected(1)
    assert "was made with other settings: deleted" in caplog.text


def test_what_was_refused_before_a_coordinator_started_again_may_have_been_mended(
    quick_cluster: Any, rounds: Rounds, remote: Remote, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is still there; the Job's pods are made now."""

    class Killed(BaseException):
        pass

    monkeypatch.setattr(kubernetes, "EVENTS_EVERY_S", 0.1)
    looks, go, say = itertools.count(), threading.Event(), kubernetes.Kubernetes._say_new

    def killed(self: Any, r: Any) -> None:
        if any(job.refused for job in r.live):
            raise Killed

    quick_cluster.refuse = lambda job, index: 'violates PodSecurity "restricted:latest"'
    with monkeypatch.context() as patch:
        patch.setattr(kubernetes.Kubernetes, "_say_new", killed)
        with pytest.raises(Killed):
            rounds("mended", *remote)
    before = [job["metadata"]["name"] for job in quick_cluster.created if job["kind"] == "Job"]

    def refuse(job: Any, index: int) -> str:
        """Mended, though it takes the Job's controller a while to try again: the old event is read meanwhile."""
        go.wait(60)
        return ""

    def looked(self: Any, r: Any) -> None:
        say(self, r)
        if next(looks) > 10:
            go.set()

    quick_cluster.refuse = refuse
    monkeypatch.setattr(kubernetes.Kubernetes, "_say_new", looked)
    assert model(rounds("mended", *remote, resume=True)) == expected(1)
    assert [job["metadata"]["name"] for job in quick_cluster.created if job["kind"] == "Job"] == before


def test_what_the_server_warns_of_is_told_once(
    quick_cluster: Any, rounds: Rounds, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    said = 'would violate PodSecurity \\"restricted:latest\\": runAsNonRoot != true'
    quick_cluster.warnings = (said,)
    rounds("warned", *remote, "rounds.stop=2")
    lines = [r.getMessage() for r in caplog.records if "would violate PodSecurity" in r.getMessage()]
    assert lines == ['the Kubernetes API warns: would violate PodSecurity "restricted:latest": runAsNonRoot != true']
