"""Clients as pods: one Indexed Job per round and device tier.

Orders go into the run's store, a Secret tells a Job's pods which orders are theirs, and updates come back through the
store. An update in the store is an answer, whatever the Job's status says. A coordinator that starts again finds the
round's Jobs and waits for them. A client that is asked again, because its pod failed or its node was lost, gets a later
Job, and its first valid answer counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from fl_engine.backends.kubernetes import jobs, status, waiting
from fl_engine.backends.kubernetes.cluster import Cluster
from fl_engine.backends.kubernetes.ground import Ground
from fl_engine.backends.kubernetes.open_round import OpenRound
from fl_engine.backends.kubernetes.quorum import quorum_of, too_few, unanswered
from fl_engine.backends.kubernetes.round_jobs import RoundJobs
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")

SAY_EVERY_S = 30.0
EVENTS_EVERY_S = 2.0
"""Seconds between two readings of the events that say why pods are missing."""
PHASES = ("upload", "create", "first_answer", "others", "tidy")
"""Writing the orders, making Jobs, waiting for the first answer and for the others, deleting what is done."""
LOST: Literal["pod"] = "pod"
"""The stage of the failure of a client whose pod failed; such a client may be asked again."""


class Kubernetes:
    """`memory`: what training each level takes, for observe=cgroup and pools with memory=auto. `should_stop` is asked
    while pods are waited for.
    `code`: the sha256 of the wheel with one's own code, which is in the store. `site_sums`: see `Assignment.site`."""

    durable = True

    def __init__(
        self,
        options: KubernetesConfig,
        run_id: str,
        fleet: Sequence[Device],
        mailbox: Mailbox,
        memory: Peaks | None = None,
        cluster: Cluster | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        code: str | None = None,
        site_sums: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        ground = Ground(options, run_id, mailbox, cluster)
        self._ground, self._options, self._cluster, self._mailbox = ground, ground.options, ground.cluster, mailbox
        self._jobs = RoundJobs(ground, fleet, mailbox, memory, code, site_sums, self._check_stop)
        self._should_stop = should_stop
        self.phases: dict[str, float] = {}
        self._phase, self._entered = PHASES[0], 0.0

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Asks clients whose pods fail again, `attempts` times, as long as fewer than the quorum have answered; raises
        Stopped where they never do, and where `should_stop` says so. The others are called off once as many updates are
        there as the plan wants."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._phase, self._entered = PHASES[0], time.monotonic()
        for outcome in self._outcomes(plan):
            self._enter(self._phase)
            yield outcome
            self._entered = time.monotonic()
        self._enter(self._phase)
        log.info("round %d: %s", plan.round + 1, ", ".join(f"{name} {s:.1f} s" for name, s in self.phases.items()))

    def _enter(self, phase: str) -> None:
        """What passed since the last call belongs to the phase that it entered."""
        now = time.monotonic()
        self.phases[self._phase] += now - self._entered
        self._phase, self._entered = phase, now

    def _outcomes(self, plan: RoundPlan) -> Iterator[Outcome]:
        if not plan.orders:  # all answers were adopted; Jobs of an earlier coordinator may still be there
            self._enter("tidy")
            self._jobs.tidy(plan, set())
            return
        names = self._mailbox.put_orders(plan)
        quorum = quorum_of(self._mailbox, plan, self._options.quorum)
        answers, updates = quorum.before, plan.adopted
        lost: dict[int, ClientFailure] = {}
        self._enter("create")
        r = OpenRound(plan, names, {o.client for o in plan.orders}, moved=time.monotonic())
        self._jobs.adopt(r)
        for attempt in range(self._options.attempts):
            if updates >= quorum.wanted:
                break
            if attempt:
                self._enter("create")
                there = self._cluster.select("jobs", self._jobs.labels(plan))
                self._jobs.withdraw(r, {job["metadata"]["name"] for job in there if status.ended(job) is None})
                r.live = []
            self._jobs.launch(r, r.open_ - r.awaited)
            for outcome in self._collect(r):
                if isinstance(outcome, ClientFailure) and outcome.stage == LOST:
                    lost[outcome.client] = outcome
                    continue
                r.open_.discard(outcome.client)
                answers += 1
                updates += isinstance(outcome, ClientUpdate)
                yield outcome
                if updates >= quorum.wanted:
                    break
            if not r.open_ or answers >= quorum.enough:
                break
            said = "round %d, attempt %d: %d of %d have answered"
            log.warning(said, plan.round + 1, attempt + 1, answers, quorum.wanted)
        stops = bool(r.open_) and answers < quorum.enough
        self._enter("tidy")
        explains = lost.keys() & r.open_
        self._jobs.tidy(plan, waiting.stuck(r.live) if stops else set(), bool(explains))
        if stops:
            raise Stopped(
                f"{too_few(plan, answers, quorum, lost)}. To look at what failed: kubectl -n {self._options.namespace} "
                f"describe jobs,pods -l {jobs.RUN}={self._ground.run},{jobs.ROUND}={plan.label}"
            )
        yield from unanswered(plan, r.open_, lost)

    def finish(self) -> None:
        """Deletes everything of this run in the cluster, when the run is over."""
        self._ground.clear()

    def what_is_left(self) -> str:
        """The command that removes what a stopped run leaves in the cluster."""
        return (
            "pods that are under way go on by themselves, and --resume finds them. To remove what is left: "
            + self._ground.clearing
        )

    # ------------------------------------------------------------------------------------------- waiting
    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped(ON_REQUEST)

    def _collect(self, r: OpenRound) -> Iterator[Outcome]:
        """Answers as they arrive, and a failure for each client whose pod will not answer any more."""
        said = looked = time.monotonic()
        answered = self.phases["others"] > 0
        while r.awaited:
            self._enter("others" if answered else "first_answer")
            self._check_stop()
            found = {job["metadata"]["name"]: job for job in self._cluster.select("jobs", self._jobs.labels(r.plan))}
            pods = self._cluster.select("pods", self._jobs.labels(r.plan))
            # Read after the Jobs' status: a pod writes its answer before its Job counts it.
            heard = sorted(self._mailbox.answered(r.plan.round, r.plan.evaluates) & r.awaited)
            if heard:
                answered = True
                self._enter("others")
            for outcome in self._mailbox.received(r.plan, heard):
                r.heard_from(outcome.client)
                yield outcome
            now = time.monotonic()
            for job in r.live:
                if waiting.hear(job, found.get(job.name), pods, now):
                    r.moved = now
            self._jobs.renew(r, found, now)
            if now - looked > EVENTS_EVERY_S and any(job.clients and job.lacks_pods() for job in r.live):
                looked = now
                events = self._ground.refusals()
                for job in r.live:
                    waiting.hear_refusals(job, events)
            # Before any client is given up, so that the log says what its pod waited for.
            self._say_new(r)
            if now - said > SAY_EVERY_S:
                said = now
                self._say(r)
            again = set()
            if any(job.name not in found for job in r.live if job.clients):
                self._ground.forget_owner()
            for job in r.live:
                losses = waiting.lost(job, found.get(job.name), now, r.moved, self._options.pending_s)
                for client, loss in losses.items():
                    r.nodes[client] += loss.node
                    if loss.node and self._options.placement == "pool" and r.nodes[client] <= waiting.LOST_NODES:
                        log.warning("round %d, client %d: %s; asking again", r.plan.round + 1, client, loss.reason)
                        again.add(client)
                    else:
                        r.heard_from(client)
                        yield ClientFailure(r.plan.round, client, LOST, loss.reason)
            if again:
                self._enter("create")
                self._jobs.launch(r, again)
            elif r.awaited:
                time.sleep(self._options.poll_s)

    def _say_new(self, r: OpenRound) -> None:
        """Logs what a tier's pods wait for, or why they failed, once for each kind of reason."""
        for tier, counts in waiting.reasons(r.live).items():
            new = {waiting.kind(reason) for reason in counts} - {kind for said, kind in r.said if said == tier}
            if new:
                log.warning("round %d: tier %s: %s", r.plan.round + 1, tier, waiting.told(counts, new))
                r.said |= {(tier, kind) for kind in new}

    def _say(self, r: OpenRound) -> None:
        """Logs what each tier waits for."""
        reasons = waiting.reasons(r.live)
        for tier, (pods, idle) in waiting.waiting_pods(r.live).items():
            why = f": {waiting.told(reasons[tier])}" if reasons[tier] else ""
            log.info(
                "round %d: tier %s waits for %d pods, %d have not started%s", r.plan.round + 1, tier, pods, idle, why
            )
