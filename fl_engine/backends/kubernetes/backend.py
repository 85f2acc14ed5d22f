"""Clients as pods: one Indexed Job per round and device tier.

Orders go into the run's store, a Secret tells a Job's pods which orders are theirs, and updates come back through the
store. An update in the store is an answer, whatever the Job's status says. A coordinator that starts again finds the
round's Jobs by their labels and waits for them; an annotation of each Job names its clients. A client that is asked
again, because its pod failed or its node was lost, gets a later Job, and its first valid answer counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from fl_engine.backends.kubernetes import jobs, waiting
from fl_engine.backends.kubernetes.cluster import Cluster, Resource
from fl_engine.backends.kubernetes.ground import DATA_FOLDER, RENEW_S, Ground
from fl_engine.backends.kubernetes.jobs import Group
from fl_engine.backends.kubernetes.quorum import quorum_of, too_few, unanswered
from fl_engine.backends.kubernetes.settings import GRACE_S, KubernetesConfig, NodePool
from fl_engine.backends.kubernetes.waiting import Live
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, ConfigError, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan
from fl_engine.exchange.assigning import assignment, of_the_run, uploads
from fl_engine.exchange.assignment import URLS
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import canonical, sha256
from fl_engine.training.memory import Peaks, needed

log = logging.getLogger("flexfleet")

SAY_EVERY_S = 30.0
EVENTS_EVERY_S = 2.0
"""Seconds between two readings of the events that say why pods are missing."""
GONE_S = 60.0
"""Seconds that the pods of Jobs that were given up may take to end."""
PHASES = ("upload", "create", "first_answer", "others", "tidy")
"""Writing the orders, making Jobs, waiting for the first answer and for the others, deleting what is done."""
LOST: Literal["pod"] = "pod"
"""The stage of the failure of a client whose pod failed; such a client may be asked again."""


@dataclass
class _Round:
    """A round while it runs."""

    plan: RoundPlan
    names: Mapping[int, list[str]]
    """By client, the keys of its order in the store."""
    open_: set[int]
    """Clients that have not answered."""
    live: list[Live] = field(default_factory=list)
    attempt: int = 0
    """The attempt of the next Jobs: their names end with it."""
    told: dict[str, float] = field(default_factory=dict)
    """By Job: when its Secret was written, if this coordinator has."""
    moved: float = 0.0
    """When a pod last started or ended."""
    nodes: Counter[int] = field(default_factory=Counter)
    """By client: how many of its nodes were lost."""
    said: set[tuple[str, str]] = field(default_factory=set)
    """Tiers, and the kinds of reasons that were logged for them."""

    @property
    def awaited(self) -> set[int]:
        return {client for job in self.live for client in job.clients}

    def watch(self, job: Live) -> None:
        job.clients = {client: index for client, index in job.clients.items() if client in self.open_}
        for other in self.live:
            other.clients = {c: i for c, i in other.clients.items() if c not in job.clients}
        self.live.append(job)

    def heard_from(self, client: int) -> None:
        for job in self.live:
            job.clients.pop(client, None)


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
        self._ground, self._options, self._cluster = ground, ground.options, ground.cluster
        self._run, self._template, self._verb = ground.run, ground.template, ground.verb
        self._fleet = fleet
        self._mailbox = mailbox
        self._memory, self._code, self._site_sums = memory, code, dict(site_sums)
        self._site = sha256(canonical(self._site_sums))
        self._should_stop = should_stop
        self._looked = False
        """Whether pods of this run that stay, as it had them with lifetime=run, have been looked for."""
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
            self._tidy(plan, set())
            return
        names = self._mailbox.put_orders(plan)
        quorum = quorum_of(self._mailbox, plan, self._options.quorum)
        answers, updates = quorum.before, plan.adopted
        lost: dict[int, ClientFailure] = {}
        self._enter("create")
        r = _Round(plan, names, {o.client for o in plan.orders}, moved=time.monotonic())
        self._adopt(r)
        for attempt in range(self._options.attempts):
            if updates >= quorum.wanted:
                break
            if attempt:
                self._enter("create")
                there = self._cluster.select("jobs", self._labels(plan))
                self._withdraw(r, {job["metadata"]["name"] for job in there if jobs.ended(job) is None})
                r.live = []
            self._launch(r, r.open_ - r.awaited)
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
        self._tidy(plan, waiting.stuck(r.live) if stops else set(), bool(explains))
        if stops:
            raise Stopped(
                f"{too_few(plan, answers, quorum, lost)}. To look at what failed: kubectl -n {self._options.namespace} "
                f"describe jobs,pods -l {jobs.RUN}={self._run},{jobs.ROUND}={plan.label}"
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

    # --------------------------------------------------------------------------------------------- Jobs
    def _labels(self, plan: RoundPlan) -> dict[str, str]:
        return {jobs.RUN: self._run, jobs.ROUND: plan.label}

    def _adopt(self, r: _Round) -> None:
        """Watches Jobs of this round that an earlier coordinator left and that still run. Those that were made with
        other settings are deleted: what is resumed may have been mended, and their pods would refuse what they are told
        of the run now."""
        if not self._looked:
            for job in self._cluster.select("jobs", {jobs.RUN: self._run, jobs.LIFETIME: "run"}):
                self._cluster.delete("jobs", job["metadata"]["name"])
            self._looked = True
        settings = {jobs.SETTINGS: jobs.settings_sum(self._template, self._options), jobs.SITE: self._site}
        other = set()
        for job in sorted(self._cluster.select("jobs", self._labels(r.plan)), key=jobs.attempt_of):
            r.attempt = jobs.attempt_of(job) + 1
            name, clients = job["metadata"]["name"], {client for pod in jobs.pods_of(job) for client in pod}
            if job["metadata"].get("deletionTimestamp") or jobs.ended(job) is not None:
                continue
            if not settings.items() <= job["metadata"]["annotations"].items():
                log.info("round %d: the Job %s was made with other settings: deleted", r.plan.round + 1, name)
                other.add(name)
            elif clients & r.open_:
                missing = self._cluster.get("secrets", name) is None  # a coordinator was killed before it was made
                if missing or jobs.suspended(job):
                    if not clients <= r.open_:  # the orders of clients that have answered are gone
                        other.add(name)
                        continue
                    self._tell(r, job)
                log.info("round %d: waiting for the Job %s that is there already", r.plan.round + 1, name)
                r.watch(self._live(job))
        if r.live:
            events = self._ground.refusals()
            for adopted in r.live:
                waiting.forget_refusals(adopted, events)
        self._withdraw(r, other)

    def _live(self, job: Resource) -> Live:
        return waiting.live(job, time.monotonic(), self._options.deadline_s + GRACE_S)

    def _launch(self, r: _Round, clients: set[int]) -> None:
        orders = [o for o in r.plan.orders if o.client in clients]
        owner = self._ground.owner() if orders else {}
        made = []
        for tier in jobs.groups(orders, self._fleet, self._options):
            told, common = self._told(r.plan, tier, r.names)
            made += [(group, texts, common) for group, texts in jobs.parts(tier, told, common)]
        at_once = jobs.shares([len(group.pods) for group, _, _ in made], self._options.parallelism)
        for (group, texts, common), most in zip(made, at_once, strict=True):
            o, memory = self._options, self._memory_of(group, r.plan)
            body = jobs.job(
                self._template, o, self._run, r.plan.label, group, r.attempt, owner, DATA_FOLDER,
                memory=memory, site=self._site,
            )  # fmt: skip
            body["spec"]["parallelism"] = most
            job = self._ground.create_job(body, self._labels(r.plan))
            self._cluster.create("secrets", jobs.secret(job, texts, common))
            r.told[job["metadata"]["name"]] = time.monotonic()
            r.watch(self._live(job))
        r.attempt += bool(made)

    def _tell(self, r: _Round, job: Resource) -> None:
        """Writes the Secret for the pods of a Job that is there already, in place of one with older URLs."""
        pods, name = tuple(tuple(clients) for clients in jobs.pods_of(job)), job["metadata"]["name"]
        secret = jobs.secret(job, *self._told(r.plan, Group(self._fleet[pods[0][0]].tier, pods, 0), r.names))
        self._cluster.delete("secrets", name)
        self._cluster.create("secrets", secret)
        r.told[name] = time.monotonic()

    def _renew(self, r: _Round, found: Mapping[str, Resource], now: float) -> None:
        """While a Job is suspended, writes its Secret anew: when it is admitted, its URLs last until its deadline."""
        every = min(RENEW_S, self._options.pending_s)
        for job in r.live:
            there = found.get(job.name)
            if there is None or not (job.suspended and job.clients) or now - r.told.get(job.name, -math.inf) <= every:
                continue
            # An earlier coordinator's Job may have clients that have answered: their orders are gone.
            if all(client in r.names for pod in jobs.pods_of(there) for client in pod):
                self._tell(r, there)

    def _withdraw(self, r: _Round, names: set[str]) -> None:
        """Deletes these Jobs and waits until their pods are gone, so that others do not queue behind them. A pod on a
        lost node takes no room."""
        for name in sorted(names):
            self._cluster.delete("jobs", name)
        until = time.monotonic() + GONE_S
        while names:
            self._check_stop()
            pods = self._cluster.select("pods", self._labels(r.plan))
            left = [s for name in names for s in jobs.newest(pods, name) if not (s.over or s.unreachable)]
            if not left:
                return
            if time.monotonic() > until:
                log.warning("round %d: %d pods do not go; going on", r.plan.round + 1, len(left))
                return
            time.sleep(self._options.poll_s)

    def _memory_of(self, group: Group, plan: RoundPlan) -> str | None:
        """Of a pod of this Job, as Kubernetes writes quantities; None: what the pool says."""
        if self._options.pools.get(group.tier, NodePool()).memory != "auto":
            return None
        if self._memory is None:
            raise ConfigError("memory=auto needs what training takes, which was not measured")
        peaks, level_of = self._memory, {client: order.level for client, order in plan.order_of.items()}
        most = max(needed(peaks, [level_of[client] for client in pod]) for pod in group.pods)
        return f"{math.ceil(most / 2**20)}Mi"

    def _told(self, plan: RoundPlan, group: Group, names: Mapping[int, list[str]]) -> tuple[list[str], str]:
        """For each pod its assignment; and what all of them may read."""
        mailbox, options = self._mailbox, self._options
        key, store = mailbox.key, mailbox.store
        assert key is not None
        device = options.pools.get(group.tier, NodePool()).torch_device
        told = []
        for clients in group.pods:
            orders = [plan.order_of[client] for client in clients]
            told.append(assignment(mailbox, orders, key, options, self._site_sums, self._code, self._memory, device))
        if self._verb is None:
            ambient = {"store": store.uri()}
            return [each.model_copy(update=ambient).model_dump_json() for each in told], "{}"
        assert isinstance(store, S3Store)
        seconds = options.deadline_s + options.pending_s + GRACE_S

        def urls(keys: Iterable[str]) -> dict[str, str]:
            return {k: store.presign(k, seconds, options.endpoint) for k in sorted(keys)}

        reads = [{k for client in each.clients for k in names[client]} for each in told]
        same = set.intersection(*reads)
        texts = []
        for each, own in zip(told, reads, strict=True):
            orders = [plan.order_of[client] for client in each.clients]
            writes = uploads(mailbox, orders, self._verb, seconds, options)
            texts.append(each.model_copy(update={"reads": urls(own - same), "writes": writes}).model_dump_json())
        return texts, URLS.dump_json(urls(same | set(of_the_run(mailbox, self._code)))).decode()

    # ------------------------------------------------------------------------------------------- waiting
    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped(ON_REQUEST)

    def _collect(self, r: _Round) -> Iterator[Outcome]:
        """Answers as they arrive, and a failure for each client whose pod will not answer any more."""
        said = looked = time.monotonic()
        answered = self.phases["others"] > 0
        while r.awaited:
            self._enter("others" if answered else "first_answer")
            self._check_stop()
            found = {job["metadata"]["name"]: job for job in self._cluster.select("jobs", self._labels(r.plan))}
            pods = self._cluster.select("pods", self._labels(r.plan))
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
            self._renew(r, found, now)
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
                self._launch(r, again)
            elif r.awaited:
                time.sleep(self._options.poll_s)

    def _say_new(self, r: _Round) -> None:
        """Logs what a tier's pods wait for, or why they failed, once for each kind of reason."""
        for tier, counts in waiting.reasons(r.live).items():
            new = {waiting.kind(reason) for reason in counts} - {kind for said, kind in r.said if said == tier}
            if new:
                log.warning("round %d: tier %s: %s", r.plan.round + 1, tier, waiting.told(counts, new))
                r.said |= {(tier, kind) for kind in new}

    def _say(self, r: _Round) -> None:
        """Logs what each tier waits for."""
        reasons = waiting.reasons(r.live)
        for tier, (pods, idle) in waiting.waiting_pods(r.live).items():
            why = f": {waiting.told(reasons[tier])}" if reasons[tier] else ""
            log.info(
                "round %d: tier %s waits for %d pods, %d have not started%s", r.plan.round + 1, tier, pods, idle, why
            )

    def _tidy(self, plan: RoundPlan, stuck: set[str], failed: bool = False) -> None:
        """Deletes the round's Jobs, whose Secrets go with them; but, until their TTL, those in `stuck`, and with
        `failed` those that have failed, to be looked at."""
        for job in self._cluster.select("jobs", self._labels(plan)):
            name, over = job["metadata"]["name"], jobs.ended(job)
            if failed and over not in (None, "Complete"):
                self._cluster.delete("secrets", name)
            elif over is not None or name not in stuck:
                self._cluster.delete("jobs", name)
