"""Pods that do not start: the reason in the log, and how long a round waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fl_engine.core.errors import Stopped
from fl_engine.remote.kubernetes import provisioner
from tests.k8s.pods import APART, EVERYBODY, Runs, class_of, failures, model

SECURITY = 'violates PodSecurity "restricted:latest": hostPath volumes (volume "data")'
QUOTA = "exceeded quota: clients, requested: pods=1, used: pods=1, limited: pods=1"


@pytest.mark.parametrize(
    ("how", "said"),
    [("image", "ImagePullBackOff: Back-off pulling image"), ("unschedulable", "0/3 nodes are available")],
)
@pytest.mark.parametrize("quorum", [0.3, 1.0])
def test_pods_that_cannot_start_are_given_up_with_the_reason(
    runs: Runs, caplog: Any, how: str, said: str, quorum: float
) -> None:
    """A class with two of three assignments cannot start. Below the quorum the run stops."""
    runs.cluster.script = lambda job, index, before: how if class_of(job) == "strong" else "run"
    sets = (APART, "run.patience_s=2", f"kubernetes.quorum={quorum}")
    if quorum == 1.0:
        with pytest.raises(Stopped, match=f"{said}.* describe jobs,pods"):
            runs.start("stuck", *sets)
    else:
        runs.start("stuck", *sets)
        found = list(failures(runs.rows("stuck")[0]).values())
        assert len(found) == 2 and all(said in failure and "strong" in failure for failure in found)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and said in r.getMessage()]
    assert lines and "2 x" in lines[0] and len(runs.jobs()) == 2


def test_job_of_other_settings_is_replaced_when_the_run_resumes(runs: Runs) -> None:
    """Pod Security refuses the first Job's pods."""

    def refuse(job: Any, index: int) -> str:
        volumes = job["spec"]["template"]["spec"]["volumes"]
        return SECURITY if any("hostPath" in volume for volume in volumes) else ""

    runs.cluster.refuse = refuse
    with pytest.raises(Stopped, match="violates PodSecurity"):
        runs.start("refused", "kubernetes.data=host:/images", "run.patience_s=2")
    assert model(runs.start("refused", resume=True)) == runs.expected(1) and len(runs.jobs()) == 2


def test_full_quota_is_waited_for_and_named(runs: Runs, caplog: Any) -> None:
    """The quota is one pod. The third pod waits for longer than `patience_s`."""
    turns, first = threading.Lock(), list[tuple[str, int]]()

    def done(who: tuple[str, int]) -> bool:
        pod = runs.cluster.objects.get(("pods", f"{who[0]}-{who[1]}-0"))
        return pod is not None and pod["status"]["phase"] == "Succeeded"

    def refuse(job: Any, index: int) -> str:
        me = job["metadata"]["name"], index
        with turns:
            if first and first[-1] != me and not done(first[-1]):
                return QUOTA
            first.append(me)
            return ""

    runs.cluster.refuse = refuse
    runs.at_work(lambda *_: time.sleep(3.0))
    out = runs.start("quota", *EVERYBODY, "kubernetes.lifetime=round", "run.patience_s=10")
    assert model(out) == model(runs.alone("here", *EVERYBODY))
    assert any(r.levelname == "WARNING" and QUOTA in r.getMessage() for r in caplog.records)


def test_full_cluster_is_waited_for(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for one pod. It executes all orders of its class, and gives way to the next."""
    monkeypatch.setattr(provisioner, "YIELD_S", 0.5)
    runs.cluster.room = threading.Semaphore(1)
    runs.at_work(lambda *_: time.sleep(0.7))
    sets = (*EVERYBODY, APART, "run.patience_s=4", "rounds.stop=2")
    assert model(runs.start("queue", *sets)) == model(runs.alone("here", *EVERYBODY, "rounds.stop=2"))


def test_job_that_its_queue_admits_late_is_waited_for(runs: Runs, in_a_queue: str, caplog: Any) -> None:
    asked: list[float] = []

    def admits(_: Any) -> bool:
        asked.append(time.monotonic())
        return asked[-1] > asked[0] + 5

    runs.cluster.admits = admits
    assert model(runs.start("late", in_a_queue)) == runs.expected(1)
    assert "3 x the Job is suspended" in caplog.text and len(runs.jobs()) == 1
