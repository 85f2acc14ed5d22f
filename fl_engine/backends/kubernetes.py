"""Clients as pods: one Indexed Job per round and device tier.

Orders go into the run's store, a Secret tells a Job's pods which are theirs, and updates come back through the store.
What lies there counts as answered, whatever a Job says. A coordinator that starts again finds the round's Jobs by their
labels and waits for them; which clients they are for is written on them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fl_engine import probe
from fl_engine.assignment import SITE_FILES, URLS, Assignment
from fl_engine.backends import jobs
from fl_engine.backends.cluster import Cluster, Resource
from fl_engine.backends.jobs import Group
from fl_engine.config import KubernetesConfig, NodePool
from fl_engine.errors import ConfigError, EnvironmentFailure, Stopped
from fl_engine.ledger import Ledger
from fl_engine.s3 import S3Store, Verb
from fl_engine.types import Algorithm, ClientFailure, ClientUpdate, Device, Outcome, RoundPlan
from fl_engine.updates import manifest_bytes, payload_bytes

log = logging.getLogger("flexfleet")

DATA_FOLDER = "/data"
GRACE_S = 30
"""A Job that outlives its deadline by so much is deleted from here."""
SAY_EVERY_S = 30.0
PHASES = ("upload", "create", "first_answer", "others", "tidy")
"""Writing the orders, making Jobs, waiting for the first answer and for the others, deleting what is done."""
LOST = "pod"
"""The stage at which a client fails whose pod does: it may be asked again."""


@dataclass
class _Live:
    """A Job that is being waited for, and what was last heard of each of its pods."""

    name: str
    tier: str
    pods: list[list[int]]
    until: float
    pending_since: dict[int, float]
    """Of those that have not started."""
    reasons: dict[int, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)


class Kubernetes:
    """`memory` is what `memory.training_peak` found, for observe=cgroup. The store must be one that pods reach: S3, or
    with access=ambient any that opens under the same name there."""

    durable = True

    def __init__(
        self,
        options: KubernetesConfig,
        run_id: str,
        fleet: Sequence[Device],
        ledger: Ledger,
        memory: tuple[int, int] | None = None,
        over_provision: float = 1.0,
        cluster: Cluster | None = None,
    ) -> None:
        if ledger.key is None:
            raise ConfigError("clients in pods sign their updates: the ledger needs a key")
        if options.access == "presigned" and not isinstance(ledger.store, S3Store):
            raise ConfigError(
                f"kubernetes.access=presigned hands out URLs of an S3 server, but the store is {ledger.store.uri()}: "
                "set run.remote=s3://bucket/prefix"
            )
        image = options.image or os.environ.get("FLEXFLEET_IMAGE")
        if not image:
            raise ConfigError("which image do clients run in? set kubernetes.image, or FLEXFLEET_IMAGE")
        self._options = options.model_copy(update={"image": image})
        self._fleet = fleet
        self._ledger = ledger
        self._memory = memory
        self._over_provision = over_provision
        self._cluster = cluster or Cluster(options.namespace)
        self._run = jobs.run_label(run_id, ledger.store.uri())
        self._template = jobs.template(options.template)
        self._verb: Verb | None = None
        if options.access == "presigned" and isinstance(ledger.store, S3Store):
            self._verb = probe.upload_verb(ledger.store)
        self._owner: Resource | None = None
        self.phases: dict[str, float] = {}

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Asks clients whose pods fail again, `attempts` times, as long as fewer than the quorum have answered; raises
        Stopped where they never do. With over_provision the others are called off once enough updates are there."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        if not plan.orders:
            return
        with self._timed("upload"):
            names = self._ledger.put_orders(plan)
        before = self._ledger.ordered(plan.round) - len(plan.orders)  # adopted from before a restart
        wanted = math.ceil((before + len(plan.orders)) / self._over_provision - 1e-9)
        enough = math.ceil(wanted * self._options.quorum - 1e-9)
        open_ = {o.client for o in plan.orders}
        answers, updates = before, plan.adopted
        lost: dict[int, ClientFailure] = {}
        live, first = self._adopt(plan)
        for attempt in range(first, first + self._options.attempts):
            if updates >= wanted:
                break
            covered = {client for job in live for pod in job.pods for client in pod}
            live += self._launch(plan, open_ - covered, names, attempt)
            for outcome in self._collect(plan, live, open_):
                if isinstance(outcome, ClientFailure) and outcome.stage == LOST:
                    lost[outcome.client] = outcome
                    continue
                open_.discard(outcome.client)
                answers += 1
                updates += isinstance(outcome, ClientUpdate)
                yield outcome
                if updates >= wanted:
                    break
            live = []
            if not open_ or answers >= enough:
                break
            log.warning("round %d, attempt %d: %d of %d have answered", plan.round + 1, attempt + 1, answers, wanted)
        with self._timed("tidy"):
            self._tidy(plan, keep=bool(lost.keys() & open_))
        if open_ and answers < enough:
            why = "; ".join(sorted({f.reason for f in lost.values()})[:5])
            raise Stopped(
                f"round {plan.round + 1}: {answers} of {wanted} clients have answered, {enough} are needed "
                f"(kubernetes.quorum): {why}. What arrived is kept: mend the cause, then resume with --resume"
            )
        for client in sorted(open_):
            late = ClientFailure(plan.round, client, "straggle", "the round had enough updates before this one")
            yield lost.get(client, late)
        log.info("round %d: %s", plan.round + 1, ", ".join(f"{name} {s:.1f} s" for name, s in self.phases.items()))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] += time.monotonic() - started

    def finish(self) -> None:
        """The run is over: everything of it in the cluster goes."""
        self._cluster.delete("configmaps", self._run)

    # --------------------------------------------------------------------------------------------- Jobs
    def _labels(self, plan: RoundPlan) -> dict[str, str]:
        return {jobs.RUN: self._run, jobs.ROUND: str(plan.round)}

    def _adopt(self, plan: RoundPlan) -> tuple[list[_Live], int]:
        """Jobs of this round that an earlier coordinator left and that still run; the number of the next attempt."""
        asked = {o.client for o in plan.orders}
        found, following = [], 0
        for job in self._cluster.select("jobs", self._labels(plan)):
            following = max(following, jobs.attempt_of(job) + 1)
            live = self._live(job)
            if job["metadata"].get("deletionTimestamp") or jobs.ended(job) is not None:
                continue
            if asked & {client for pod in live.pods for client in pod}:
                log.info("round %d: waiting for the Job %s that is there already", plan.round + 1, live.name)
                found.append(live)
        return found, following

    def _live(self, job: Resource) -> _Live:
        now, meta, pods = time.monotonic(), job["metadata"], jobs.pods_of(job)
        until = now + self._options.deadline_s + GRACE_S
        return _Live(meta["name"], meta["labels"].get(jobs.TIER, ""), pods, until, dict.fromkeys(range(len(pods)), now))

    def _launch(
        self, plan: RoundPlan, clients: set[int], names: Mapping[int, list[str]], attempt: int
    ) -> list[_Live]:
        started = time.monotonic()
        orders = [o for o in plan.orders if o.client in clients]
        owner = self._ensure_owner() if orders else {}
        made = []
        for tier in jobs.groups(orders, self._fleet, self._options):
            told, common = self._told(plan, tier, names)
            for group, texts in jobs.parts(tier, told, common):
                job = jobs.job(
                    self._template, self._options, self._run, plan.round, group, attempt, owner, DATA_FOLDER
                )
                secret = jobs.secret(job, texts, common)
                if self._cluster.create("secrets", secret) is None:  # left by a coordinator that was killed just then
                    self._cluster.replace("secrets", secret)
                self._cluster.create("jobs", job)
                made.append(self._live(job))
        self.phases["create"] += time.monotonic() - started
        return made

    def _ensure_owner(self) -> Resource:
        """A reference to the run's ConfigMap, which everything belongs to and goes with."""
        if self._owner is None:
            kept = {jobs.RUN: self._run, "app.kubernetes.io/part-of": "flexfleet"}
            body = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": self._run, "namespace": self._options.namespace, "labels": kept},
                "data": {"store": self._ledger.store.uri()},
            }
            found = self._cluster.create("configmaps", body) or self._cluster.get("configmaps", self._run)
            if found is None:
                raise EnvironmentFailure(f"the ConfigMap {self._run} is being deleted: wait a moment, then resume")
            uid = found["metadata"]["uid"]
            self._owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": self._run, "uid": uid}
        return self._owner

    def _told(self, plan: RoundPlan, group: Group, names: Mapping[int, list[str]]) -> tuple[list[str], str]:
        """For each pod its assignment; and what all of them may read."""
        orders = {o.client: o for o in plan.orders}
        key, store, o = self._ledger.key, self._ledger.store, self._options
        assert key is not None
        pool = o.pools.get(group.tier, NodePool())
        assignments = []
        for clients in group.pods:
            told = Assignment(
                round=plan.round,
                clients=clients,
                keys={client: key(orders[client]).hex() for client in clients},
                device=pool.torch_device,
                observe=o.observe,
                memory=self._memory,
                require_numerics=o.require_numerics,
            )
            assignments.append(told)
        if self._verb is None:
            ambient = {"store": store.uri()}
            return [told.model_copy(update=ambient).model_dump_json() for told in assignments], "{}"
        assert isinstance(store, S3Store)
        seconds = o.deadline_s + o.pending_s + GRACE_S

        def urls(keys: Iterable[str]) -> dict[str, str]:
            return {k: store.presign(k, "get", seconds, o.endpoint) for k in sorted(keys)}

        reads = [{k for client in told.clients for k in names[client]} for told in assignments]
        same = set.intersection(*reads)
        texts = []
        for told, own in zip(assignments, reads, strict=True):
            writes = {
                k: store.upload(k, most(orders[client]), seconds, self._verb, o.endpoint)
                for client in told.clients
                for k, most in zip(
                    self._ledger.outcome_keys(plan.round, client), (payload_bytes, manifest_bytes), strict=True
                )
            }
            texts.append(told.model_copy(update={"reads": urls(own - same), "writes": writes}).model_dump_json())
        return texts, URLS.dump_json(urls({*same, *(f"site/{name}" for name in SITE_FILES)})).decode()

    # ------------------------------------------------------------------------------------------- waiting
    def _collect(self, plan: RoundPlan, live: list[_Live], open_: set[int]) -> Iterator[Outcome]:
        """Answers as they arrive, and a failure for each client whose pod will not answer any more."""
        started = said = time.monotonic()
        first = True
        waiting = {client for job in live for pod in job.pods for client in pod} & open_
        while waiting:
            states = {job["metadata"]["name"]: job for job in self._cluster.select("jobs", self._labels(plan))}
            pods = self._cluster.select("pods", self._labels(plan))
            # Looked at after the Jobs: a pod writes its answer before its Job counts it.
            for client in sorted(self._ledger.answered(plan.round) & waiting):
                if first:
                    self.phases["first_answer"] += time.monotonic() - started
                    started, first = time.monotonic(), False
                waiting.discard(client)
                self.phases["others"] = 0.0 if first else time.monotonic() - started
                yield self._ledger.receive(plan, client)
            for job in live:
                self._heard(job, pods)
            # Before anything is given up, so that what it waited for is told.
            if waiting and time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                self._say(plan, live, waiting)
            for job in live:
                for client, reason in self._lost(job, states.get(job.name), waiting).items():
                    waiting.discard(client)
                    yield ClientFailure(plan.round, client, LOST, reason)
            if waiting:
                time.sleep(self._options.poll_s)

    def _heard(self, job: _Live, pods: Sequence[Resource]) -> None:
        now = time.monotonic()
        for state in jobs.newest(pods, job.name):
            job.seen.add(state.index)
            if state.phase == "Pending" and not state.started:
                job.pending_since.setdefault(state.index, now)
            else:
                job.pending_since.pop(state.index, None)
            if state.reason and job.reasons.get(state.index) != state.reason:
                job.reasons[state.index] = state.reason
                log.warning("%s, pod %d: %s", job.name, state.index, state.reason)

    def _lost(self, job: _Live, now: Resource | None, waiting: set[int]) -> Mapping[int, str]:
        """Clients of this Job that will not answer, and why."""
        over = "the Job was deleted" if now is None else jobs.ended(now)
        failed = set() if now is None else jobs.failed_indexes(now)
        if over is None and time.monotonic() > job.until:
            over = "DeadlineExceeded"
        found: dict[int, str] = {}
        for index, clients in enumerate(job.pods):
            reason = job.reasons.get(index, "")
            since = job.pending_since.get(index)
            if since is not None and time.monotonic() - since > self._options.pending_s:
                why = "no node took it" if index in job.seen else f"no pod was made: kubectl describe job {job.name}"
                reason = f"not started after {self._options.pending_s} s: {reason or why}"
            elif over is None and index not in failed:
                continue
            elif over == "Complete" and not reason:
                reason = "the pod ended well, but left no update"
            elif over is not None and over != "Complete":
                reason = f"{over}{f'; {reason}' if reason else ''}"
            found |= {client: f"{job.tier}: {reason or 'the pod failed'}" for client in clients if client in waiting}
        return found

    def _say(self, plan: RoundPlan, live: Sequence[_Live], waiting: set[int]) -> None:
        """Which tier waits for what."""
        for job in live:
            left = [i for i, clients in enumerate(job.pods) if waiting & set(clients)]
            if left:
                reasons = sorted({job.reasons[i] for i in left if i in job.reasons})[:3]
                stuck = sum(i in job.pending_since for i in left)
                why = f": {'; '.join(reasons)}" if reasons else ""
                log.info(
                    "round %d: tier %s waits for %d pods, %d have not started%s",
                    plan.round + 1, job.tier, len(left), stuck, why,
                )  # fmt: skip

    def _tidy(self, plan: RoundPlan, keep: bool) -> None:
        """Deletes the round's Jobs and Secrets; `keep` leaves those that failed to be looked at, until their TTL."""
        for job in self._cluster.select("jobs", self._labels(plan)):
            name = job["metadata"]["name"]
            self._cluster.delete("secrets", name)
            if not keep or jobs.ended(job) in (None, "Complete"):
                self._cluster.delete("jobs", name)

