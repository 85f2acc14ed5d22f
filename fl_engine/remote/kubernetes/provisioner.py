"""Starts workers as pods: one elastic Indexed Job per class of pods, for the whole run or for one round.

Each index of a Job has a mailbox. The Job's Secret contains the invitations to the mailboxes. The Job controller
replaces pods that end or are lost. A worker's id is the pod's UID, so two pods with the same index have different ids.
The state of a pod ends a lease only if the container has terminated or the pod no longer exists. Other pod states are
only used to explain why pods do not start.

A thread polls Kubernetes (`Pods.watched`), so that rounds do not wait for the API. A restarted coordinator finds the
Jobs by their labels, and reads the keys from the Jobs' Secrets.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, Unreachable
from fl_engine.core.types import Device, RoundPlan
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.remote.kubernetes.objects import Objects, PodState, Seen, WorkerJob, image_for, is_over, pod_state
from fl_engine.remote.provisioner import Lost, Need, Provisioner
from fl_engine.remote.registry import Mailboxes, Member
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage import probe
from fl_engine.storage.outage import Outage
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store

log = logging.getLogger("flexfleet")

MAILBOXES = "agents"
"""Folder of the mailboxes in the run's store."""
POLL_S = 1.0
RENEW_S = 600.0
"""Seconds between two updates of the URLs in a Job's Secret, which pods read when they start."""
YIELD_S = 10.0
"""Minimum seconds between two deletions of Jobs to free capacity for other Jobs."""
FIRST_LOOK_S = 5.0
"""Maximum seconds that a round waits until the thread has found the pods of an earlier coordinator."""
MOST = 100
NOTHING = Need({}, {}, {}, frozenset())


class Pods(Provisioner):
    """The pods of a run. The pods' mailboxes are in the store `home`. The Kubernetes API may be unavailable for at most
    `patience_s` seconds, and pods must start within `patience_s` seconds."""

    strangers, drains = False, 3
    options: KubernetesConfig

    def __init__(
        self,
        options: KubernetesConfig,
        run_id: str,
        fleet: Sequence[Device],
        store: Store,
        home: Store,
        patience_s: float,
    ) -> None:
        self.options = options.model_copy(update={"image": image_for(options)})
        self.room = 1 if options.placement == "device" else min(options.clients_per_pod, MOST)
        self.quorum, self.wait_s = options.quorum, patience_s
        self._run = jobs.run_label(run_id, store.uri())
        verb = probe.upload_verb(home) if isinstance(home, S3Store) else None
        self.mailboxes = Mailboxes(home, verb, options.endpoint)
        self._cluster = Cluster(options.namespace)
        self._objects = Objects(self._cluster, self.options, self._run, store.uri(), self.mailboxes)
        self._class_of = jobs.classes(fleet, options)
        self._classes = {of.name: of for of in self._class_of.values()}
        self._looked = threading.Event()
        """Event that is set after the thread has polled for the first time or has failed."""
        self._lock, self._awake, self._over = threading.RLock(), threading.Event(), False
        # Acquire the lock to access the following fields.
        self._jobs: list[WorkerJob] = []
        self._label: str | None = None
        """Label of the current round; None if the pods run for the whole run."""
        self._sizes: dict[str, int] = {}
        """Number of pods of each class that the round requires."""
        self._need = NOTHING
        self._is_new = False
        """True if the scheduler has set `_need` after the last poll. In this case, the scheduler has read the results
        of all ended pods."""
        self._adopted = False
        """True if the scheduler has adopted this round's leases from an earlier coordinator."""
        self._heard: set[str] = set()
        """UIDs of pods that have sent a heartbeat."""
        self._ended: dict[str, Lost] = {}
        """Map the UID of each ended pod to the reason why it ended."""
        self._seen: dict[str, Seen] = {}
        self._error: FlexfleetError | None = None
        self._away = ""
        """Error message if the Kubernetes API is unreachable; empty if the API is reachable."""
        self._gave = -math.inf
        """Time of the last deletion of a Job to free capacity for other Jobs (`time.monotonic`)."""

    def pool(self, client: int) -> str:
        return self._class_of[client].name

    def suits(self, own: str | None, pool: str) -> bool:
        return own is not None and self._classes[own].includes(self._classes[pool], self.options)

    def torch_device(self, client: int) -> str:
        return self._class_of[client].pool.torch_device

    def begin(self, plan: RoundPlan) -> None:
        clients = Counter(self.pool(assignment.client) for assignment in plan.assignments)
        wishes = [min(math.ceil(count / self.room), self._objects.most) for count in clients.values()]
        with self._lock:
            self._label = plan.label if self.options.lifetime == "round" else None
            self._sizes = dict(zip(clients, jobs.shares(wishes, self.options.parallelism), strict=True))
            self._need = Need(clients, clients, {}, frozenset())
            self.moved, self._error, self._adopted, self._is_new = time.monotonic(), None, False, True
            self._seen = {name: Seen(self.moved) for name in clients}
        self._awake.set()
        self._looked.wait(FIRST_LOOK_S)

    def need(self, need: Need) -> None:
        with self._lock:
            if sum(need.open.values()) < sum(self._need.open.values()):
                self.moved = time.monotonic()  # a pod will end, so another pod can start
            self._need, self._adopted, self._is_new = need, True, True
            self._heard |= need.present.keys()
            if self._error is not None and not need.present:
                raise self._error

    def end(self) -> None:
        with self._lock:
            self._sizes, self._need = {}, NOTHING

    def names(self) -> Collection[str]:
        return self._members().keys()

    def member(self, name: str) -> Member:
        return self._members()[name]

    def _members(self) -> dict[str, Member]:
        with self._lock:
            return {member.name: member for job in self._jobs for member in job.members}

    def lost(self, name: str, worker: str) -> Lost | None:
        with self._lock:
            return self._ended.get(worker)

    def hopeless(self, pool: str) -> bool:
        now = time.monotonic()
        with self._lock:
            its = [job for job in self._jobs if job.pods.name == pool]
            seen = self._seen.setdefault(pool, Seen(now))  # the entry is missing if the round uses only other classes
            if len(seen.failed - self._heard) >= self.options.attempts:
                return True
            queued = any(job.queued for job in its)
            return now - (max(seen.since, self.moved) if queued else seen.since) > self.wait_s

    def why(self, pool: str) -> str:
        with self._lock:
            seen = self._seen.get(pool)
            return self._away or _text(self._reasons(pool)) or (seen.why if seen is not None else "")

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        reasons = "".join(f"{pool}: {why}. " for pool in pools if (why := self.why(pool)))
        return (
            f"{reasons}Look at the pods: kubectl -n {self.options.namespace} describe jobs,pods -l "
            f"{jobs.RUN}={self._run}. Fix the cause"
        )

    def clear(self) -> None:
        self._cluster.delete("configmaps", self._run)

    def what_is_left(self) -> str:
        """Return instructions for deleting the remaining objects of a stopped run from the cluster."""
        return (
            "the run's pods remain for --resume and end by themselves after an hour. To end them now: "
            f"kubectl -n {self.options.namespace} delete jobs,configmaps -l {jobs.RUN}={self._run}"
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True, name="kubernetes")
        thread.start()
        try:
            yield
        finally:
            self._over = True
            self._awake.set()
            thread.join(2.0)

    def _watch(self) -> None:
        outage, found = Outage("the Kubernetes API", self.wait_s), False
        self._awake.wait()  # wait for the first round, which sets this event
        while not self._over:
            try:
                if not found:
                    found_jobs = list(self._objects.adopted(self._label, self._classes))
                    for job in found_jobs:
                        log.info("reusing the Job %s of an earlier coordinator", job.name)
                    with self._lock:
                        self._jobs += found_jobs
                found, is_new = True, self._is_new
                try:
                    if is_new:  # the scheduler has read the results of all ended pods
                        self._change()
                finally:
                    self._look()
                self._looked.set()
                outage.ended()
                self._away, self._error = "", None if is_new else self._error
            except Unreachable as error:
                self._away = str(error)
                if outage.failed(error, "running pods continue"):
                    self._fail(error)
            except FlexfleetError as error:
                self._fail(error)
            except Exception as error:  # a bug must not end the thread silently, because the run would wait forever
                log.exception("cannot observe the pods")
                self._fail(EnvironmentFailure(f"cannot observe the pods: {type(error).__name__}: {error}"))
            self._awake.wait(POLL_S)
            self._awake.clear()

    def _fail(self, error: FlexfleetError) -> None:
        self._looked.set()
        with self._lock:
            self._error = error

    def _look(self) -> None:
        with self._lock:
            self._is_new = False
        there = {job["metadata"]["name"]: job for job in self._objects.jobs()}
        pods = self._cluster.select("pods", {jobs.RUN: self._run})
        events = self._objects.refusals() if any(job.lacks_pods for job in self._jobs) else {}
        by_job: dict[str, list[PodState]] = {}
        for pod in pods:
            owner = pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name", "")
            by_job.setdefault(owner, []).append(pod_state(pod))
        over_jobs = []
        with self._lock:
            for job in list(self._jobs):
                self._see(job, by_job.get(job.name, []), events)
                body = there.get(job.name)
                # An earlier coordinator's pods may have ended with results that the scheduler has not read yet.
                over = body is not None and is_over(body)
                if body is None or body["metadata"]["uid"] != job.body["metadata"]["uid"] or (over and self._adopted):
                    self._forget(job, "its Job was deleted" if body is None else "its Job is over")
                    if body is not None:
                        over_jobs.append(job)
                    continue
                job.update(body)
            self._report()
        for job in over_jobs:
            self._cluster.delete("jobs", job.name)

    def _see(self, job: WorkerJob, states: Sequence[PodState], events: Mapping[str, str]) -> None:
        now = time.monotonic()
        seen = self._seen.setdefault(job.pods.name, Seen(now))
        before = {state.uid: state for state in job.states}
        for uid in before.keys() - {state.uid for state in states}:
            self._ended.setdefault(uid, Lost("the pod is gone", False))
        for state in states:
            was = before.get(state.uid)
            if state.started and not (was and was.started):
                self._comes(seen)
            if state.over and state.uid not in self._ended:
                why = state.reason or "the pod has ended without an error"
                self._ended[state.uid] = Lost(why, state.failed)
                seen.ended.add(state.uid)
                if state.uid in self._heard:
                    self.moved = now
                else:
                    seen.why = why
                if state.failed:
                    seen.failed.add(state.uid)
        job.states = list(states)
        job.refused = events.get(str(job.body["metadata"]["uid"]), "") if job.lacks_pods else ""

    def _comes(self, seen: Seen) -> None:
        """Record that a pod of this class is about to start. Record nothing if earlier pods ended before their first
        heartbeat, because a round must not wait for pods that fail repeatedly."""
        if not seen.ended - self._heard:
            self.moved = seen.since = time.monotonic()

    def _forget(self, job: WorkerJob, why: str) -> None:
        log.info("%s: %s", job.name, why)
        self._jobs.remove(job)
        for state in job.states:
            self._ended.setdefault(state.uid, Lost(why, False))

    def _report(self) -> None:
        for name, seen in self._seen.items():
            found = self._reasons(name)
            new = {reason.partition(":")[0] for reason in found} - seen.reported  # ignore the details after the colon
            seen.reported |= new
            if new:
                log.warning("pods of %s: %s", name, _text(found))

    def _reasons(self, name: str) -> Counter[str]:
        return sum((job.reasons() for job in self._jobs if job.pods.name == name), Counter[str]())

    def _change(self) -> None:
        """Create, enlarge and delete Jobs, so that each assignment has a pod."""
        with self._lock:
            label, sizes, need = self._label, self._sizes, self._need
        for job in [job for job in self._jobs if label and job.body["metadata"]["labels"].get(jobs.ROUND) != label]:
            self._delete(job, "the round is over")
        for name, size in sizes.items():
            waiting = need.waiting.get(name, 0)
            if not waiting or self.hopeless(name):
                continue
            its = [job for job in self._jobs if job.pods.name == name]
            free = sum(job.free - sum(m.name in need.silent for m in job.members) for job in its)
            held = math.ceil((need.open.get(name, 0) - waiting) / self.room)
            lack = min(size - free, math.ceil(waiting / self.room) - max(0, free - held))
            if lack <= 0:
                continue
            grows = next((job for job in its if label is None and len(job.members) + lack <= self._objects.most), None)
            if grows is None:
                made = self._objects.make(self._classes[name], lack, label)
                with self._lock:
                    self._jobs.append(made)
            else:
                members = self._objects.grow(grows, lack)
                with self._lock:
                    grows.members = members
            with self._lock:
                self._comes(self._seen.setdefault(name, Seen(0.0)))
        if self.options.placement == "pool":
            self._give_way(need)
        for job in self._jobs:
            if time.monotonic() - job.written > RENEW_S:
                self._objects.write_secret(job)

    def _delete(self, job: WorkerJob, why: str) -> None:
        self._cluster.delete("jobs", job.name)
        with self._lock:
            self._forget(job, why)

    def _give_way(self, need: Need) -> None:
        """Delete a Job without assignments if another class waits for free capacity and has no running pod."""
        idle = [job for job in self._jobs if not need.open.get(job.pods.name)]
        queues = [
            job.pods.name
            for job in self._jobs
            if need.waiting.get(job.pods.name) and job.queued and not any(s.started and not s.over for s in job.states)
        ]
        now = time.monotonic()
        if idle and queues and now - self._gave >= YIELD_S:
            self._gave = now
            job = max(idle, key=lambda job: len(job.members))
            self._delete(job, f"its pods have no assignments, and pods of {queues[0]} wait for free capacity")


def _text(reasons: Counter[str]) -> str:
    return "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3))
