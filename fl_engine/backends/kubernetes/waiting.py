"""A round's Jobs while the coordinator waits for them: the state of their pods, and which clients are given up and why.

Nothing here asks the cluster: the caller gives Jobs, pods, events, and the time (seconds of a monotonic clock).

A pod that has not started is either stuck (no node matches, the image cannot be pulled) or queues: for room on a node,
for its namespace's quota, or for its turn in its Job. A stuck pod is given up after `pending_s`. A pod that queues is
given up when no pod of the round has started or ended for `pending_s`: then nothing moves. For a pod that should come
after one that failed, the same holds with the longest that Kubernetes lets it wait on top of `pending_s`.

All pods of a suspended Job queue. Its queue has not admitted it, or has stopped it for a more important one: then its
pods were ended, which is no failure of theirs, and come anew when it is admitted.

A lost node sends no status any more, so its pods' status stands still, and their Job starts no other pods. One sees it
in one of two ways: the node's controller calls a pod not ready whose containers were ready, or the pod is being deleted
and nobody confirms it. Where all pods that a Job may run at a time are on lost nodes, no other index gets its turn.

Webhooks may put other containers into a pod, as a service mesh does. It is the client's that starts and ends. If
another one never ends, neither does the pod, and its Job starts no other one: such a client is given up after a minute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fl_engine.backends.kubernetes import jobs, status
from fl_engine.backends.kubernetes.cluster import QUOTA
from fl_engine.backends.kubernetes.jobs import Resource
from fl_engine.backends.kubernetes.status import PodState
from fl_engine.core.errors import printable

LOST_NODES = 3
"""How often in a round a client is asked again because its node was lost; with pods that stay, because the same pod was
ended while it held the order."""
TERMINATING_S = 60.0
"""Seconds after its grace period from which on a pod that is still there counts as lost with its node; and those that
a pod may go on after its client has ended."""
REFUSED_FOR_GOOD = re.compile(
    r"violates PodSecurity|(minimum|maximum) \S+ usage per |max limit to request ratio per "
    r"|failed quota: .*must specify |creating: Pod \S+ is invalid: "
)
"""What events say of pods that will never start, however long one waits: Pod Security, a LimitRange or a quota on what
the pod leaves out refuses them, or they request more than the limits that were put into them. A full quota is none of
these."""
SUSPENDED = "the Job is suspended: its queue does not admit it"
BACK_OFF_S, LONGEST_BACK_OFF_S = 10.0, 600.0
"""Seconds after which a Job replaces the first pod of an index that fails, twice as many after each further one; and
the most (Kubernetes' Job controller)."""


@dataclass
class Live:
    """A Job that the coordinator waits for, and the last known state of each of its pods."""

    name: str
    uid: str
    tier: str
    pods: list[list[int]]
    """Clients by index."""
    wanted: str
    """The resources that its pods ask a node for."""
    at_once: int
    """How many pods it runs at a time: a queue may admit it with fewer than it asked for."""
    back_off: float
    """The most seconds that it waits before it replaces a pod that has failed."""
    lasts: float
    """Seconds after which it is given up, from when it was made or admitted."""
    until: float
    suspended: bool
    clients: dict[int, int]
    """Clients that have not answered, with their index; a client that is asked again belongs to the later Job."""
    since: dict[int, float]
    """By index whose pod has not started: since when it waits for its present reason."""
    states: dict[int, PodState] = field(default_factory=dict)
    ending: dict[str, float] = field(default_factory=dict)
    """By uid of a pod that is being deleted: when that was first seen."""
    fell: dict[str, float] = field(default_factory=dict)
    """By uid of the last pod of an index that has failed, or whose client has ended: when that was first seen. The pod
    may be gone."""
    refused: str = ""
    """Why pods are not created, as the last event says; empty as long as none is missing."""
    refused_at: str = ""
    """The time of that event."""
    old: str | None = None
    """Events up to this time do not count, since what they say may have been mended before this Job was waited for;
    None: all do."""

    def lacks_pods(self) -> bool:
        """Whether a pod is missing that should be there."""
        if self.suspended:
            return False
        here = sum(not state.over for state in self.states.values())
        wanted = {index for index in self.clients.values() if index in self.states}
        failed = any(self.states[index].phase == "Failed" for index in wanted)
        return (failed or len(self.states) < len(self.pods)) and here < self.at_once

    def queues(self, index: int) -> bool:
        if index in self.states:
            return self.states[index].queued
        return not self.lacks_pods() or QUOTA in self.refused

    def reason(self, index: int) -> str:
        """Why the index's pod failed, or what it waits for; empty: nothing to report."""
        state = self.states.get(index)
        if state is None:
            return SUSPENDED if self.suspended else self._refusal()
        asks = f" (the pod asks for {self.wanted})" if state.reason.startswith("Unschedulable") else ""
        return state.reason + asks

    def _refusal(self) -> str:
        return f"no pod was made: {self.refused}" if self.refused and self.lacks_pods() else ""

    def successor(self, index: int) -> str:
        """Why no pod was made after the index's one that failed; empty: nothing is known."""
        refusal = self._refusal()
        return f"{refusal}, after one that failed: {self.reason(index)}" if refusal else ""


def live(job: Resource, now: float, lasts: float) -> Live:
    """Before the first state of its pods is known."""
    meta, pods = job["metadata"], jobs.pods_of(job)
    return Live(
        name=meta["name"],
        uid=meta["uid"],
        tier=meta["labels"].get(jobs.TIER, ""),
        pods=pods,
        wanted=jobs.wanted(job),
        at_once=job["spec"]["parallelism"],
        back_off=min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** min(10, _retries(job["spec"]))),
        lasts=lasts,
        until=now + lasts,
        suspended=status.suspended(job),
        clients={client: index for index, pod in enumerate(pods) for client in pod},
        since=dict.fromkeys(range(len(pods)), now),
    )


def _retries(spec: Resource) -> int:
    """After how many failures a Job gives up an index, or itself: six if it does not say so."""
    limits = {"backoffLimit": 6, **spec}
    return int(limits.get("backoffLimitPerIndex", limits["backoffLimit"]))


def hear(job: Live, found: Resource | None, pods: Iterable[Resource], now: float) -> set[int]:
    """Records the state of the Job and of its pods; gives the indices of those that have started or ended since the
    last time. `found`: the Job as it is, None where it is gone."""
    moved = set[int]()
    queued = {index for index in job.since if job.queues(index)}
    ending, here = {}, status.newest(pods, job.name)
    failed = set[int]() if found is None else status.failed_indexes(found)
    if found is not None:
        job.suspended, job.at_once = status.suspended(found), found["spec"]["parallelism"]
    if job.suspended:
        job.until = now + job.lasts

    def over(state: PodState) -> bool:
        """Whether it stays so. Of a suspended Job other pods come but after those that are done."""
        return state.over if not job.suspended else state.phase == "Succeeded" or state.index in failed

    if job.suspended:
        here = [state for state in here if over(state)]
    for index in [i for i, state in job.states.items() if not over(state) and i not in {s.index for s in here}]:
        # Its pod is gone, and no status said that it ended.
        del job.states[index]
        job.since[index] = now
        moved.add(index)
    for state in here:
        before = job.states.get(state.index)
        if (state.started, state.over) != ((before.started, before.over) if before else (False, False)):
            moved.add(state.index)
        job.states[state.index] = state
        if state.ends is not None:
            ending[state.uid] = job.ending.get(state.uid, now)
        if state.started or state.phase != "Pending":
            job.since.pop(state.index, None)
        elif state.index not in job.since:
            job.since[state.index] = now  # a new pod, since the one before it failed
    job.ending = ending
    job.fell = {s.uid: job.fell.get(s.uid, now) for s in job.states.values() if s.phase == "Failed" or s.left}
    if job.refused and not job.lacks_pods():
        job.refused, job.old = "", job.refused_at  # an event stays for an hour
    for index in queued & job.since.keys():
        if not job.queues(index):  # it has come to its turn, and now something else keeps it from starting
            job.since[index] = now
    return moved


def hear_refusals(job: Live, events: Iterable[Resource]) -> None:
    """Records why no pods are created."""
    last = max(_events_of(job, events), key=_time, default=None)
    if last is not None and (job.old is None or _time(last) > job.old):
        job.refused, job.refused_at = printable(last.get("message") or "")[:500], _time(last)


def forget_refusals(job: Live, events: Iterable[Resource]) -> None:
    """Forgets the events so far: only later ones count."""
    job.old = max(map(_time, _events_of(job, events)), default=None)


def _events_of(job: Live, events: Iterable[Resource]) -> list[Resource]:
    return [event for event in events if event["involvedObject"].get("uid") == job.uid]


def _time(event: Resource) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or ""


class Loss(NamedTuple):
    """A client that will not answer through this Job."""

    reason: str
    node: bool
    """Its node is lost: the client can be asked again on another node."""


def lost(job: Live, found: Resource | None, now: float, moved: float, pending_s: float) -> dict[int, Loss]:
    """The clients that are given up. `found`: the Job as it is, None where it is gone; `moved`: when a pod of the round
    last started or ended."""
    over = "the Job was deleted" if found is None else status.ended(found)
    failed = set() if found is None else status.failed_indexes(found)
    if over is None and now > job.until:
        over = "DeadlineExceeded"
    given_up: dict[int, Loss] = {}
    for client, index in job.clients.items():
        loss = _loss(job, index, over, index in failed, now, moved, pending_s)
        if loss is not None:
            given_up[client] = Loss(f"{job.tier}: {loss.reason}", loss.node)
    return given_up


def _loss(
    job: Live, index: int, over: str | None, failed: bool, now: float, moved: float, pending_s: float
) -> Loss | None:
    reason, state = job.reason(index), job.states.get(index)
    if over is not None and over != "Complete":
        return Loss(f"{over}{f'; {reason}' if reason else ''}", False)
    if over == "Complete":
        return Loss(reason or "the pod ended well, but left no update", False)
    if failed:
        return Loss(reason or "the pod failed", False)
    if silent := _silent(job, index, now):
        return Loss(silent, True)
    if state is None and sum(bool(_silent(job, other, now)) for other in job.states) >= job.at_once:
        return Loss("the pods before its own are on lost nodes", True)
    if state is not None and state.phase == "Failed":
        why = job.successor(index)
        if REFUSED_FOR_GOOD.search(why):
            return Loss(why, False)
        since, most = job.fell[state.uid], job.back_off + pending_s
        if now - (max(since, moved) if QUOTA in why or not job.lacks_pods() else since) > most:
            return Loss(why or f"no pod was made in {most:g} s after one that failed: {reason}", False)
        return None
    if state is not None and state.left and not state.over and now - job.fell[state.uid] > TERMINATING_S:
        return Loss(f"{reason or 'its client left no update'}; another container of its pod does not end", False)
    waits = job.since.get(index)
    if waits is None:
        return None
    if state is None and REFUSED_FOR_GOOD.search(job.refused):
        return Loss(reason, False)
    if now - (max(waits, moved) if job.queues(index) else waits) > pending_s:
        return Loss(f"not started after {pending_s:g} s: {reason or _unexplained(state)}", False)
    return None


def _unexplained(state: PodState | None) -> str:
    """What is known of a pod that has not started where neither its status nor an event says why."""
    if state is None:
        return "no pod was made, and no event says why"
    if not state.node:
        return "no node took it"
    return (
        f"the node {state.node} has not made its container: the image may be slow to pull, or a volume, a Secret or a "
        "folder may be missing (kubectl describe pod)"
    )


def _silent(job: Live, index: int, now: float) -> str:
    """Says that the index's pod is on a lost node; empty where it is not."""
    state = job.states.get(index)
    if state is None:
        return ""
    if state.unreachable:
        return "its node does not answer any more"
    if state.ends is not None and not state.over and now - job.ending[state.uid] > state.ends + TERMINATING_S:
        reason = job.reason(index)
        return f"its node is lost: the pod does not end{f' ({reason})' if reason else ''}"
    return ""


def kind(reason: str) -> str:
    """A reason without the parts that differ from pod to pod."""
    return reason.partition(":")[0]


def reasons(live: Iterable[Live]) -> dict[str, Counter[str]]:
    """By tier: the reasons of the pods that it waits for, and how many have each; of similar reasons, the first."""
    found: dict[str, Counter[str]] = {}
    for job in live:
        tier = found.setdefault(job.tier, Counter())
        named = {kind(reason): reason for reason in reversed(tier)}
        for index in sorted(set(job.clients.values())):
            if reason := job.reason(index):
                tier[named.setdefault(kind(reason), reason)] += 1
    return found


def told(counts: Mapping[str, int], kinds: Collection[str] | None = None) -> str:
    """The three most frequent reasons; with `kinds`, only those of these kinds."""
    chosen = [(reason, n) for reason, n in counts.items() if kinds is None or kind(reason) in kinds]
    return "; ".join(f"{n} x {reason}" for reason, n in sorted(chosen, key=lambda pair: -pair[1])[:3])


def waiting_pods(live: Iterable[Live]) -> dict[str, tuple[int, int]]:
    """By tier: how many pods have not answered, and how many of them have not started."""
    found: dict[str, tuple[int, int]] = {}
    for job in live:
        left = set(job.clients.values())
        pods, idle = found.get(job.tier, (0, 0))
        found[job.tier] = pods + len(left), idle + len(left & job.since.keys())
    return {tier: counts for tier, counts in found.items() if counts[0]}


def stuck(live: Sequence[Live]) -> set[str]:
    """Jobs with pods that never started: what `kubectl describe` says of them explains it."""
    return {job.name for job in live if job.since}
