"""Workers that are played: they need no process and no thread, and the clock moves when somebody sleeps.

The workers of a scene act between two turns of the coordinator, each by its own `act`: honest, or with a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fl_engine.core.types import (
    Assignment,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Device,
    RoundPlan,
    Stage,
    SubmodelSpec,
)
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of
from fl_engine.remote import messages, registry, scheduler, workers
from fl_engine.remote.leases import Surroundings
from fl_engine.remote.messages import Heartbeat, Invitation, Lease, Message, State
from fl_engine.remote.provisioner import Enrolled
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.remote.settings import AgentsConfig
from fl_engine.storage.store import Store
from tests.harness.stores import MemoryStore

START = 1000.0


@dataclass
class Clock:
    now: float = START
    each: Callable[[float], object] = lambda passed: None
    """Called after each sleep."""

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.each(self.passed)

    @property
    def passed(self) -> float:
        return self.now - START


def played_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of a coordinator in this process."""
    clock = Clock()
    for module in (registry, workers, scheduler):
        monkeypatch.setattr(module, "time", clock)
    return clock


@dataclass
class Played:
    """An enrolled device. `act` is called in each turn in which it holds a lease; its last argument: for how many
    seconds it has."""

    mailboxes: Mailboxes
    invitation: Invitation
    clock: Clock
    act: Act
    there: bool = True
    takes: bool = True
    """It reports when it takes a lease; otherwise it sends idle heartbeats as long as it does nothing."""
    id: str = "d1" * 16
    starts: int = 0
    number: int = 0
    leases: list[Lease] = field(default_factory=list)
    """Those that it took."""
    since: float = 0.0
    done: str = ""
    """The last lease that it has ended."""
    told: int = -1
    """Number of the last message that it has read."""

    def __post_init__(self) -> None:
        self.name = self.invitation.name
        self.key = messages.enrolled_key(self.invitation.key, self.id)
        if self.there:
            self.beat("idle")

    @property
    def process(self) -> str:
        return hashlib.sha256(f"{self.name} {self.starts}".encode()).hexdigest()[:16]

    @property
    def taken(self) -> list[tuple[int, ...]]:
        """The clients of each lease that it took."""
        return [lease.assignment.clients for lease in self.leases]

    def message(self) -> Message:
        value = self.mailboxes.home.get(f"{self.name}/{messages.MESSAGE}")
        return messages.read_message(value, self.key, self.invitation.key)

    def beat(self, state: State, lease: str | None = None, error: str = "") -> None:
        self.number += 1
        told = {"number": self.number, "state": state, "lease": lease, "error": error}
        heartbeat = Heartbeat(name=self.name, id=self.id, worker=self.process, **told)  # type: ignore[arg-type]
        self.mailboxes.home.put(f"{self.name}/{messages.HEARTBEAT}", heartbeat.signed(self.key).text())

    def turn(self) -> None:
        if not self.there:
            return
        message = self.message()
        lease = message.lease if message.worker == self.process else None
        if lease is not None and lease.id != self.done:
            if not self.leases or self.leases[-1].id != lease.id:
                self.leases.append(lease)
                self.since = self.clock.now
                if self.takes:
                    self.beat("working", lease.id)
            self.act(self, lease, self.clock.now - self.since)
        elif message.number != self.told or not self.takes:
            self.beat("idle")
        self.told = message.number

    def send(
        self, lease: Lease, plan: RoundPlan, store: Store, results: Collection[ClientResult], key: bytes = b""
    ) -> None:
        """Write results of a lease. `key` signs them; empty: the lease's own."""
        key = key or messages.result_key(self.key, self.message().site, lease.id)
        box = Mailbox(store, key=lambda _: key, lease=lease.id)
        for result in results:
            box.put_result(plan, result)


Act = Callable[[Played, Lease, float], None]


def update_of(assignment: Assignment) -> ClientUpdate:
    return ClientUpdate(assignment.round, assignment.client, assignment.spec, assignment.payload, 1, {})


class Scene:
    """A coordinator, the stores and the workers of a run. `room`: how many orders a worker may hold at once; None: as
    for enrolled devices."""

    def __init__(self, patch: pytest.MonkeyPatch, clients: int = 1, room: int | None = None, **options: Any) -> None:
        self.clock, self.store = played_clock(patch), MemoryStore()
        self.mailboxes, self.registry = Mailboxes(MemoryStore()), Registry(MemoryStore())
        self.options = AgentsConfig(**options)
        self.fleet = [Device(client, "weak", 100.0, 0.0) for client in range(clients)]
        payload = {"w": torch.zeros(2)}
        assignments = (Assignment(0, c, SubmodelSpec.of({}), payload, seed=c, level=0) for c in range(clients))
        self.plan = RoundPlan(0, tuple(assignments))
        self.provisioner = Enrolled(self.fleet, self.registry, self.mailboxes, self.options)
        self.provisioner.room = room or self.provisioner.room
        self.workers: list[Played] = []
        self.until = 20_000.0
        """Seconds after which the coordinator is asked to stop."""
        self.between: Callable[[], object] = lambda: None
        """Called between two turns, before the workers act."""
        self.begin()

    def begin(
        self,
        check: Callable[[], None] = lambda: None,
        site: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> None:
        """A coordinator that replaces the one before. `site`: the sums of the site's files. `most`: see `Site`."""
        self.mailbox = Mailbox(self.store, None, key_of(b"k" * 32))
        started = self.clock.now

        def turn() -> bool:
            self.between()
            for worker in self.workers:
                worker.turn()
            return self.clock.now - started > self.until

        data: Any = Site(None, (), self.fleet, None, None, 0, most=most)  # type: ignore[arg-type]
        run = Surroundings(data, self.mailbox, run_id="a", site_sums=site or {}, should_stop=turn)
        self.remote = scheduler.WorkerBackend(run, self.provisioner, check)

    def worker(self, act: Act, tier: str | None = None, there: bool = True, takes: bool = True) -> Played:
        invitation = self.mailboxes.invite(self.registry, "weak", tier)
        self.workers.append(Played(self.mailboxes, invitation, self.clock, act, there, takes))
        return self.workers[-1]

    def run(self) -> Iterator[ClientResult]:
        return self.remote.run(None, self.plan)  # type: ignore[arg-type]

    def results(self) -> dict[int, ClientResult]:
        """Run the round. Each client must have one result."""
        found = list(self.run())
        assert sorted(result.client for result in found) == [assignment.client for assignment in self.plan.assignments]
        return {result.client: result for result in found}

    def updates(self) -> int:
        """Run the round, and return how many clients have an update."""
        return sum(isinstance(result, ClientUpdate) for result in self.results().values())

    def failures(self) -> dict[int, ClientFailure]:
        """Run the round, and return the failures by client."""
        return {c: result for c, result in self.results().items() if isinstance(result, ClientFailure)}

    def account(self, worker: Played) -> messages.Account:
        return self.remote.workers.by_name[worker.name].message.account

    # ------------------------------------------------------------------------------------------ kinds of workers
    def answer(self, worker: Played, lease: Lease, only: Collection[int] | None = None) -> None:
        """Send the results of all orders; `only`: of these, and continue."""
        clients = lease.assignment.clients if only is None else only
        worker.send(lease, self.plan, self.store, [update_of(self.plan.assignment_of[client]) for client in clients])
        worker.done = lease.id if only is None else worker.done

    def honest(self, seconds: float = 5.0) -> Act:
        """Sends heartbeats, and its results after so many seconds."""
        return lambda worker, lease, worked: (self.answer if worked >= seconds else self.works)(worker, lease)

    def fails(self, stage: Stage) -> Act:
        """Sends a failure of each client at once."""

        def act(worker: Played, lease: Lease, worked: float) -> None:
            failures = [ClientFailure(self.plan.round, c, stage, "no luck") for c in lease.assignment.clients]
            worker.send(lease, self.plan, self.store, failures)
            worker.done = lease.id

        return act

    def junk(self, worker: Played, lease: Lease, worked: float) -> None:
        """Writes something that is not a result, at once."""
        for client in lease.assignment.clients:
            self.store.put(f"rounds/{self.plan.round:05}/leases/{lease.id}/{client}.json", b"{}")
        worker.done = lease.id

    @staticmethod
    def unable(worker: Played, lease: Lease, worked: float) -> None:
        """Reports that it cannot execute the assignment."""
        worker.done = lease.id
        worker.beat("failed", lease.id, "no data here")

    @staticmethod
    def silent(worker: Played, lease: Lease, worked: float) -> None:
        """Sends no heartbeat until its next message."""

    @staticmethod
    def idle(worker: Played, lease: Lease, worked: float) -> None:
        """Sends idle heartbeats, whatever its message says. Such a worker needs `takes=False`."""
        worker.beat("idle")

    @staticmethod
    def works(worker: Played, lease: Lease, worked: float = 0.0) -> None:
        """Sends heartbeats, and no result."""
        worker.beat("working", lease.id)

    @staticmethod
    def killed(worker: Played, lease: Lease, worked: float) -> None:
        """Takes the lease; its process is killed and started again at once."""
        worker.starts += 1
        worker.beat("idle")

    @staticmethod
    def leaving(worker: Played, lease: Lease, worked: float) -> None:
        """Takes the lease and gives it back; is present again at the next message."""
        worker.done = lease.id
        worker.beat("gone", lease.id)


Scenes = Callable[..., Scene]


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Scenes:
    """`scene_of(clients, room, **options of agents)`."""
    return lambda clients=1, room=None, **options: Scene(monkeypatch, clients, room, **options)
