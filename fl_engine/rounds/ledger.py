"""The store of a run as its coordinator sees it: committed rounds, and the mailbox of the current round.

rounds/00012/closed.json    the set of results that the round merges, stored before the merge
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from pydantic import Field

from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import ClientFailure, Code, Outcome, RoundPlan, Stage
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import KeyOf
from fl_engine.exchange.updates import Rules
from fl_engine.fleet.uniformity import Times
from fl_engine.rounds import pending
from fl_engine.rounds.acceptance import Moved
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.lease import Lease
from fl_engine.storage.run_files import WAY_OUT, Record, parsed, round_folder
from fl_engine.storage.store import Store, canonical, sha256
from fl_engine.storage.tensor_files import ClientStates, TensorFiles


class Refusal(Record):
    """Why there is no update, or why it is not merged: see `ClientFailure`."""

    stage: Stage
    reason: str
    code: Code | None = None

    def failure(self, round: int, client: int) -> ClientFailure:
        return ClientFailure(round, client, self.stage, self.reason, self.code)


class Closed(Record):
    round: int
    accepted: dict[int, str]
    """Map each client to a checksum of its result as it was read: a result that is replaced later does not count."""
    refused: dict[int, Refusal] = Field(default={})
    """Clients that failed, and clients whose updates are valid but not merged."""
    metrics: dict[int, dict[str, float]] = Field(default={})
    """The metrics of each update, as they were read."""
    moved: dict[int, Moved] = Field(default={})
    """How far each update moved, refused ones included, if this was measured."""
    times: dict[int, Times] = Field(default={})
    """Times of the refused updates, which are not read again."""
    checksum: str = ""
    """A checksum of all other fields."""

    def sealed(self) -> Closed:
        said = canonical(self.model_dump(exclude={"checksum"}))
        return self.model_copy(update={"checksum": sha256(said)})


class RoundMailbox(Mailbox):
    """The coordinator's mailbox of a run."""

    def accepted(self, plan: RoundPlan, client: int, closed: Closed) -> Outcome:
        """Return the outcome that the round was closed with. Raises IntegrityError if it is missing or damaged."""
        if client in closed.refused:
            return closed.refused[client].failure(plan.round, client)
        return self.outcome(plan, client, (closed.accepted[client], closed.metrics.get(client)))

    def close(
        self,
        plan: RoundPlan,
        clients: Sequence[int],
        refused: Mapping[int, ClientFailure] = MappingProxyType({}),
        moved: Mapping[int, Moved] = MappingProxyType({}),
        times: Mapping[int, Times] = MappingProxyType({}),
    ) -> Closed:
        """Store the set that the merge uses: the results of `clients`, some of them refused. `times`: of the refused
        ones. Failures are stored in full, because a client that was stopped may still overwrite its own."""
        known = {client: self.failed.get((plan.round, client)) for client in clients}
        failed = {client: failure for client, failure in known.items() if failure is not None}
        why = {
            client: Refusal(stage=failure.stage, reason=failure.reason, code=failure.code)
            for client, failure in sorted((failed | dict(refused)).items())
        }
        seen = {client: self.seen[plan.round, client] for client in sorted(clients)}
        self.seen.clear()
        self.failed.clear()
        closed = Closed(
            round=plan.round,
            accepted={client: said for client, (said, _) in seen.items()},
            refused=why,
            metrics={client: metrics for client, (_, metrics) in seen.items() if metrics is not None},
            moved=dict(sorted(moved.items())),
            times=dict(sorted(times.items())),
        ).sealed()
        self.store.put(f"{round_folder(plan.round)}closed.json", closed.model_dump_json().encode())
        return closed

    def closed(self, plan: RoundPlan) -> Closed | None:
        """Return the record of the closed round, or None if the round is open."""
        key = f"{round_folder(plan.round)}closed.json"
        if key not in self.store.list(key):
            return None
        try:
            found = parsed(Closed, self.store.get(key), self.store.uri(key))
            if found != found.sealed():
                raise IntegrityError(f"{self.store.uri(key)} is damaged: its checksum is another")
            named = found.refused.keys() | found.metrics.keys() | found.moved.keys() | found.times.keys()
            others = (named - found.accepted.keys()) | (found.times.keys() - found.refused.keys())
            if found.round != plan.round or others or found.accepted.keys() != plan.order_of.keys():
                raise IntegrityError(f"{self.store.uri(key)} is of another round, or of other clients")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        return found


@dataclass(frozen=True)
class Ledger:
    """Two views of a run's store: committed rounds, and the messages of the current round."""

    checkpoints: Checkpoints
    mailbox: RoundMailbox

    @cached_property
    def states(self) -> ClientStates:
        """The states that clients keep between rounds."""
        return ClientStates(self.checkpoints)

    @cached_property
    def flights(self) -> TensorFiles:
        """Pending updates of asynchronous rounds."""
        return pending.files_in(self.checkpoints)

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
    """Return the ledger of a store. For the arguments see `Checkpoints` and `Mailbox`."""
    return Ledger(Checkpoints(store, keep_every, lease), RoundMailbox(store, rules, key))
