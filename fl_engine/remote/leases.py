"""Choose assignments for workers, create the workers' messages, and decide when a lease ends without a result."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import printable
from fl_engine.core.types import Assignment, ClientFailure, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.messages import MOST_S, AssignmentMessage, Lease, site_files
from fl_engine.remote.provisioner import Lost, Provisioner
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.remote.settings import AgentsConfig, KubernetesConfig
from fl_engine.remote.workers import Worker
from fl_engine.storage.code import store_key
from fl_engine.storage.s3 import S3Store
from fl_engine.training.memory import Peaks

UNTAKEN_S = 2 * MOST_S
"""Minimum seconds until a silent worker loses a lease that it has not started. Idle workers poll within MOST_S s."""


@dataclass
class OpenRound:
    algorithm: Algorithm
    plan: RoundPlan
    names: Mapping[int, list[str]]
    """Map each client to the store keys of its assignment."""
    provisioner: Provisioner
    own: Mapping[str, int] | None
    """Map each device to its client; None if devices do not have their own data."""
    result_at: float
    open_: set[int] = field(default_factory=set)
    waiting: deque[int] = field(default_factory=deque)
    """Clients whose assignment is not leased."""
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of results for each worker and pool."""
    lost: Counter[int] = field(default_factory=Counter)
    """Number of failed attempts for each client."""
    failed_by: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Map each client to the workers that failed its assignment. `suits` determines when these workers may retry it."""
    killed: Counter[int] = field(default_factory=Counter)
    """Map each client to the number of workers that died while executing only its assignment, usually out of memory."""
    alone: set[int] = field(default_factory=set)
    """Clients of failed leases. Assignments of these clients are leased separately."""
    interruptions: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Map (worker, client) to the number of times that the worker was interrupted while it had the assignment."""
    failed: dict[int, ClientFailure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = deque(assignment.client for assignment in self.plan.assignments)
        self.open_ = set(self.waiting)
        # worked_at: time of the workers' last activity. reported: time of the last log line about waiting assignments.
        self.worked_at = self.reported = self.result_at
        self.wanted = Counter(map(self.provisioner.pool, self.waiting))

    def count(self, clients: Iterable[int]) -> Counter[str]:
        return Counter(map(self.provisioner.pool, clients))

    def give_up(self, failure: ClientFailure) -> None:
        self.open_.discard(failure.client)
        self.failed[failure.client] = failure

    def suits(self, worker: Worker, client: int, present: Iterable[Worker]) -> bool:
        """Return whether a worker may get a client's assignment. A worker may retry a failed assignment only if all
        suitable `present` workers have failed it. If devices have their own data, only the client's device gets it."""
        if self.own is not None:
            return self.own.get(worker.name) == client
        pool, failed_by = self.provisioner.pool(client), self.failed_by[client]
        if not self.provisioner.suits(worker.member.tier, pool):
            return False
        others = (w for w in present if w.name not in failed_by and self.provisioner.suits(w.member.tier, pool))
        return worker.name not in failed_by or next(others, None) is None

    def assigned(self, present: Sequence[Worker], now: float) -> Iterator[tuple[Worker, list[int]]]:
        """Yield tuples (free worker, clients whose assignments the worker gets). The waiting assignments are
        distributed evenly over the free workers, at most `room` to each. Workers with the fewest failures come first,
        then workers with the latest heartbeat. The clients are removed from `waiting`."""
        free = [w for w in present if w.held is None and w.rests_until <= now]
        good = [w for w in present if not w.failures]

        @cache
        def limit(pool: str, failed_by: frozenset[str]) -> int:
            """Return how many assignments of a pool one untrusted worker may execute in this round: twice the mean per
            worker, not counting workers that have failed the assignment. One very fast worker then cannot execute most
            of the assignments, but the faster half of the workers can execute all of them."""
            takers = sum(w.name not in failed_by and self.provisioner.suits(w.member.tier, pool) for w in good)
            return math.ceil(2 * self.wanted[pool] / max(1, takers))

        def may_get(worker: Worker, client: int) -> bool:
            pool = self.provisioner.pool(client)
            done = self.results[worker.name, pool] if self.provisioner.strangers else -1
            return done < limit(pool, frozenset(self.failed_by[client])) and self.suits(worker, client, present)

        for number, worker in enumerate(sorted(free, key=lambda w: (w.failures, -w.heartbeat_at))):
            share = max(1, math.ceil(len(self.waiting) / (len(free) - number)))
            suited = (client for client in self.waiting if may_get(worker, client))
            clients = list(islice(suited, max(1, min(self.provisioner.room, share))))
            if first := [client for client in clients if client in self.alone][:1]:
                clients = first
            for client in clients:
                self.waiting.remove(client)
            if clients:
                yield worker, clients


def why_ended(worker: Worker, r: OpenRound, lost: Lost | None = None) -> Lost | None:
    """Return the reason why the worker's lease has ended; None if the lease continues. Timeouts are measured up to the
    last poll for a heartbeat, because the coordinator may have been busy after this poll. `lost` is the reason why the
    process ended; None if the provisioner has not observed the end of the process."""
    held, heartbeat, lease_s = worker.held, worker.heartbeat, r.provisioner.lease_s
    if held is None:
        return None
    if worker.revoked and lost is None:
        return Lost(f"{worker.name} was {'deleted with its Job' if worker.member.pod else 'revoked'}", False)
    if heartbeat is not None and heartbeat.lease == held.lease and heartbeat.state == "failed":
        return Lost(f"{worker.name} could not execute its assignment: {printable(heartbeat.error)}", True)
    if lost is not None:
        worker.away = worker.away or worker.process == held.worker
        failed = lost.failed or _interrupted_too_often(worker, held.clients, r)
        if failed and held.alone:
            r.killed.update(held.clients)
        return Lost(f"{worker.name} is lost: {lost.reason}", failed)
    if worker.process != held.worker:
        failed = _interrupted_too_often(worker, held.clients, r)
        if held.alone and held.taken:
            r.killed.update(held.clients)
        return Lost(f"{worker.name} was restarted", failed)
    if heartbeat is not None and worker.is_gone and (held.taken or worker.heartbeat_at > held.since):
        why = "has ended" if heartbeat.state == "gone" else f"accepts no assignments now: {printable(heartbeat.error)}"
        return Lost(f"{worker.name} {why}", _interrupted_too_often(worker, held.clients, r), not held.taken)
    if worker.polled_at - held.since > (deadline_s := r.provisioner.options.deadline_s):
        return Lost(f"{worker.name} has sent no result after {deadline_s:g} s", held.taken, untaken=not held.taken)
    silent = worker.polled_at - held.heartbeat_at
    if silent > (lease_s if held.taken else max(lease_s, UNTAKEN_S)):
        worker.away = True
        # A pod's heartbeats may stop because its node is lost, so the first timeouts do not count as failures.
        failed = held.taken and (r.provisioner.strangers or _interrupted_too_often(worker, held.clients, r))
        return Lost(f"{worker.name} has sent no heartbeat for {silent:.0f} s", failed, untaken=not held.taken)
    return None


def _interrupted_too_often(worker: Worker, clients: Sequence[int], r: OpenRound) -> bool:
    """Count an interruption of each client's assignment at this worker. Return True if an assignment was interrupted
    more than `Provisioner.drains` times. The assignment may then be the cause."""
    r.interruptions.update((worker.name, client) for client in clients)
    return max(r.interruptions[worker.name, client] for client in clients) > r.provisioner.drains


@dataclass(frozen=True)
class Surroundings:
    """Settings and services that backends use."""

    site: Site
    mailbox: Mailbox
    """Mailbox for the run's rounds. The mailbox's key signs the coordinator's copies of the results."""
    devices: tuple[str, ...] = ("cpu",)
    run_id: str = ""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    memory: Peaks | None = None
    should_stop: Callable[[], bool] = lambda: False
    code: tuple[Path, str] | None = None
    """Path and SHA-256 hash of the wheel with the user's code. The wheel is stored in the run's folder."""
    mailboxes: Mailboxes | None = None
    registry: Registry | None = None
    site_sums: Mapping[str, str] = field(default_factory=dict)
    """See `AssignmentMessage.site`. Workers verify the files, because the store is not trusted."""
    patience_s: float = 600.0

    def lease(self, r: OpenRound, clients: Sequence[int], id: str) -> Lease:
        """Return a lease for these clients' assignments. The assignments must already be in the mailbox."""
        given = AssignmentMessage(
            round=r.plan.round,
            evaluates=r.plan.evaluates,
            clients=tuple(clients),
            site=dict(self.site_sums),
            assignments={client: self.mailbox.assignment_sums[client] for client in clients},
            device=r.provisioner.torch_device(clients[0]),
            observe=r.provisioner.options.observe,
            memory=self.memory,
            failures=max(r.killed[client] for client in clients),
            code=None if self.code is None else self.code[1],
        )
        assignments = [r.plan.assignment_of[client] for client in clients]
        given = given.model_copy(update=self._reach(r, assignments, id))
        return Lease(id=id, seconds=r.provisioner.options.deadline_s, assignment=given)

    def _reach(self, r: OpenRound, assignments: Sequence[Assignment], id: str) -> dict[str, object]:
        """Return the message fields for access to a lease's files: URLs, or the store's address if `verb` is None."""
        store, of = self.mailbox.store, r.provisioner
        if (verb := of.mailboxes.verb) is None or not isinstance(store, S3Store):
            return {"store": store.uri()}
        seconds, endpoint = math.ceil(of.options.deadline_s + of.lease_s), of.mailboxes.endpoint
        keys = [name for assignment in assignments for name in r.names[assignment.client]]
        keys += [f"site/{name}" for name in site_files(self.site.most is not None)]
        keys += [] if self.code is None else [store_key(self.code[1])]
        state = {} if self.mailbox.rules is None else self.mailbox.rules.client_state
        writes = {}
        for assignment in assignments:
            sizes = payload_bytes(assignment, state), manifest_bytes(assignment)
            names = Mailbox(store, lease=id).result_keys(assignment.round, assignment.client, assignment.evaluates)
            for name, most in zip(names, sizes, strict=True):
                writes[name] = store.upload(name, most, seconds, verb, endpoint)
        return {"reads": {key: store.presign(key, seconds, endpoint) for key in dict.fromkeys(keys)}, "writes": writes}
