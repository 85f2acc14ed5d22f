"""Clusters with less room than a round has pods, queues that hold Jobs back, and namespaces that refuse pods: on a
clock that pods move."""

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
from fl_engine.backends.kubernetes import jobs, round_jobs
from fl_engine.core.errors import Stopped
from tests.k8s import kueue
from tests.k8s.fake import telling

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Expected = Callable[[int], bytes]

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
    for each in (kubernetes, round_jobs):
        monkeypatch.setattr(each, "time", made)

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


SUSPENDED = "the Job is suspended: its queue does not admit it"
ONE_AT_A_TIME = ("kubernetes.parallelism=3",)
"""Of each Job's two pods."""


def jobs_of(cluster: Any) -> list[Any]:
    return [job for job in cluster.created if job["kind"] == "Job"]


class OneByOne:
    """A queue that lets a Job begin when no other runs, and the coordinator has seen so."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._free = cluster, -1

    @property
    def looks(self) -> int:
        looks: int = self._cluster.calls["list", "jobs"]
        return looks

    def __call__(self, job: Any) -> bool:
        there = [o for (kind, _), o in self._cluster.objects.items() if kind == "jobs"]
        if any(not kueue.suspended(other) and "over" not in other for other in there):
            self._free = -1
        elif self._free < 0:
            self._free = self.looks
        return 0 <= self._free < self.looks - 3


def test_jobs_that_their_queue_holds_back_are_waited_for_and_begin_with_fresh_urls(
    quick_cluster: Any, clock: Clock, rounds: Rounds, remote: Remote, in_a_queue: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The last one is admitted long after the time that its pods may take, if that began when it was made."""
    create, admits = quick_cluster._create, OneByOne(quick_cluster)
    told: dict[str, float] = {}
    ages: dict[str, float] = {}

    def noted(kind: str, body: Any) -> Any:
        if kind == "secrets":
            told[body["metadata"]["name"]] = clock.monotonic()
        return create(kind, body)

    def admitted(job: Any) -> bool:
        name, now = job["metadata"]["name"], clock.monotonic()
        if admits(job):
            ages[name] = now - told.get(name, now)
            return True
        return False

    monkeypatch.setattr(quick_cluster, "_create", noted)
    quick_cluster.admits = admitted
    sets = (*EVERYONE, *ONE_AT_A_TIME, in_a_queue, "kubernetes.attempts=1", "kubernetes.deadline_s=900")
    out = rounds("held", *remote, *sets)
    assert clock.monotonic() > 6 * POD_S and len(ages) == 3
    assert max(ages.values()) <= 600, "pending_s, by which URLs outlive the deadline"
    assert model(out) == model(rounds("here", *EVERYONE))
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any(f"2 x {SUSPENDED}" in line for line in lines)


def test_jobs_that_their_queue_never_admits_are_given_up_for_that_reason(
    quick_cluster: Any, clock: Clock, rounds: Rounds, remote: Remote, in_a_queue: str
) -> None:
    quick_cluster.admits = lambda job: False
    with pytest.raises(Stopped, match=f"medium: not started after 20 s: {SUSPENDED}"):
        rounds("never", *remote, in_a_queue, "kubernetes.attempts=1", "kubernetes.pending_s=20")
    assert 20 < clock.monotonic() < 40


def test_a_job_that_is_stopped_for_others_runs_when_it_is_admitted_again_and_no_client_has_failed(
    quick_cluster: Any, clock: Clock, rounds: Rounds, remote: Remote, in_a_queue: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The others take longer than `pending_s`. Its pod says that it was killed, and takes a while to end."""
    quick_cluster.grace_s = 0.5
    one_by_one, slow = OneByOne(quick_cluster), quick_cluster.start
    first: list[Any] = []
    ran: list[int] = []
    stopped: list[str] = []

    class Stuck(slow):  # type: ignore[misc]
        """What the first Job's first pod does."""

        def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
            if stopped or not first or not log.parent.name.startswith(first[0]["metadata"]["name"]):
                super().__init__(command, env, log)
            else:
                log.touch()
                self._code = None

    def admits(job: Any) -> bool:
        first[:] = first or [job]
        if not stopped:
            if quick_cluster.running:
                ran.append(one_by_one.looks)
            if ran and one_by_one.looks > ran[0] + 3:
                stopped.extend(kueue.preempt(quick_cluster, first[0]))
            return job is first[0]
        others = [other for other in jobs_of(quick_cluster) if other is not first[0]]
        return one_by_one(job) and (job is not first[0] or all("over" in other for other in others))

    quick_cluster.start, quick_cluster.admits = Stuck, admits
    out = rounds("stopped", *remote, *EVERYONE, *ONE_AT_A_TIME, in_a_queue, "kubernetes.attempts=1")
    assert len(stopped) == 1 and clock.monotonic() > 6 * POD_S
    assert model(out) == model(rounds("here", *EVERYONE))
    assert attempts(quick_cluster) == {"-a0"} and "exit code" not in caplog.text


class Killed(BaseException):
    pass


def test_a_coordinator_that_starts_again_writes_the_urls_of_suspended_jobs_anew(
    quick_cluster: Any, rounds: Rounds, remote: Remote, in_a_queue: str, expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def killed(*_: Any) -> None:
        raise Killed

    quick_cluster.admits = lambda job: False
    with monkeypatch.context() as patch:
        patch.setattr(kubernetes.Kubernetes, "_say_new", killed)
        with pytest.raises(Killed):
            rounds("again", *remote, in_a_queue)
    before, told = jobs_of(quick_cluster), telling(quick_cluster.created)
    say = kubernetes.Kubernetes._say_new

    def looked(self: Any, r: Any) -> None:
        say(self, r)
        quick_cluster.admits = lambda job: True

    monkeypatch.setattr(kubernetes.Kubernetes, "_say_new", looked)
    assert model(rounds("again", *remote, in_a_queue, resume=True)) == expected(1)
    assert jobs_of(quick_cluster) == before, "they have kept their place in the queue"
    names = [secret["metadata"]["name"] for secret in telling(quick_cluster.created)]
    assert sorted(names) == sorted([secret["metadata"]["name"] for secret in told] * 2)


def test_a_suspended_job_with_clients_that_have_answered_is_made_anew_for_the_others_by_the_next_coordinator(
    quick_cluster: Any, rounds: Rounds, remote: Remote, in_a_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no orders for those that have."""

    def killed(self: Any, r: Any) -> None:
        if len(r.open_) == 3:
            quick_cluster.admits = lambda job: job["metadata"]["name"].endswith("-a1")
            for job in jobs_of(quick_cluster):
                kueue.preempt(quick_cluster, job)
            raise Killed

    quick_cluster.script = lambda job, index, before: "hang" if index and job["spec"]["completions"] == 2 else "run"
    with monkeypatch.context() as patch:
        patch.setattr(kubernetes.Kubernetes, "_say_new", killed)
        with pytest.raises(Killed):
            rounds("half", *remote, in_a_queue, *EVERYONE)
    sets = (*remote, in_a_queue, *EVERYONE, "kubernetes.attempts=1", "kubernetes.pending_s=30")
    assert model(rounds("half", *sets, resume=True)) == model(rounds("here", *EVERYONE))
    assert [job["spec"]["completions"] for job in jobs_of(quick_cluster)] == [2] * 3 + [1] * 3


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
