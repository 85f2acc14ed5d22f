"""Leases: which worker gets which assignments of a round, what it is sent, and when its lease ends without a result."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import NamedTuple

from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import printable
from fl_engine.core.types import ClientFailure, RoundPlan, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import MOST_S, Assignment, Lease, site_files
from fl_engine.remote.provisioner import Lost, Provisioner
from fl_engine.remote.settings import AgentsConfig, KubernetesConfig
from fl_engine.remote.workers import Worker
from fl_engine.storage.code import store_key
from fl_engine.storage.s3 import S3Store
from fl_engine.training.memory import Peaks

UNTAKEN_S = 2 * MOST_S
"""The least seconds that an idle worker has to take a lease, because it polls every MOST_S seconds at most."""


@dataclass
class OpenRound:
    """A round whose assignments are leased to workers."""

    algorithm: Algorithm
    plan: RoundPlan
    names: Mapping[int, list[str]]
    """Map each client to the store keys of its assignment."""
    provisioner: Provisioner
    own: Mapping[str, int] | None
    """Map each device to its client, if devices hold their own data; None: they do not."""
    moved: float
    """When the last result arrived."""
    hopeful: float
    """When a worker was last at work."""
    open_: set[int] = field(default_factory=set)
    """Clients without a result."""
    waiting: deque[int] = field(default_factory=deque)
    """Clients whose assignment no worker holds."""
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of results by worker and pool."""
    lost: Counter[int] = field(default_factory=Counter)
    """Number of failed attempts by client."""
    tried: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Workers that have failed a client's assignment. They get it again only if no other worker is present."""
    killed: Counter[int] = field(default_factory=Counter)
    """Number of workers that died while they held only this client's assignment, mostly for lack of memory."""
    alone: set[int] = field(default_factory=set)
    """Clients whose assignment was held by a worker that failed. From then on each is leased alone."""
    gone: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often a worker was taken away from a client's assignment."""
    reported: float = 0.0
    """When the waiting assignments were last logged."""
    failed: dict[int, ClientFailure] = field(default_factory=dict)
    """Failures of clients that were given up."""

    def __post_init__(self) -> None:
        self.waiting = deque(order.client for order in self.plan.orders)
        self.open_ = set(self.waiting)
        self.reported = self.moved
        self.asked = Counter(map(self.provisioner.pool, self.waiting))

    def count(self, clients: Iterable[int]) -> Counter[str]:
        """Return the number of these clients by pool."""
        return Counter(map(self.provisioner.pool, clients))

    def give_up(self, failure: ClientFailure) -> None:
        self.open_.discard(failure.client)
        self.failed[failure.client] = failure

    def suits(self, worker: Worker, client: int, present: Iterable[Worker]) -> bool:
        """Whether the worker may get the client's assignment. A worker that has failed it gets it only if all `present`
        workers have. A client with data on a device suits only this device."""
        if self.own is not None:
            return self.own.get(worker.name) == client
        pool, tried = self.provisioner.pool(client), self.tried[client]
        if not self.provisioner.suits(worker.member.tier, pool):
            return False
        others = (w for w in present if w.name not in tried and self.provisioner.suits(w.member.tier, pool))
        return worker.name not in tried or next(others, None) is None

    def assigned(self, present: Sequence[Worker], now: float) -> Iterator[tuple[Worker, list[int]]]:
        """Yield free workers with waiting clients. Each worker gets at most its room and its share of the waiting
        clients; workers with the latest heartbeat are first. The caller leases them before it continues."""
        free = [w for w in present if w.held is None and w.rests <= now]
        room = cache(lambda pool, tried: self._most(pool, tried, [w for w in present if not w.failures]))
        takers = len(free)
        for worker in sorted(free, key=lambda w: (w.failures, -w.heard)):
            share = max(1, math.ceil(len(self.waiting) / takers))
            clients = list(islice(self._suited(worker, present, room), max(1, min(self.provisioner.room, share))))
            if first := [client for client in clients if client in self.alone][:1]:
                clients = first
            if clients:
                yield worker, clients
            takers -= 1

    def _suited(self, worker: Worker, present: Sequence[Worker], room: object) -> Iterator[int]:
        """Yield the waiting clients whose assignments the worker may get."""
        has = Counter[str]()
        for client in self.waiting:
            pool = self.provisioner.pool(client)
            has_room = not self.provisioner.strangers or (
                self.results[worker.name, pool] + has[pool] < room(pool, frozenset(self.tried[client]))  # type: ignore[operator]
            )
            if has_room and self.suits(worker, client, present):
                has[pool] += 1
                yield client

    def _most(self, pool: str, tried: frozenset[str], present: Sequence[Worker]) -> int:
        """Return the most assignments of a pool for one worker: twice an equal share. So a stranger who is very fast
        does not become the majority, and the faster half of the workers has room for the whole round. Workers that have
        `tried` the assignment do not count, so that another one has room."""
        takers = sum(w.name not in tried and self.provisioner.suits(w.member.tier, pool) for w in present)
        return math.ceil(2 * self.asked[pool] / max(1, takers))


class Ended(NamedTuple):
    """Why a lease has ended."""

    why: str
    failed: bool
    """Whether the assignment has failed; otherwise the worker was only taken away."""
    untaken: bool = False
    """Whether the worker did not take the lease."""


def why_ended(
    worker: Worker, r: OpenRound, lease_s: float, deadline_s: float, lost: Lost | None = None
) -> Ended | None:
    """Return why the worker's lease is over; None if it is not. Times are measured up to the last poll for a heartbeat,
    because the coordinator may have been busy since. `lost`: what the provisioner knows of the process."""
    held, heartbeat = worker.held, worker.heartbeat
    if held is None:
        return None
    if worker.revoked and lost is None:
        return Ended(f"{worker.name} was {'deleted with its Job' if worker.member.pod else 'revoked'}", False)
    if heartbeat is not None and heartbeat.lease == held.lease and heartbeat.state == "failed":
        return Ended(f"{worker.name} could not execute its assignment: {printable(heartbeat.error)}", True)
    if lost is not None:
        worker.away = worker.away or worker.process == held.worker
        failed = lost.failed or _too_often(worker, held.clients, r)
        if failed and held.alone:
            r.killed.update(held.clients)
        return Ended(f"{worker.name} is lost: {lost.reason}", failed)
    if worker.process != held.worker:
        failed = _too_often(worker, held.clients, r)
        if held.alone and held.taken:
            r.killed.update(held.clients)
        return Ended(f"{worker.name} was restarted", failed)
    if worker.is_gone and held.taken:
        return Ended(f"{worker.name} has ended", _too_often(worker, held.clients, r))
    if worker.looked - held.since > deadline_s:
        return Ended(f"{worker.name} has no result after {deadline_s:g} s", held.taken, untaken=not held.taken)
    silent = worker.looked - held.heard
    if silent > (lease_s if held.taken else max(lease_s, UNTAKEN_S)):
        worker.away = True
        # A pod may be silent because its node is lost, so its first silences do not count.
        failed = held.taken and (r.provisioner.strangers or _too_often(worker, held.clients, r))
        return Ended(f"{worker.name} is silent for {silent:.0f} s", failed, untaken=not held.taken)
    return None


def _too_often(worker: Worker, clients: Sequence[int], r: OpenRound) -> bool:
    """Count that the worker was taken away. Return whether this was so often that an assignment may be the reason."""
    r.gone.update((worker.name, client) for client in clients)
    return max(r.gone[worker.name, client] for client in clients) > r.provisioner.drains


@dataclass(frozen=True)
class Assigner:
    """Writes the leases of one run."""

    mailbox: Mailbox
    """The files of the run's rounds, with the key with which the coordinator signs."""
    mailboxes: Mailboxes
    options: AgentsConfig | KubernetesConfig
    lease_s: float
    """Seconds of silence after which a lease ends."""
    site_sums: Mapping[str, str] = field(default_factory=dict)
    """See `Assignment.site`. The sums are not read from the store, which others may write."""
    code: str | None = None
    """The sha256 of the wheel with the run's own code."""
    memory: Peaks | None = None
    """The memory that training takes, for observe=cgroup."""

    @property
    def own_data(self) -> bool:
        """Whether clients have data of their own."""
        return self.mailbox.rules is not None and self.mailbox.rules.most is not None

    def lease(self, r: OpenRound, clients: Sequence[int], id: str) -> Lease:
        """Return a lease of these clients' assignments, which the mailbox has written."""
        given = Assignment(
            round=r.plan.round,
            evaluates=r.plan.evaluates,
            clients=tuple(clients),
            site=dict(self.site_sums),
            orders={client: self.mailbox.order_sums[client] for client in clients},
            device=r.provisioner.torch_device(clients[0]),
            observe=self.options.observe,
            memory=self.memory,
            failures=max(r.killed[client] for client in clients),
            code=self.code,
        )
        orders = [r.plan.order_of[client] for client in clients]
        given = given.model_copy(update=self._reach(r, orders, id))
        return Lease(id=id, seconds=self.options.deadline_s, assignment=given)

    def _reach(self, r: OpenRound, orders: Sequence[WorkOrder], id: str) -> dict[str, object]:
        """Return URLs that are valid for the lease, or the store's address for workers that reach it without URLs."""
        store, verb = self.mailbox.store, self.mailboxes.verb
        if verb is None or not isinstance(store, S3Store):
            return {"store": store.uri()}
        seconds, endpoint = math.ceil(self.options.deadline_s + self.lease_s), self.options.endpoint
        keys = [name for order in orders for name in r.names[order.client]]
        keys += [f"site/{name}" for name in site_files(self.own_data)]
        keys += [] if self.code is None else [store_key(self.code)]
        state = {} if self.mailbox.rules is None else self.mailbox.rules.client_state
        writes = {}
        for order in orders:
            sizes = payload_bytes(order, state), manifest_bytes(order)
            names = Mailbox(store, lease=id).outcome_keys(order.round, order.client, order.evaluates)
            for name, most in zip(names, sizes, strict=True):
                writes[name] = store.upload(name, most, seconds, verb, endpoint)
        return {"reads": {key: store.presign(key, seconds, endpoint) for key in dict.fromkeys(keys)}, "writes": writes}
