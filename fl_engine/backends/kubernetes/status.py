"""What the status of a Job and of its pods says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fl_engine.backends.kubernetes.jobs import CLIENT, Resource
from fl_engine.core.errors import printable


def failed_indexes(job: Resource) -> set[int]:
    """`status.failedIndexes`, e.g. "1,3-5,7"."""
    found: set[int] = set()
    for part in filter(None, (job.get("status") or {}).get("failedIndexes", "").split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def suspended(job: Resource) -> bool:
    """Whether a queue such as Kueue has not admitted the Job yet, or has stopped it for others: its pods are deleted,
    and its deadline does not run. What Kubernetes says of it in the status lags behind what the queue wants."""
    said = {condition["type"]: condition["status"] for condition in (job.get("status") or {}).get("conditions") or []}
    return job["spec"].get("suspend") is True or said.get("Suspended") == "True"


def ended(job: Resource) -> str | None:
    """Why the Job is over (`Complete`, `DeadlineExceeded`, ...); None: it is not."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return "Complete" if condition["type"] == "Complete" else condition.get("reason") or "Failed"
    return None


@dataclass(frozen=True)
class PodState:
    """The state of a pod: `reason` says why it failed, or what it waits for."""

    index: int
    phase: str
    reason: str
    started: bool
    queued: bool = False
    """It waits for room: it would fit on some node if that node were emptier, or a queue does not admit it yet."""
    unreachable: bool = False
    """It runs on a node that does not answer: the node's controller calls the pod not ready, while the node itself last
    said that its containers are ready."""
    ends: float | None = None
    """Of one that is being deleted: the seconds that it was given for it."""
    uid: str = ""
    disrupted: bool = False
    """It was taken away: its node was drained or lost, or a more important pod needed the room."""
    node: str = ""
    """The node that took it; empty: none has."""
    left: bool = False
    """Its client has ended; others of its containers may go on."""

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


ROOM = re.compile(r"Insufficient |Too many pods")
"""What the scheduler says of a node that fits, but is full."""


def newest(pods: Iterable[Resource], job: str) -> list[PodState]:
    """What the Job's pods are at; of several with one index the last, for a Job keeps those that failed."""
    last: dict[int, tuple[tuple[str, bool], PodState]] = {}
    for pod in pods:
        if pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name") == job:
            state = pod_state(pod)
            age = (pod["metadata"].get("creationTimestamp", ""), state.phase != "Failed")
            if state.index not in last or age >= last[state.index][0]:
                last[state.index] = age, state
    return [state for _, state in last.values()]


def pod_state(pod: Resource) -> PodState:
    status, meta = pod.get("status") or {}, pod["metadata"]
    index = int(meta.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", -1))
    reason, queued = "", False
    said = {condition["type"]: condition["status"] for condition in status.get("conditions") or []}
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            why = condition.get("reason", "Unschedulable")
            reason = f"{why}: {condition.get('message', '')}"
            queued = why == "SchedulingGated" or ROOM.search(condition.get("message", "")) is not None
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            reason = f"{condition.get('reason', 'Disrupted')}: {condition.get('message', '')}"
    disrupted = said.get("DisruptionTarget") == "True"
    states = {each["name"]: each.get("state") or {} for each in status.get("containerStatuses") or []}
    client = states.pop(CLIENT, {})
    started = "running" in client or "terminated" in client
    first = [each.get("state") or {} for each in status.get("initContainerStatuses") or []]
    for state in [client] if started else [*first, *states.values(), client]:  # the client's own counts most
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            reason = f"{waiting['reason']}: {waiting.get('message', '')}"
        over = state.get("terminated") or {}
        if over.get("exitCode"):
            why = over.get("reason", "Error")
            last = (over.get("message") or "").strip().splitlines()[-1:]
            reason = f"{why} (exit code {over['exitCode']})" + (f": {last[0]}" if last and why != "OOMKilled" else "")
    if status.get("reason") and not reason:
        reason = f"{status['reason']}: {status.get('message', '')}"
    phase = status.get("phase", "Pending")
    unreachable = phase == "Running" and said.get("Ready") == "False" and said.get("ContainersReady") == "True"
    ends = float(meta.get("deletionGracePeriodSeconds") or 0) if meta.get("deletionTimestamp") else None
    return PodState(
        index,
        phase,
        printable(reason).rstrip(": ")[:500],
        started,
        queued,
        unreachable,
        ends,
        meta.get("uid", ""),
        disrupted,
        printable((pod.get("spec") or {}).get("nodeName") or ""),
        "terminated" in client,
    )
