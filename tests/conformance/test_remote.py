"""Leased assignments against the laws that all backends share: the workers are played, and really train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.types import ClientResult, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of
from fl_engine.remote.leases import Surroundings
from fl_engine.remote.messages import Lease
from fl_engine.remote.provisioner import Enrolled
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.remote.scheduler import WorkerBackend
from fl_engine.remote.settings import AgentsConfig
from flexfleet.worker.execute import Prepared, execute
from tests.conformance.backend_suite import BackendSuite, Make
from tests.harness.played import Clock, Played, played_clock
from tests.harness.stores import MemoryStore


class OnPlayed:
    """A backend whose workers execute what the scheduler leases. `room`: how many orders each may hold at once."""

    def __init__(self, site: Site, workers: int, clock: Clock, room: int) -> None:
        store, mailboxes, registry = MemoryStore(), Mailboxes(MemoryStore()), Registry(MemoryStore())
        mailbox = Mailbox(store, site.rules, key_of(b"k" * 32))
        provisioner = Enrolled(site.fleet, registry, mailboxes, AgentsConfig())
        provisioner.room = room

        def turn() -> bool:
            for worker in self._workers:
                worker.turn()
            return False

        def act(worker: Played, lease: Lease, worked: float) -> None:
            message = worker.message()
            execute(lease, worker.key, message.site, store, Prepared(self._algorithm, site, ""), lambda taken: 0)
            worker.done = lease.id

        self._inner = WorkerBackend(Surroundings(site, mailbox, should_stop=turn), provisioner, lambda: None)
        self._workers = [Played(mailboxes, mailboxes.invite(registry, "any", None), clock, act) for _ in range(workers)]
        self.durable = self._inner.durable

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        self._algorithm = algorithm
        return self._inner.run(algorithm, plan)


@pytest.mark.parametrize("room", [1, 3])
class TestRemote(BackendSuite):
    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch, room: int) -> Make:
        clock = played_clock(monkeypatch)

        def build(site: Site, devices: Sequence[str]) -> Backend:
            return OnPlayed(site, len(devices), clock, room)

        return build
