"""Reads, creates, changes and deletes the objects of a run in the cluster."""

from __future__ import annotations

import base64
import binascii
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fl_engine.core.errors import ConfigError, EnvironmentFailure, Unreachable
from fl_engine.remote.kubernetes import jobs, status
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.remote.kubernetes.jobs import PodClass, Resource
from fl_engine.remote.kubernetes.status import PodState
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import Invitation
from fl_engine.remote.registry import Member
from fl_engine.remote.settings import KubernetesConfig

MOST_PODS = 200
"""The most pods of a Job."""


@dataclass
class Job:
    """A Job that exists."""

    body: Resource
    pods: PodClass
    members: list[Member]
    """The worker of each index."""
    written: float = -math.inf
    """When its Secret was written."""
    states: list[PodState] = field(default_factory=list)
    spent: set[int] = field(default_factory=set)
    suspended: bool = False
    refused: str = ""
    """Why pods are missing: the message of the last event since `ignored`."""
    ignored: str = ""
    """Time up to which events do not count, because their cause may have been fixed since."""

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def lacks_pods(self) -> bool:
        here = sum(not state.over for state in self.states)
        return not self.suspended and here < min(int(self.body["spec"]["parallelism"]), self.free)

    @property
    def queued(self) -> bool:
        """Whether some of its pods wait for room, for a quota, or for the Job's queue."""
        return self.suspended or any(state.queued for state in self.states) or status.QUOTA in self.refused

    @property
    def free(self) -> int:
        """Number of indices for which pods run or may come."""
        return len(self.members) - len(self.spent)

    def reasons(self) -> Counter[str]:
        """Return why its pods do not run, and the number of pods for each reason."""
        if self.suspended:
            return Counter({status.SUSPENDED: self.free})
        found = Counter(s.reason for s in self.states if s.reason and (s.failed or not s.over))
        if self.lacks_pods and self.refused:
            found[self.refused] += 1
        return found


class Objects:
    """The objects of one run. `run`: its label; `store`: its address, for people who look at the cluster."""

    def __init__(self, cluster: Cluster, options: KubernetesConfig, run: str, store: str, mailboxes: Mailboxes) -> None:
        self._cluster, self._options, self._run, self._store = cluster, options, run, store
        self._mailboxes, self._template = mailboxes, jobs.template(options.template)
        size = len(mailboxes.invitation(Member.new("x" * 63, "x" * 63, pod=True)).model_dump_json())
        self.most = max(1, min(MOST_PODS, jobs.SECRET_BYTES // size))
        """The most pods of a Job, whose Secret holds their invitations."""
        self._number = 0

    def jobs(self) -> list[Resource]:
        return self._cluster.select("jobs", {jobs.RUN: self._run})

    def pods(self) -> list[Resource]:
        return self._cluster.select("pods", {jobs.RUN: self._run})

    def refusals(self) -> dict[str, tuple[str, str]]:
        """See `status.refusals`."""
        events = self._cluster.select("events", {}, {"involvedObject.kind": "Job", "reason": "FailedCreate"})
        return status.refusals(events)

    def adopted(self, label: str | None, classes: dict[str, PodClass]) -> Iterator[Job]:
        """Yield the Jobs of an earlier coordinator. Delete those of other settings or of another round."""
        settings = jobs.settings_sum(self._template, self._options)
        for body in self.jobs():
            meta, notes = body["metadata"], body["metadata"].get("annotations", {})
            self._number = max(self._number, int(notes.get(jobs.NUMBER, 0)) + 1)
            if meta.get("deletionTimestamp"):
                continue
            of, members = classes.get(notes.get(jobs.CLASS, "")), self._members(meta["name"])
            fits = notes.get(jobs.SETTINGS) == settings and meta["labels"].get(jobs.ROUND) == label
            if of and fits and len(members) == body["spec"]["completions"]:
                yield Job(body, of, members)
            else:
                self._cluster.delete("jobs", meta["name"])

    def _members(self, name: str) -> list[Member]:
        """Return the workers in a Job's Secret; empty if some are missing."""
        data = (self._cluster.get("secrets", name) or {}).get("data", {})
        found = []
        try:
            for index in range(len(data)):
                invitation = Invitation.of(base64.b64decode(data[str(index)]), name)
                key = invitation.key
                found.append(Member(name=invitation.name, tier=invitation.tier, invited=key, pod=True))
        except (ConfigError, KeyError, binascii.Error):
            return []
        return found

    def make(self, of: PodClass, size: int, label: str | None, memory: str | None) -> Job:
        """Create a Job and its Secret. `label`: the round; None if its pods live for the run."""
        number, self._number = self._number, self._number + 1
        owner = self._owner()
        body = jobs.job(self._template, self._options, self._run, label, of, number, size, owner, memory)
        name = body["metadata"]["name"]
        made = self._cluster.create("jobs", body)
        if made is None:  # the response to an earlier try was lost
            made = next((job for job in self.jobs() if job["metadata"]["name"] == name), None)
        if made is None:
            raise EnvironmentFailure(f"the Job {name} exists and is not this run's. Delete it, then resume")
        job = Job(made, of, [Member.new(f"{name}-{index}", of.name, pod=True) for index in range(size)])
        self.write_secret(job)
        return job

    def grow(self, job: Job, more: int) -> list[Member]:
        """Increase the pods of a Job, and return all its members."""
        size = len(job.members) + more
        names = [f"{job.name}-{index}" for index in range(len(job.members), size)]
        members = [*job.members, *(Member.new(name, job.pods.name, pod=True) for name in names)]
        self.write_secret(Job(job.body, job.pods, members))  # the new pods read it
        patched = self._cluster.patch("jobs", job.name, {"spec": {"completions": size, "parallelism": size}})
        return job.members if patched is None else members

    def write_secret(self, job: Job) -> None:
        """Replace a Job's invitations by ones with fresh URLs."""
        invitations = [self._mailboxes.invitation(member).model_dump_json() for member in job.members]
        body = jobs.secret(job.body, invitations)
        if self._cluster.create("secrets", body) is None:
            self._cluster.delete("secrets", job.name)
            self._cluster.create("secrets", body)
        job.written = time.monotonic()

    def delete(self, job: Job) -> None:
        self._cluster.delete("jobs", job.name)

    def _owner(self) -> Resource:
        """Return a reference to the run's ConfigMap. All objects of the run are deleted with it."""
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

    def clear(self) -> None:
        """Delete all objects of the run."""
        self._cluster.delete("configmaps", self._run)
