"""Pods that do not start: the reason in the log, and how long a round waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fl_engine.core.errors import Stopped
from fl_engine.remote.kubernetes import controller
from tests.k8s.pods import (
    APART,
    BOUND,
    EVERYBODY,
    Expected,
    Pod,
    Remote,
    Rounds,
    Rows,
    class_of,
    failures,
    jobs_of,
    model,
)  # fmt: skip

SECURITY = 'violates PodSecurity "restricted:latest": hostPath volumes (volume "data")'
QUOTA = "exceeded quota: clients, requested: pods=1, used: pods=1, limited: pods=1"


@pytest.mark.parametrize(
    ("how", "said"),
    [("image", "ImagePullBackOff: Back-off pulling image"), ("unschedulable", "0/3 nodes are available")],
)
@pytest.mark.parametrize("quorum", [0.3, 1.0])
def test_pods_that_cannot_start_are_given_up_with_the_reason(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, rows: Rows, caplog: Any, how: str, said: str,
    quorum: float,
) -> None:  # fmt: skip
    """A class with two of three assignments cannot start. Below the quorum the run stops."""
    cluster.script = lambda job, index, before: how if class_of(job) == "strong" else "run"
    sets = (*remote, APART, "run.patience_s=2", f"kubernetes.quorum={quorum}")
    if quorum == 1.0:
        with pytest.raises(Stopped, match=f"{said}.* describe jobs,pods"):
            rounds("stuck", *sets)
    else:
        rounds("stuck", *sets)
        found = list(failures(rows(remote, "stuck")[0]).values())
        assert len(found) == 2 and all(said in failure and "strong" in failure for failure in found)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and said in r.getMessage()]
    assert lines and "2 x" in lines[0] and len(jobs_of(cluster)) == 2


def test_refused_pods_are_given_up_at_once_until_settings_change(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected
) -> None:
    """Their Job remains until the run resumes with other settings."""

    def refuse(job: Any, index: int) -> str:
        volumes = job["spec"]["template"]["spec"]["volumes"]
        return SECURITY if any("hostPath" in volume for volume in volumes) else ""

    cluster.refuse, began = refuse, time.monotonic()
    with pytest.raises(Stopped) as stopped:
        rounds("refused", *remote, "kubernetes.data=host:/images")
    assert SECURITY in str(stopped.value) and time.monotonic() < began + 30
    assert [kind for kind, _ in cluster.objects if kind == "jobs"]
    assert model(rounds("refused", *remote, resume=True)) == expected(1) and len(jobs_of(cluster)) == 2


def test_full_quota_is_waited_for_and_named(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, caplog: Any
) -> None:
    """The quota is one pod. The third pod waits for longer than `patience_s`."""
    turns, first = threading.Lock(), list[tuple[str, int]]()

    def done(who: tuple[str, int]) -> bool:
        pod = cluster.objects.get(("pods", f"{who[0]}-{who[1]}-0"))
        return pod is not None and pod["status"]["phase"] == "Succeeded"

    def refuse(job: Any, index: int) -> str:
        me = job["metadata"]["name"], index
        with turns:
            if first and first[-1] != me and not done(first[-1]):
                return QUOTA
            first.append(me)
            return ""

    cluster.refuse = refuse
    pods.at_work = staticmethod(lambda *_: time.sleep(3.0))
    out = rounds("quota", *remote, *EVERYBODY, "kubernetes.lifetime=round", "run.patience_s=10")
    assert model(out) == model(rounds("here", *EVERYBODY))
    assert any(r.levelname == "WARNING" and QUOTA in r.getMessage() for r in caplog.records)


def test_full_cluster_is_waited_for(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one pod. It executes all orders of its class, and gives way to the next."""
    monkeypatch.setattr(controller, "YIELD_S", 0.5)
    cluster.room = threading.Semaphore(1)
    pods.at_work = staticmethod(lambda *_: time.sleep(0.7))
    sets = (*remote, *EVERYBODY, APART, "run.patience_s=4", "rounds.stop=2")
    assert model(rounds("queue", *sets)) == model(rounds("here", *EVERYBODY, "rounds.stop=2"))


def test_job_that_its_queue_admits_late_is_waited_for(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, expected: Expected, in_a_queue: str, caplog: Any
) -> None:
    asked: list[float] = []

    def admits(_: Any) -> bool:
        asked.append(time.monotonic())
        return asked[-1] > asked[0] + 5

    cluster.admits = admits
    assert model(rounds("late", *remote, in_a_queue)) == expected(1)
    assert "3 x the Job is suspended" in caplog.text and len(jobs_of(cluster)) == 1


def test_round_ends_without_a_client_whose_node_is_off(
    cluster: Any, pods: type[Pod], rounds: Rounds, remote: Remote, rows: Rows
) -> None:
    chosen = list[str]()

    def script(job: Any, index: int, before: int) -> str:
        chosen[:] = chosen or [class_of(job)]
        return "unschedulable" if class_of(job) in chosen else "run"

    cluster.script = script
    rounds("bound", *remote, *BOUND, "run.patience_s=6", "kubernetes.attempts=1", "kubernetes.quorum=0.5")
    (row,) = rows(remote, "bound")
    (failure,) = failures(row).values()
    assert len(row.clients) == 3 and "Unschedulable" in failure
