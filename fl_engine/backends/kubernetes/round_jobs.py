"""The Jobs of a round, as they stand in the cluster: found, made, told, withdrawn and deleted.

A coordinator that starts again finds them by their labels; an annotation of each Job names its clients, and its Secret
tells each of its pods which orders are its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from fl_engine.backends.kubernetes import jobs, status, waiting
from fl_engine.backends.kubernetes.cluster import Resource
from fl_engine.backends.kubernetes.ground import DATA_FOLDER, RENEW_S, Ground
from fl_engine.backends.kubernetes.jobs import Group
from fl_engine.backends.kubernetes.open_round import OpenRound
from fl_engine.backends.kubernetes.settings import GRACE_S, NodePool
from fl_engine.backends.kubernetes.waiting import Live
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Device, RoundPlan
from fl_engine.exchange.assigning import assignment, of_the_run, uploads
from fl_engine.exchange.assignment import URLS
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import canonical, sha256
from fl_engine.training.memory import Peaks, needed

log = logging.getLogger("flexfleet")

GONE_S = 60.0
"""Seconds that the pods of Jobs that were given up may take to end."""


class RoundJobs:
    """Of one run. All else as for `Kubernetes`; `check_stop` raises Stopped where the run is to stop."""

    def __init__(
        self,
        ground: Ground,
        fleet: Sequence[Device],
        mailbox: Mailbox,
        memory: Peaks | None,
        code: str | None,
        site_sums: Mapping[str, str],
        check_stop: Callable[[], None],
    ) -> None:
        self._ground, self._options, self._cluster = ground, ground.options, ground.cluster
        self._run, self._template, self._verb = ground.run, ground.template, ground.verb
        self._fleet, self._mailbox, self._memory, self._code = fleet, mailbox, memory, code
        self._site_sums, self._site = dict(site_sums), sha256(canonical(dict(site_sums)))
        self._check_stop = check_stop
        self._looked = False
        """Whether pods of this run that stay, as it had them with lifetime=run, have been looked for."""

    def labels(self, plan: RoundPlan) -> dict[str, str]:
        return {jobs.RUN: self._run, jobs.ROUND: plan.label}

    def adopt(self, r: OpenRound) -> None:
        """Watches Jobs of this round that an earlier coordinator left and that still run. Those that were made with
        other settings are deleted: what is resumed may have been mended, and their pods would refuse what they are told
        of the run now."""
        if not self._looked:
            for job in self._cluster.select("jobs", {jobs.RUN: self._run, jobs.LIFETIME: "run"}):
                self._cluster.delete("jobs", job["metadata"]["name"])
            self._looked = True
        settings = {jobs.SETTINGS: jobs.settings_sum(self._template, self._options), jobs.SITE: self._site}
        other = set()
        for job in sorted(self._cluster.select("jobs", self.labels(r.plan)), key=jobs.attempt_of):
            r.attempt = jobs.attempt_of(job) + 1
            name, clients = job["metadata"]["name"], {client for pod in jobs.pods_of(job) for client in pod}
            if job["metadata"].get("deletionTimestamp") or status.ended(job) is not None:
                continue
            if not settings.items() <= job["metadata"]["annotations"].items():
                log.info("round %d: the Job %s was made with other settings: deleted", r.plan.round + 1, name)
                other.add(name)
            elif clients & r.open_:
                missing = self._cluster.get("secrets", name) is None  # a coordinator was killed before it was made
                if missing or status.suspended(job):
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
        self.withdraw(r, other)

    def _live(self, job: Resource) -> Live:
        return waiting.live(job, time.monotonic(), self._options.deadline_s + GRACE_S)

    def launch(self, r: OpenRound, clients: set[int]) -> None:
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
            job = self._ground.create_job(body, self.labels(r.plan))
            self._cluster.create("secrets", jobs.secret(job, texts, common))
            r.told[job["metadata"]["name"]] = time.monotonic()
            r.watch(self._live(job))
        r.attempt += bool(made)

    def _tell(self, r: OpenRound, job: Resource) -> None:
        """Writes the Secret for the pods of a Job that is there already, in place of one with older URLs."""
        pods, name = tuple(tuple(clients) for clients in jobs.pods_of(job)), job["metadata"]["name"]
        secret = jobs.secret(job, *self._told(r.plan, Group(self._fleet[pods[0][0]].tier, pods, 0), r.names))
        self._cluster.delete("secrets", name)
        self._cluster.create("secrets", secret)
        r.told[name] = time.monotonic()

    def renew(self, r: OpenRound, found: Mapping[str, Resource], now: float) -> None:
        """While a Job is suspended, writes its Secret anew: when it is admitted, its URLs last until its deadline."""
        every = min(RENEW_S, self._options.pending_s)
        for job in r.live:
            there = found.get(job.name)
            if there is None or not (job.suspended and job.clients) or now - r.told.get(job.name, -math.inf) <= every:
                continue
            # An earlier coordinator's Job may have clients that have answered: their orders are gone.
            if all(client in r.names for pod in jobs.pods_of(there) for client in pod):
                self._tell(r, there)

    def withdraw(self, r: OpenRound, names: set[str]) -> None:
        """Deletes these Jobs and waits until their pods are gone, so that others do not queue behind them. A pod on a
        lost node takes no room."""
        for name in sorted(names):
            self._cluster.delete("jobs", name)
        until = time.monotonic() + GONE_S
        while names:
            self._check_stop()
            pods = self._cluster.select("pods", self.labels(r.plan))
            left = [s for name in names for s in status.newest(pods, name) if not (s.over or s.unreachable)]
            if not left:
                return
            if time.monotonic() > until:
                log.warning("round %d: %d pods do not go; going on", r.plan.round + 1, len(left))
                return
            time.sleep(self._options.poll_s)

    def tidy(self, plan: RoundPlan, stuck: set[str], failed: bool = False) -> None:
        """Deletes the round's Jobs, whose Secrets go with them; but, until their TTL, those in `stuck`, and with
        `failed` those that have failed, to be looked at."""
        for job in self._cluster.select("jobs", self.labels(plan)):
            name, over = job["metadata"]["name"], status.ended(job)
            if failed and over not in (None, "Complete"):
                self._cluster.delete("secrets", name)
            elif over is not None or name not in stuck:
                self._cluster.delete("jobs", name)

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
