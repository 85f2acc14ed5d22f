"""The backend `agents` against the laws that all backends share: its devices are played, and really train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from fl_engine.backends.agents import backend as module
from fl_engine.backends.agents import devices as known
from fl_engine.backends.agents import keeper
from fl_engine.backends.agents import post as letters
from fl_engine.backends.agents.backend import Agents
from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Roster
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.backends.processes import carry_out
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.exchange.letters import Leased, Loan
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of
from fl_engine.storage.store import Store
from fl_engine.testing.backends import BackendSuite, Make
from tests.conftest import MemoryStore
from tests.harness.devices import Clock, Played


def trains(algorithm: Algorithm, site: Site, store: Store, device: Played, loan: Loan, worked: float) -> None:
    told = loan.assignment
    box = Mailbox(Leased(store, loan.id), key=lambda order: bytes.fromhex(told.keys[order.client]))
    carry_out(algorithm, site, box, told.round, told.clients, told.device, evaluates=told.evaluates)
    device.done = loan.id


class OnPlayed:
    """A backend whose devices know what is played."""

    def __init__(self, site: Site, devices: int, clock: Clock) -> None:
        self._site, self._store = site, MemoryStore()
        self._store.put("site/run.json", b"{}")
        post = Post(MemoryStore(), Roster(MemoryStore()))
        mailbox = Mailbox(self._store, site.rules, key_of(b"k" * 32), key_of(b"k" * 32, "coordinator"))

        def turn() -> bool:
            for device in self._devices:
                device.turn()
            return False

        self._inner = Agents(AgentsConfig(), "a", site.fleet, mailbox, post, turn)
        self._devices = [Played(post, post.invite("any", None), clock, lambda *_: None) for _ in range(devices)]
        self.durable, self.phases = self._inner.durable, self._inner.phases

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        for device in self._devices:
            device.act = partial(trains, algorithm, self._site, self._store)
        return self._inner.run(algorithm, plan)


class TestAgents(BackendSuite):
    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch) -> Make:
        clock = Clock()
        for each in (module, known, letters, keeper):
            monkeypatch.setattr(each, "time", clock)

        def build(site: Site, devices: Sequence[str]) -> Backend:
            return OnPlayed(site, len(devices), clock)

        return build
