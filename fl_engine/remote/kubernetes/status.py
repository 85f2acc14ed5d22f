"""Reads the status of Jobs, pods and events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fl_engine.core.errors import printable
from fl_engine.remote.kubernetes.jobs import CLIENT, Resource

QUOTA = "exceeded quota"
ROOM = re.compile(r"Insufficient |Too many pods")
"""Part of the scheduler's message if a node would fit but is full."""
REFUSED_FOR_GOOD = re.compile(
    r"violates PodSecurity|(minimum|maximum) \S+ usage per |max limit to request ratio per "
    r"|failed quota: .*must specify |creating: Pod \S+ is invalid: "
)
"""Events about pods that will never start: Pod Security, a LimitRange, a quota that requires more fields, or an invalid
pod. A full quota is not among them."""
SUSPENDED = "the Job is suspended: its queue has not admitted it"


def indexes(text: str) -> set[int]:
    """Parse `status.completedIndexes`, e.g. "1,3-5,7"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def spent(job: Resource) -> set[int]:
    """Return the indices for which the Job starts no more pods."""
    status = job.get("status") or {}
    return indexes(status.get("completedIndexes", "")) | indexes(status.get("failedIndexes", ""))


def suspended(job: Resource) -> bool:
    """Whether a queue such as Kueue has not admitted the Job yet, or has preempted it."""
    conditions = {c["type"]: c["status"] for c in (job.get("status") or {}).get("conditions") or []}
    return job["spec"].get("suspend") is True or conditions.get("Suspended") == "True"


def ended(job: Resource) -> str | None:
    """Return why the Job is over (`Complete`, `FailedIndexes`, ...); None if it is not."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return "Complete" if condition["type"] == "Complete" else condition.get("reason") or "Failed"
    return None


@dataclass(frozen=True)
class PodState:
    uid: str
    reason: str = ""
    """Why the pod has ended, or what it waits for; empty: nothing to report."""
    started: bool = False
    over: bool = False
    """The worker's container or the pod has ended."""
    failed: bool = False
    """The worker ended by itself with an error; it was not evicted or deleted."""
    queued: bool = False
    """It waits for room: a node would fit but is full, or a queue has not admitted it yet."""


def pod_state(pod: Resource) -> PodState:
    """Return the state of a pod. Its reason is the first of: eviction, deletion, out of memory, the worker's own
    message, the exit code, what it waits for."""
    status, meta = pod.get("status") or {}, pod["metadata"]
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
    states = {each["name"]: each.get("state") or {} for each in status.get("containerStatuses") or []}
    client = states.get(CLIENT, {})
    ended, phase = client.get("terminated") or {}, status.get("phase", "Pending")
    over = bool(ended) or phase in ("Succeeded", "Failed")
    started = over or "running" in client
    disrupted = conditions.get("DisruptionTarget")
    reason, queued = "", False
    if disrupted is not None:
        reason = f"{disrupted.get('reason', 'Disrupted')}: {disrupted.get('message', '')}"
    elif meta.get("deletionTimestamp"):
        reason = "the pod was deleted"
    elif ended.get("exitCode"):
        said = (ended.get("message") or "").strip()
        oom = ended.get("reason") == "OOMKilled"
        reason = "OOMKilled" if oom else said or f"{ended.get('reason', 'Error')} (exit code {ended['exitCode']})"
    elif over and phase == "Failed":
        reason = f"{status.get('reason', 'Failed')}: {status.get('message', '')}"
    elif not started:
        reason, queued = _waits(status, states)
    failed = over and disrupted is None and not meta.get("deletionTimestamp")
    failed = failed and (phase == "Failed" or ended.get("exitCode", 0) not in (0, 143))
    text = printable(reason).rstrip(": ")[:500]
    return PodState(meta.get("uid", ""), text, started, over, failed, queued)


def _waits(status: Resource, states: dict[str, Resource]) -> tuple[str, bool]:
    """Return what a pod waits for that has not started, and whether that is room."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            why, message = condition.get("reason", "Unschedulable"), condition.get("message", "")
            return f"{why}: {message}", why == "SchedulingGated" or ROOM.search(message) is not None
    first = [each.get("state") or {} for each in status.get("initContainerStatuses") or []]
    for state in (states.get(CLIENT, {}), *states.values(), *first):
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}", False
    return "", False


def refusals(events: Iterable[Resource]) -> dict[str, tuple[str, str]]:
    """Map the UID of each Job to time and message of its last event FailedCreate."""
    found: dict[str, tuple[str, str]] = {}
    for event in events:
        uid, at = event["involvedObject"].get("uid"), event.get("lastTimestamp") or event.get("eventTime") or ""
        if uid and at >= found.get(uid, ("", ""))[0]:
            found[uid] = at, printable(event.get("message") or "")[:500]
    return found
