"""Kueue and the Job controller of a fake cluster, for Jobs that name a queue.

A Job with the label is suspended when it is created, and has no pods. `Cluster.admits` decides when its queue admits
it. `preempt` suspends it again: its pods are deleted.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

Resource = dict[str, Any]
LABEL = "kueue.x-k8s.io/queue-name"


def receive(job: Resource) -> None:
    """Suspend a Job when it is created, as the webhook does. The condition is not set yet."""
    if LABEL in job["metadata"].get("labels", {}):
        job["spec"]["suspend"] = True


def suspended(job: Resource) -> bool:
    return job["spec"].get("suspend") is True


def admitted(cluster: Any, job: Resource) -> bool:
    """Wait until the Job may have pods. Return False if it ended first."""
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
    """Suspend a Job, and return the names of the pods that ended."""
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
