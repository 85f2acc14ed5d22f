"""Reads and writes a run's store for the coordinator: the committed rounds, and the mailbox for the current round.

`rounds/00012/closed.json`: The set of results that the round merges. The file is written before the merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import Field

from fl_engine.core.errors import IntegrityError
from fl_engine.core.records import Record, parsed
from fl_engine.core.types import ClientFailure, ClientResult, RoundPlan
from fl_engine.exchange.mailbox import Known, Mailbox
from fl_engine.exchange.manifest import KeyOf
from fl_engine.exchange.updates import Rules
from fl_engine.rounds import buffer
from fl_engine.rounds.acceptance import Moved
from fl_engine.rounds.timing import Times
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.run_files import WAY_OUT, round_folder
from fl_engine.storage.run_lock import RunLock
from fl_engine.storage.store import Store, canonical, sha256
from fl_engine.storage.tensor_files import FOLDER, TensorFiles, named


class Closed(Record):
    round: int
    accepted: dict[int, str]
    """Map each client to the checksum of the result that was read. If a stored update changes later, it is rejected as
    damaged."""
    refused: dict[int, ClientFailure] = Field(default={})
    """Failures of clients, including rejections of valid updates."""
    metrics: dict[int, dict[str, float]] = Field(default={})
    """Metrics of each update that was read."""
    moved: dict[int, Moved] = Field(default={})
    """Movements (`acceptance`) of all updates, including rejected updates."""
    times: dict[int, Times] = Field(default={})
    """Times of the rejected updates, stored because a resumed run does not read these updates again."""
    scores: dict[int, float] = Field(default={})
    """Scores of the updates (`aggregation.rules.DropsUpdates`)."""
    checksum: str = ""
    """Checksum of all other fields."""

    def with_checksum(self) -> Closed:
        content = canonical(self.model_dump(exclude={"checksum"}))
        return self.model_copy(update={"checksum": sha256(content)})


class RoundMailbox(Mailbox):
    """Mailbox of a run's coordinator."""

    def accepted(self, plan: RoundPlan, client: int, closed: Closed) -> ClientResult:
        """Return the client's result in the closed round. Raises IntegrityError if the result is missing or damaged."""
        if client in closed.refused:
            return closed.refused[client]
        return self.result(plan, client, Known(closed.accepted[client], closed.metrics.get(client)))

    def close(
        self, plan: RoundPlan, refused: Mapping[int, ClientFailure] = MappingProxyType({}), **figures: Mapping[int, Any]
    ) -> Closed:
        """Store the set of results that the merge uses, and the rejected results. `figures` are the fields `moved`,
        `times` and `scores` of the record. Failures are stored in full, because a stopped client may still overwrite
        its stored failure."""
        seen = {client: self.seen[plan.round, client] for client in sorted(plan.assignment_of)}
        failed = {client: known.failure for client, known in seen.items() if known.failure is not None}
        self.seen.clear()
        ordered: dict[str, Any] = {name: dict(sorted(values.items())) for name, values in figures.items()}
        closed = Closed(
            round=plan.round,
            accepted={client: known.content for client, known in seen.items()},
            refused=dict(sorted((failed | dict(refused)).items())),
            metrics={client: known.metrics for client, known in seen.items() if known.metrics is not None},
            **ordered,
        ).with_checksum()
        self.store.put(f"{round_folder(plan.round)}closed.json", closed.model_dump_json().encode())
        return closed

    def closed(self, plan: RoundPlan) -> Closed | None:
        """Return the record of the closed round; None if the round is not closed yet."""
        key = f"{round_folder(plan.round)}closed.json"
        if key not in self.store.list(key):
            return None
        uri = self.store.uri(key)
        try:
            found = parsed(Closed, self.store.get(key), uri)
            if found != found.with_checksum():
                raise IntegrityError(f"{uri} is damaged: the checksum does not match the content")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        return found


class Ledger:
    """The committed rounds of a run, and the mailbox for the current round."""

    def __init__(
        self,
        store: Store,
        keep_every: int | None = None,
        rules: Rules | None = None,
        key: KeyOf | None = None,
        lock: RunLock | None = None,
        keep_rounds: float = 0,
        pinned: int | None = None,
    ) -> None:
        self.store = store
        self.checkpoints = Checkpoints(store, keep_every, lock, keep_rounds, pinned)
        self.mailbox = RoundMailbox(store, rules, key)
        self.states = TensorFiles(self.checkpoints, FOLDER, lambda rest: named(rest).values())
        self.pending = TensorFiles(
            self.checkpoints, buffer.FOLDER, lambda rest: [update.file for update in buffer.pending_in(rest)]
        )
