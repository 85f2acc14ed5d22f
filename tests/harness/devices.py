"""Devices that are played, for the backend `agents`: no process, no thread; the clock moves when somebody sleeps.

A scene's devices act between two turns of the coordinator, each by its own `act`: honest, or with a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fl_engine.backends.agents import backend as module
from fl_engine.backends.agents import devices as known
from fl_engine.backends.agents import keeper
from fl_engine.backends.agents import post as letters
from fl_engine.backends.agents.backend import Agents
from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Roster
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan, Stage, SubmodelSpec, WorkOrder
from fl_engine.exchange.letters import BEAT, LETTER, Beat, Invitation, Leased, Letter, Loan, State, read_letter
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of
from fl_engine.storage.store import Store
from tests.conftest import MemoryStore


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    time = monotonic


@dataclass
class Played:
    """One device. `act` is called each turn while it holds an order; `seconds`: for how long it has."""

    post: Post
    invitation: Invitation
    clock: Clock
    act: Callable[[Played, Loan, float], None]
    key: str = ""
    generation: int = 0
    boots: int = 0
    number: int = 0
    told: int = -1
    done: str = ""
    taken: list[tuple[str, int]] = field(default_factory=list)
    """Loans that it took, each with its first client."""
    since: float = 0.0
    there: bool = True
    revoked: bool = False
    takes: bool = True
    """It says so when it has an order; else it beats all the time that it has none."""

    def __post_init__(self) -> None:
        self.key = self.key or self.invitation.key
        self.beat("idle")

    @property
    def name(self) -> str:
        return self.invitation.name

    @property
    def boot(self) -> str:
        return hashlib.sha256(f"{self.name} {self.boots}".encode()).hexdigest()[:16]

    def letter(self) -> Letter:
        found, self.key = read_letter(self.post.home.get(f"{self.name}/{LETTER}"), self.key, self.generation)
        self.generation, self.revoked = found.generation, found.revoked
        return found

    def beat(self, state: State, loan: str | None = None, said: str = "") -> None:
        self.number += 1
        told = Beat(name=self.name, boot=self.boot, number=self.number, generation=self.generation, state=state)
        signed = told.model_copy(update={"loan": loan, "said": said}).signed(self.key)
        self.post.home.put(f"{self.name}/{BEAT}", signed.text())

    def restart(self) -> None:
        self.boots += 1

    def turn(self) -> None:
        if not self.there:
            return
        letter = self.letter()
        loan = letter.loan
        if loan is not None and loan.id != self.done:
            if not self.taken or self.taken[-1][0] != loan.id:
                self.taken.append((loan.id, loan.assignment.clients[0]))
                self.since = self.clock.now
                if self.takes:
                    self.beat("working", loan.id)
            self.act(self, loan, self.clock.now - self.since)
        elif letter.number != self.told or not self.takes:
            self.beat("idle")
        self.told = letter.number

    # -------------------------------------------------------------------------------------- what it may do
    def answer(self, loan: Loan, plan: RoundPlan, store: Store, only: Collection[int] | None = None) -> None:
        """All of its orders, or `only` these, and then it is not done."""
        keys = loan.assignment.keys
        box = Mailbox(Leased(store, loan.id), key=lambda order: bytes.fromhex(keys[order.client]))
        for client in loan.assignment.clients if only is None else only:
            box.put_outcome(plan, update_of(plan.order_of[client]))
        if only is None:
            self.done = loan.id


def update_of(order: WorkOrder) -> ClientUpdate:
    return ClientUpdate(order.round, order.client, order.spec, order.payload, 1, {})


class Scene:
    """A coordinator, its run's folder and its devices. `room`: the orders that a device of a tier may hold at once;
    None: as for those that are invited."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, clients: int = 1, room: int | None = None, **options: Any
    ) -> None:
        self.clock = Clock()
        for each in (module, known, letters, keeper):
            monkeypatch.setattr(each, "time", self.clock)
        self.store = MemoryStore()
        self.store.put("site/run.json", b"{}")
        self.post = Post(MemoryStore(), Roster(MemoryStore()))
        self.options = AgentsConfig(**options)
        self.fleet = [Device(client, "weak", 100.0, 0.0) for client in range(clients)]
        self.plan = RoundPlan(
            0,
            tuple(
                WorkOrder(0, client, SubmodelSpec.of({}), {"w": torch.zeros(2)}, seed=client, level=0)
                for client in range(clients)
            ),
        )
        self.keeper = keeper.Invited(self.fleet)
        if room is not None:
            self.keeper.room = room
        self.devices: list[Played] = []
        self.until = 10_000.0
        """Seconds after which the coordinator is asked to stop."""
        self.between: Callable[[], None] = lambda: None
        """Called between two turns, before the devices."""
        self.begin()

    def begin(self, secret: bytes = b"k" * 32, **more: Any) -> Agents:
        """A coordinator that starts, in the place of the one before."""
        self.mailbox = Mailbox(self.store, None, key_of(secret), key_of(secret, "coordinator"))
        started = self.clock.now

        def turn() -> bool:
            self.between()
            for device in self.devices:
                device.turn()
            return self.clock.now - started > self.until

        self.agents = Agents(
            self.options, "a", self.fleet, self.mailbox, self.post, turn, **({"keeper": self.keeper} | more)
        )
        return self.agents

    def device(self, act: Callable[[Played, Loan, float], None], tier: str | None = None) -> Played:
        played = Played(self.post, self.post.invite("weak", tier), self.clock, act)
        self.devices.append(played)
        return played

    def run(self) -> Iterator[Outcome]:
        return self.agents.run(None, self.plan)  # type: ignore[arg-type]

    def outcomes(self) -> dict[int, Outcome]:
        return {outcome.client: outcome for outcome in self.run()}

    # ------------------------------------------------------------------------------------------ kinds of devices
    def honest(self, seconds: float = 5.0) -> Callable[[Played, Loan, float], None]:
        """Beats, and answers after so many seconds."""

        def act(device: Played, loan: Loan, worked: float) -> None:
            if worked >= seconds:
                device.answer(loan, self.plan, self.store)
            else:
                device.beat("working", loan.id)

        return act

    def junk(self, device: Played, loan: Loan, worked: float) -> None:
        """Leaves what is no answer, at once."""
        Leased(self.store, loan.id).put(f"rounds/00000/updates/{loan.assignment.clients[0]}.json", b"{}")
        device.done = loan.id

    def fails(self, stage: Stage, reason: str, device: Played, loan: Loan, worked: float) -> None:
        """Answers at once that its client has failed."""
        keys = loan.assignment.keys
        box = Mailbox(Leased(self.store, loan.id), key=lambda order: bytes.fromhex(keys[order.client]))
        for client in loan.assignment.clients:
            box.put_outcome(self.plan, ClientFailure(self.plan.round, client, stage, reason))
        device.done = loan.id

    def drops_out(self, device: Played, loan: Loan, worked: float) -> None:
        self.fails("drop", "dropped out (rounds.faults)", device, loan, worked)

    def does_not_fit(self, device: Played, loan: Loan, worked: float) -> None:
        self.fails("prune", "too small for me", device, loan, worked)

    @staticmethod
    def unable(device: Played, loan: Loan, worked: float) -> None:
        """Says that it cannot."""
        device.done = loan.id
        device.beat("failed", loan.id, "no data here")

    @staticmethod
    def idle(device: Played, loan: Loan, worked: float) -> None:
        """Beats that it has nothing to do, whatever its letter says."""
        device.beat("idle")

    @staticmethod
    def sly(device: Played, loan: Loan, worked: float) -> None:
        """Is silent until the order is another device's."""

    @staticmethod
    def hung(device: Played, loan: Loan, worked: float) -> None:
        """Beats for ever, and never answers."""
        device.beat("working", loan.id)

    @staticmethod
    def killed(device: Played, loan: Loan, worked: float) -> None:
        """Begins the order, is killed for its memory and started again, half a minute apart."""
        if worked // 30 > device.boots:
            device.restart()
            device.beat("working", loan.id)

    @staticmethod
    def leaving(device: Played, loan: Loan, worked: float) -> None:
        """Takes the order and gives it back; is back at the next letter."""
        device.done = loan.id
        device.beat("gone", loan.id)
