"""A run's store, from its coordinator's side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fl_engine.exchange.manifest import KeyOf
from fl_engine.exchange.updates import Rules
from fl_engine.rounds import flights
from fl_engine.rounds.closing import RoundMailbox
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.lease import Lease
from fl_engine.storage.store import Store
from fl_engine.storage.tensor_files import ClientStates, TensorFiles


@dataclass(frozen=True)
class Ledger:
    """What is committed, and what travels in the round at hand: two views of one store."""

    checkpoints: Checkpoints
    mailbox: RoundMailbox

    @cached_property
    def states(self) -> ClientStates:
        """What clients keep."""
        return ClientStates(self.checkpoints)

    @cached_property
    def flights(self) -> TensorFiles:
        """Updates that wait for their time, where rounds are asynchronous."""
        return flights.files_in(self.checkpoints)

    @property
    def store(self) -> Store:
        return self.checkpoints.store


def ledger_in(
    store: Store,
    keep_every: int | None = None,
    rules: Rules | None = None,
    key: KeyOf | None = None,
    lease: Lease | None = None,
) -> Ledger:
    """`Checkpoints` and `Mailbox` say what each argument means."""
    return Ledger(Checkpoints(store, keep_every, lease), RoundMailbox(store, rules, key))
