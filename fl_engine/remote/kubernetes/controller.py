"""Keeps as many pods as a round needs: creates, grows and deletes Indexed Jobs, and observes their pods.

A thread polls Kubernetes (`watched`), so that no round waits for it. A coordinator that is restarted finds the Jobs by
their labels, and the keys in their Secrets.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, Unreachable
from fl_engine.remote.kubernetes import jobs, status
from fl_engine.remote.kubernetes.jobs import PodClass
from fl_engine.remote.kubernetes.objects import Job, Objects
from fl_engine.remote.kubernetes.status import PodState
from fl_engine.remote.provisioner import Lost
from fl_engine.remote.registry import Member
from fl_engine.storage.outage import REPORT_S, Outage

log = logging.getLogger("flexfleet")

POLL_S = 1.0
RENEW_S = 600.0
"""Seconds after which a Job's Secret gets fresh URLs, for pods that start later."""
YIELD_S = 10.0


@dataclass
class Seen:
    """What was observed of a class in a round."""

    since: float
    """When a Job of the class was last created, or a pod has last started."""
    ended: set[str] = field(default_factory=set)
    """UIDs of pods that have ended."""
    failed: set[str] = field(default_factory=set)
    """UIDs of pods that have failed."""
    why: str = ""
    """Why the last pod has ended that had not sent a heartbeat."""
    reported: set[str] = field(default_factory=set)
    """Kinds of reasons that were logged."""


@dataclass(frozen=True)
class Demand:
    """What the present round needs. All mappings are by class."""

    label: str | None = None
    """The round, if pods live for a round; None: they live for the run."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Number of pods."""
    memory: Mapping[str, str] = field(default_factory=dict)
    """Memory of a pod, for classes with memory=auto."""
    open: Mapping[str, int] = field(default_factory=dict)
    """Number of assignments without a result."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Number of assignments that no pod holds."""
    silent: frozenset[str] = frozenset()
    """Workers whose heartbeats have stopped; another pod replaces each."""


class Controller:
    """Polls Kubernetes and changes the run's Jobs.

    Args:
        objects: The run's objects.
        classes: All classes of pods by name.
        room: The most assignments of a pod at a time.
        attempts: How many pods of a class may fail before their first heartbeat.
        patience_s: How long pods of a class may take to start.
        shares: Whether a class without assignments makes room for another class.
    """

    def __init__(
        self,
        objects: Objects,
        classes: Mapping[str, PodClass],
        room: int,
        attempts: int,
        patience_s: float,
        shares: bool,
    ) -> None:
        self._objects, self._classes, self._room = objects, dict(classes), room
        self._attempts, self._patience_s, self._shares = attempts, patience_s, shares
        self.looked = threading.Event()
        """The thread has looked at least once, or has failed."""
        self._lock, self._awake, self._over = threading.RLock(), threading.Event(), False
        # The lock guards all of the following.
        self.moved = -math.inf
        """When a pod last started, ended without an error, or had a result."""
        self._jobs: list[Job] = []
        self._demand = Demand()
        self._is_new = False
        """The demand is newer than the last look, so it includes the results of pods that had ended then."""
        self._adopted = False
        """The scheduler has adopted what pods of an earlier coordinator hold in this round."""
        self._heard: set[str] = set()
        """UIDs of pods that have sent a heartbeat."""
        self._ended: dict[str, Lost] = {}
        """Map the UID of each pod that has ended to the reason."""
        self._known: set[str] = set()
        """UIDs of pods that exist."""
        self._seen: dict[str, Seen] = {}
        self._error: FlexfleetError | None = None
        self._away = ""
        """Why the Kubernetes API cannot be reached; empty: it can."""
        self._gave = self._reported = -math.inf

    def begin(self, demand: Demand) -> None:
        with self._lock:
            self._demand, self.moved, self._error, self._adopted = demand, time.monotonic(), None, False
            self._is_new = True
            self._seen = {name: Seen(self.moved) for name in demand.sizes}
        self._awake.set()

    def update(self, demand: Demand, heard: Collection[str]) -> None:
        """`heard`: UIDs of pods that send heartbeats. If there are none, raises the error that prevents pods."""
        with self._lock:
            if sum(demand.open.values()) < sum(self._demand.open.values()):
                self.moved = time.monotonic()  # a pod will end, and so make room for others
            self._demand, self._adopted, self._is_new = demand, True, True
            self._heard |= set(heard)
            if self._error is not None and not heard:
                raise self._error

    def end(self) -> None:
        """Start no more pods until the next round."""
        with self._lock:
            self._demand = replace(self._demand, sizes={}, open={}, waiting={})

    def members(self) -> dict[str, Member]:
        with self._lock:
            return {member.name: member for job in self._jobs for member in job.members}

    def lost(self, uid: str) -> Lost | None:
        with self._lock:
            return self._ended.get(uid)

    def hopeless(self, name: str) -> bool:
        """Whether no pod of a class can come in this round."""
        now = time.monotonic()
        with self._lock:
            its = [job for job in self._jobs if job.pods.name == name]
            seen = self._seen.setdefault(name, Seen(now))  # a class that this round does not need
            if len(seen.failed - self._heard) >= self._attempts:
                return True
            if any(job.lacks_pods and status.REFUSED_FOR_GOOD.search(job.refused) for job in its):
                return True
            queued = any(job.queued for job in its)
            return now - (max(seen.since, self.moved) if queued else seen.since) > self._patience_s

    def why(self, name: str) -> str:
        """Return why pods of a class do not run; empty if unknown."""
        with self._lock:
            seen = self._seen.get(name)
            return self._away or _text(self._reasons(name)) or (seen.why if seen is not None else "")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Poll Kubernetes inside, in a thread."""
        thread = threading.Thread(target=self._watch, daemon=True, name="kubernetes")
        thread.start()
        try:
            yield
        finally:
            self._over = True
            self._awake.set()
            thread.join(2.0)

    def _watch(self) -> None:
        outage, found = Outage("the Kubernetes API", self._patience_s), False
        self._awake.wait()  # for the first round
        while not self._over:
            try:
                if not found:
                    self._find()
                    found = True
                with self._lock:
                    is_new = self._is_new
                try:
                    if is_new:  # otherwise pods that have ended may have results that were not read yet
                        self._change()
                finally:
                    self._look()
                self.looked.set()
                outage.ended()
                self._away, self._error = "", None if is_new else self._error
            except Unreachable as error:
                self._away = str(error)
                if outage.failed(error, "running pods continue"):
                    self._fail(error)
            except FlexfleetError as error:
                self._fail(error)
            except Exception as error:  # otherwise a bug would end the thread and let the run wait
                log.exception("cannot observe the pods")
                self._fail(EnvironmentFailure(f"cannot observe the pods: {type(error).__name__}: {error}"))
            self._awake.wait(POLL_S)
            self._awake.clear()

    def _fail(self, error: FlexfleetError) -> None:
        self.looked.set()
        with self._lock:
            self._error = error

    def _find(self) -> None:
        """Find the Jobs of an earlier coordinator."""
        found = list(self._objects.adopted(self._demand.label, self._classes))
        events = self._objects.refusals() if found else {}
        for job in found:
            log.info("the Job %s exists already", job.name)
            job.ignored, _ = events.get(job.body["metadata"]["uid"], ("", ""))
        with self._lock:
            self._jobs += found

    def _look(self) -> None:
        """Read the state of Jobs and pods."""
        with self._lock:
            self._is_new = False
        there = {job["metadata"]["name"]: job for job in self._objects.jobs()}
        pods = self._objects.pods()
        events = self._objects.refusals() if any(job.lacks_pods for job in self._jobs) else {}
        by_job: dict[str, list[PodState]] = {}
        for pod in pods:
            owner = pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name", "")
            by_job.setdefault(owner, []).append(status.pod_state(pod))
        ended = []
        with self._lock:
            for job in list(self._jobs):
                self._see(job, by_job.get(job.name, []), events)
                body = there.get(job.name)
                # Pods of an earlier coordinator may have ended, with results that the scheduler has not read yet.
                over = body is not None and status.ended(body) is not None
                if body is None or body["metadata"]["uid"] != job.body["metadata"]["uid"] or (over and self._adopted):
                    self._forget(job, "its Job was deleted" if body is None else "its Job is over")
                    if body is not None:
                        ended.append(job)
                    continue
                job.body, job.suspended, job.spent = body, status.suspended(body), status.spent(body)
            here = {state.uid for states in by_job.values() for state in states}
            for uid in self._known - here:
                self._ended.setdefault(uid, Lost("the pod is gone", False))
            self._known &= here
            self._report()
        for job in ended:
            self._objects.delete(job)

    def _see(self, job: Job, states: Sequence[PodState], events: Mapping[str, tuple[str, str]]) -> None:
        """Record the states of a Job's pods."""
        now = time.monotonic()
        seen = self._seen.setdefault(job.pods.name, Seen(now))
        before = {state.uid: state for state in job.states}
        for state in states:
            self._known.add(state.uid)
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
        at, message = events.get(str(job.body["metadata"]["uid"]), ("", ""))
        job.refused = message if job.lacks_pods and at > job.ignored else ""

    def _comes(self, seen: Seen) -> None:
        """A pod of this class is about to come. It does not count if others have ended before their first heartbeat,
        because a round must not wait for pods that end again and again."""
        if not seen.ended - self._heard:
            self.moved = seen.since = time.monotonic()

    def _forget(self, job: Job, why: str) -> None:
        log.info("%s: %s", job.name, why)
        self._jobs.remove(job)
        for state in job.states:
            self._ended.setdefault(state.uid, Lost(why, False))

    def _report(self) -> None:
        """Log why pods do not run: each kind of reason at once, and all again while assignments wait."""
        now = time.monotonic()
        again = now - self._reported > REPORT_S and any(self._demand.waiting.values())
        self._reported = now if again else self._reported
        for name, seen in self._seen.items():
            found = self._reasons(name)
            new = {reason.partition(":")[0] for reason in found} - seen.reported  # without details of each pod
            seen.reported |= new
            if new or (again and found and self._demand.waiting.get(name)):
                log.log(logging.WARNING if new else logging.INFO, "pods of %s: %s", name, _text(found))

    def _reasons(self, name: str) -> Counter[str]:
        return sum((job.reasons() for job in self._jobs if job.pods.name == name), Counter[str]())

    def _change(self) -> None:
        """Create, grow and delete Jobs, so that each assignment has a pod."""
        with self._lock:
            demand = self._demand
        label, open_, waiting = demand.label, demand.open, demand.waiting
        for job in [job for job in self._jobs if label and job.body["metadata"]["labels"].get(jobs.ROUND) != label]:
            self._delete(job, "the round is over")
        for name, size in demand.sizes.items():
            its = [job for job in self._jobs if job.pods.name == name]
            if not waiting.get(name) or self.hopeless(name):
                continue
            free = sum(job.free - sum(m.name in demand.silent for m in job.members) for job in its)
            held = math.ceil((open_.get(name, 0) - waiting.get(name, 0)) / self._room)
            lack = min(size - free, math.ceil(waiting.get(name, 0) / self._room) - max(0, free - held))
            if lack <= 0:
                continue
            grows = next((job for job in its if label is None and len(job.members) + lack <= self._objects.most), None)
            if grows is None:
                made = self._objects.make(self._classes[name], lack, label, demand.memory.get(name))
                with self._lock:
                    self._jobs.append(made)
            else:
                members = self._objects.grow(grows, lack)
                with self._lock:
                    grows.members = members
            with self._lock:
                self._comes(self._seen.setdefault(name, Seen(0.0)))
        self._give_way(open_, waiting)
        now = time.monotonic()
        for job in self._jobs:
            if now - job.written > RENEW_S:
                self._objects.write_secret(job)

    def _delete(self, job: Job, why: str) -> None:
        self._objects.delete(job)
        with self._lock:
            self._forget(job, why)

    def _give_way(self, open_: Mapping[str, int], waiting: Mapping[str, int]) -> None:
        """Delete the Job of a class without assignments if another class waits for room and has no running pod."""
        idle = [job for job in self._jobs if not open_.get(job.pods.name)]
        queues = [
            job.pods.name
            for job in self._jobs
            if waiting.get(job.pods.name) and job.queued and not any(s.started and not s.over for s in job.states)
        ]
        now = time.monotonic()
        if not self._shares or not idle or not queues or now - self._gave < YIELD_S:
            return
        self._gave = now
        job = max(idle, key=lambda job: len(job.members))
        self._delete(job, f"its pods have no assignments, and pods of {queues[0]} wait for room")


def _text(reasons: Counter[str]) -> str:
    return "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3))
