"""Creates, changes and deletes a run's Kubernetes objects, and reads the states of its Jobs and pods."""

from __future__ import annotations

import base64
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fl_engine.core.errors import ConfigError, EnvironmentFailure, Unreachable, printable
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import QUOTA, Cluster, Resource
from fl_engine.remote.kubernetes.jobs import CLIENT, PodClass
from fl_engine.remote.messages import Invitation
from fl_engine.remote.registry import Mailboxes, Member
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage.store import Store

MOST_PODS = 200
ROOM = re.compile(r"Insufficient |Too many pods")
"""Pattern of the Kubernetes scheduler's message that a suitable node has no free capacity."""
SUSPENDED = "the Job is suspended: its queue has not admitted it"


def indexes(text: str) -> set[int]:
    """Parse `status.completedIndexes`, e.g. "1,3-5,7"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def spent(job: Resource) -> set[int]:
    """Return the indices for which the Job starts no further pods."""
    status = job.get("status") or {}
    return indexes(status.get("completedIndexes", "")) | indexes(status.get("failedIndexes", ""))


def suspended(job: Resource) -> bool:
    """Return whether the Job is suspended. Queues such as Kueue suspend Jobs before admission and after preemption."""
    conditions = {c["type"]: c["status"] for c in (job.get("status") or {}).get("conditions") or []}
    return job["spec"].get("suspend") is True or conditions.get("Suspended") == "True"


def is_over(job: Resource) -> bool:
    """Return whether the Job is complete or has failed."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)


@dataclass(frozen=True)
class PodState:
    uid: str
    reason: str = ""
    """Reason why the pod has ended or has not started; empty if there is nothing to report."""
    started: bool = False
    over: bool = False
    """True if the worker's container or the pod has ended."""
    failed: bool = False
    """True if the worker ended with an error, and the pod was neither evicted nor deleted."""
    queued: bool = False
    """True if the pod waits for free capacity on a suitable node or for its admission by a queue."""


def pod_state(pod: Resource) -> PodState:
    """Return the state of a pod. `PodState.reason` is the first reason that applies in this order: eviction, deletion,
    out of memory, the worker's error message, the exit code, the condition that the pod waits for."""
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
        message = (ended.get("message") or "").strip()
        oom = ended.get("reason") == "OOMKilled"
        reason = "OOMKilled" if oom else message or f"{ended.get('reason', 'Error')} (exit code {ended['exitCode']})"
    elif over and phase == "Failed":
        reason = f"{status.get('reason', 'Failed')}: {status.get('message', '')}"
    elif not started:
        reason, queued = _waits(status, states)
    failed = over and disrupted is None and not meta.get("deletionTimestamp")
    failed = failed and (phase == "Failed" or ended.get("exitCode", 0) not in (0, 143))
    text = printable(reason).rstrip(": ")[:500]
    return PodState(meta.get("uid", ""), text, started, over, failed, queued)


def _waits(status: Resource, states: dict[str, Resource]) -> tuple[str, bool]:
    """Return the reason why a pod has not started, and whether the pod waits for free capacity."""
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


@dataclass
class WorkerJob:
    body: Resource
    pods: PodClass
    members: list[Member]  # members[i] is the worker in the pod with the Job's index i
    written: float = -math.inf
    states: list[PodState] = field(default_factory=list)
    spent: set[int] = field(default_factory=set)
    """Indices without further pods. Empty until the first `update`, because results of ended pods may be unread."""
    suspended: bool = False
    refused: str = ""
    """Message of the last event about pods that could not be created."""

    def update(self, body: Resource) -> None:
        self.body, self.suspended, self.spent = body, suspended(body), spent(body)

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def lacks_pods(self) -> bool:
        here = sum(not state.over for state in self.states)
        return not self.suspended and here < min(int(self.body["spec"]["parallelism"]), self.free)

    @property
    def queued(self) -> bool:
        """Return whether some pods wait for free capacity, for a quota, or for the Job's queue."""
        return self.suspended or any(state.queued for state in self.states) or QUOTA in self.refused

    @property
    def free(self) -> int:
        """Number of indices with a pod that runs or may start."""
        return len(self.members) - len(self.spent)

    def reasons(self) -> Counter[str]:
        """Map each reason why pods do not run to the number of pods."""
        if self.suspended:
            return Counter({SUSPENDED: self.free})
        found = Counter(s.reason for s in self.states if s.reason and (s.failed or not s.over))
        if self.lacks_pods and self.refused:
            found[self.refused] += 1
        return found


def check_reach(uri: str) -> None:
    """Raise ConfigError if the store at `uri` cannot issue URLs for pods."""
    if not uri.startswith("s3://"):
        raise ConfigError.at(f"run.remote must be an s3:// address that pods can reach, got {uri}")


@dataclass
class Seen:
    """The states of a class's pods that were observed in a round."""

    since: float
    """Time at which a Job of the class was last created or a pod last started (`time.monotonic`)."""
    ended: set[str] = field(default_factory=set)
    """UIDs of pods that have ended. `failed` contains the UIDs of pods that have failed."""
    failed: set[str] = field(default_factory=set)
    why: str = ""
    """Reason why the last pod that never sent a heartbeat has ended."""
    reported: set[str] = field(default_factory=set)
    """Reasons that have been logged, without the details after the colon."""


def image_for(options: KubernetesConfig) -> str:
    """Return the image of the pods. Raises ConfigError if the image is not set."""
    image = options.image or os.environ.get("FLEXFLEET_IMAGE")
    if not image:
        raise ConfigError.at("kubernetes.image or FLEXFLEET_IMAGE must name the pods' image")
    return image


def reach(options: KubernetesConfig, run_id: str, store: Store) -> None:
    """Check before training whether pods can be started. Raises ConfigError if the image is not set, and
    EnvironmentFailure if the cluster is unreachable or rejects a request."""
    image_for(options)
    Cluster(options.namespace).get("configmaps", jobs.run_label(run_id, store.uri()))


class Objects:
    """The Kubernetes objects of a run, labelled `run`. The run's ConfigMap contains `store`, the store's address."""

    def __init__(self, cluster: Cluster, options: KubernetesConfig, run: str, store: str, mailboxes: Mailboxes) -> None:
        self._cluster, self._options, self._run, self._store = cluster, options, run, store
        self._mailboxes, self._template = mailboxes, jobs.template(options.template)
        size = len(mailboxes.invitation(Member.new("x" * 63, "x" * 63, pod=True)).model_dump_json())
        self.most = max(1, min(MOST_PODS, jobs.SECRET_BYTES // size))
        """Maximum number of pods in a Job, limited by the size of the Secret that stores their invitations."""
        self._number = 0

    def jobs(self) -> list[Resource]:
        return self._cluster.select("jobs", {jobs.RUN: self._run})

    def refusals(self) -> dict[str, str]:
        """Map the UID of each Job to the message of its last FailedCreate event."""
        events = self._cluster.select("events", {}, {"involvedObject.kind": "Job", "reason": "FailedCreate"})
        events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return {e["involvedObject"].get("uid", ""): printable(e.get("message") or "")[:500] for e in events}

    def adopted(self, label: str | None, classes: dict[str, PodClass]) -> Iterator[WorkerJob]:
        """Yield reusable Jobs of an earlier coordinator. Delete Jobs that have other settings or another round."""
        settings = jobs.settings_sum(self._template, self._options)
        for body in self.jobs():
            meta, notes = body["metadata"], body["metadata"].get("annotations", {})
            self._number = max(self._number, int(notes.get(jobs.NUMBER, 0)) + 1)
            if meta.get("deletionTimestamp"):
                continue
            of, members = classes.get(notes.get(jobs.CLASS, "")), self._members(meta["name"])
            fits = notes.get(jobs.SETTINGS) == settings and meta["labels"].get(jobs.ROUND) == label
            if of and fits and len(members) == body["spec"]["completions"]:
                yield WorkerJob(body, of, members)
            else:
                self._cluster.delete("jobs", meta["name"])

    def _members(self, name: str) -> list[Member]:
        """Return the workers in a Job's Secret; an empty list if the Secret does not exist."""
        data = (self._cluster.get("secrets", name) or {}).get("data", {})
        invitations = [Invitation.of(base64.b64decode(data[str(index)]), name) for index in range(len(data))]
        return [Member(name=each.name, tier=each.tier, invited=each.key, pod=True) for each in invitations]

    def make(self, of: PodClass, size: int, label: str | None) -> WorkerJob:
        """Create a Job and its Secret. `label` is the round's label, or None if the pods run for the whole run."""
        number, self._number = self._number, self._number + 1
        body = jobs.job(self._template, self._options, self._run, label, of, number, size, self._owner())
        name = body["metadata"]["name"]
        made = self._cluster.create("jobs", body)
        if made is None:  # an earlier request created the Job, but the response was lost
            made = next((job for job in self.jobs() if job["metadata"]["name"] == name), None)
        if made is None:
            raise EnvironmentFailure(f"the Job {name} belongs to another run. Delete the Job, then resume")
        job = WorkerJob(made, of, [Member.new(f"{name}-{index}", of.name, pod=True) for index in range(size)])
        self.write_secret(job)
        return job

    def grow(self, job: WorkerJob, more: int) -> list[Member]:
        """Increase the number of pods in a Job, and return all members of the Job."""
        size = len(job.members) + more
        names = [f"{job.name}-{index}" for index in range(len(job.members), size)]
        members = [*job.members, *(Member.new(name, job.pods.name, pod=True) for name in names)]
        self.write_secret(WorkerJob(job.body, job.pods, members))  # before new pods read the Secret
        patched = self._cluster.patch("jobs", job.name, {"spec": {"completions": size, "parallelism": size}})
        return job.members if patched is None else members

    def write_secret(self, job: WorkerJob) -> None:
        """Replace the invitations in a Job's Secret with invitations that contain new URLs."""
        invitations = [self._mailboxes.invitation(member).model_dump_json() for member in job.members]
        body = jobs.secret(job.body, invitations)
        if self._cluster.create("secrets", body) is None:
            self._cluster.delete("secrets", job.name)
            self._cluster.create("secrets", body)
        job.written = time.monotonic()

    def _owner(self) -> Resource:
        """Return a reference to the run's ConfigMap, which owns all objects of the run."""
        labels = {jobs.RUN: self._run, "app.kubernetes.io/part-of": "flexfleet"}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self._run, "namespace": self._options.namespace, "labels": labels},
            "data": {"store": self._store},
        }
        found = self._cluster.create("configmaps", body) or self._cluster.get("configmaps", self._run)
        if found is None or found["metadata"].get("deletionTimestamp"):
            raise Unreachable(f"the ConfigMap {self._run} of an earlier run is being deleted")
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": self._run, "uid": found["metadata"]["uid"]}
