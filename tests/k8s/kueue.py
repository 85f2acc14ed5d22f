"""What Kueue does with the Jobs of a fake cluster that name a queue, and the Job controller with those it suspends.

A Job with the label is suspended when it is made, and has no pods. `Cluster.admits` says when its queue lets it begin;
`preempt` stops it for others: its pods are deleted, and it queues again. While it is suspended its deadline stands
still, and when it is admitted the whole time is its own.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

Resource = dict[str, Any]
LABEL = "kueue.x-k8s.io/queue-name"


def receive(job: Resource) -> None:
    """The webhook's part, before the Job is there. Nobody has set the condition yet."""
    if LABEL in job["metadata"].get("labels", {}):
        job["spec"]["suspend"] = True


def suspended(job: Resource) -> bool:
    return job["spec"].get("suspend") is True


def admitted(cluster: Any, job: Resource) -> bool:
    """Waits until the Job may have pods; False: it ended first."""
    while cluster.alive(job) and "over" not in job:
        with cluster.lock:
            if not suspended(job):
                return True
            if not conditions(job):
                _say(job, True)
            elif LABEL in job["metadata"]["labels"] and cluster.admits(job):
                job["spec"]["suspend"] = False
                _say(job, False)
                return True
        time.sleep(0.02)
    return False


def conditions(job: Resource) -> list[Resource]:
    found: list[Resource] = job["status"].setdefault("conditions", [])
    return found


def preempt(cluster: Any, job: Resource) -> list[str]:
    """Gives the names of the pods that it has ended."""
    with cluster.lock:
        job["spec"]["suspend"] = True
        _say(job, True)
        label = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        pods = [
            pod
            for (kind, _), pod in cluster.objects.items()
            if kind == "pods" and label.items() <= pod["metadata"].get("labels", {}).items()
            and pod["status"]["phase"] in ("Pending", "Running")
        ]  # fmt: skip
        for pod in pods:
            cluster.preempted.add(pod["metadata"]["uid"])
            cluster._delete("pods", pod["metadata"]["name"])
        return [pod["metadata"]["name"] for pod in pods]


def _say(job: Resource, stops: bool) -> None:
    reason = "JobSuspended" if stops else "JobResumed"
    conditions(job)[:] = [{"type": "Suspended", "status": str(stops), "reason": reason}]
    job["status"].pop("startTime", None)
    if not stops:
        job["status"]["startTime"] = datetime.now(UTC).isoformat()
