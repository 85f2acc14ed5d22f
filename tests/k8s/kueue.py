"""Kueue and the Job controller of a fake cluster, for Jobs that name a queue.

A Job with the label is suspended when it is created, and has no pods. `Cluster.admits` decides when its queue admits
it.
"""

from __future__ import annotations

import time
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
            if "conditions" not in job["status"]:
                _say(job, True)
            elif LABEL in job["metadata"]["labels"] and cluster.admits(job):
                job["spec"]["suspend"] = False
                _say(job, False)
                return True
        time.sleep(0.02)
    return False


def _say(job: Resource, stops: bool) -> None:
    reason = "JobSuspended" if stops else "JobResumed"
    job["status"]["conditions"] = [{"type": "Suspended", "status": str(stops), "reason": reason}]
