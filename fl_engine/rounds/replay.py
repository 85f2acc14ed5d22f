"""One client's work in one round, computed once more.

Every round is a function of the state before it, its number and the seed. The rounds since the last stored state are
computed again without committing anything, and then this one assignment. If clients keep a state, or rounds are
asynchronous, all earlier rounds are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fl_engine.core.contracts import Backend
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.types import ClientFailure, ClientUpdate, LocalTask, Params, WorkOrder
from fl_engine.exchange.client import accept, delivered, train
from fl_engine.rounds import faulty
from fl_engine.rounds.collect import Clients
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.loop import committed
from fl_engine.rounds.phases import Stopwatch
from fl_engine.rounds.round import asked, play
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore

NEVER = 10**9
SAME = ("loss", "steps", "macs")
"""Reported metrics that follow from the assignment alone."""


@dataclass(frozen=True)
class ClientRound:
    """The assignment of one client in one round, and its result."""

    order: WorkOrder
    """`order.payload` are the weights that it received."""
    task: LocalTask
    """What it trained: `task.spec` is the sub-model, after pruning on the device."""
    start: Params
    """The weights of `task.spec` before training."""
    update: ClientUpdate
    """`update.payload` are the weights that it sent back, as the server decodes them."""
    change: Params
    """`update.payload` minus `start`, for each weight of equal shape."""


def replay(run: Run, initial: Any, backend: Backend, ledger: Ledger, round: int, client: int) -> ClientRound:
    """Return the work of `client` in `round`, counted from 0.

    `initial` is the state before round 0; `backend` computes earlier rounds again. Raises ConfigError if the client was
    not selected or failed, IntegrityError if its metrics differ from those in the ledger.
    """
    rows = ledger.checkpoints.rows()
    if not 0 <= round < len(rows):
        raise ConfigError(f"round {round + 1} is not committed: the run has {len(rows)} rounds")
    line = next((line for line in rows[round].clients if line["client"] == client), None)
    metrics = rows[round].metrics
    if not rows[round].clients and (metrics.get("clients_trained") or metrics.get("clients_failed")):
        raise ConfigError(f"round {round + 1} is packed: its records of single clients are deleted")
    if line is None:
        there = ", ".join(str(line["client"]) for line in rows[round].clients)
        raise ConfigError(f"client {client} was not selected in round {round + 1}. Selected: {there}")
    if "failure" in line:
        raise ConfigError(f"client {client} failed in round {round + 1}: {line['failure']}")
    with TemporaryDirectory() as scratch:
        return _replayed(run, initial, backend, ledger, ledger_in(FolderStore(Path(scratch))), round, line)


def _replayed(
    run: Run, initial: Any, backend: Backend, ledger: Ledger, scratch: Ledger, round: int, line: dict[str, Any]
) -> ClientRound:
    keeps = bool(run.client_state) or run.terms.mode == "buffered"
    states = scratch.states if run.client_state else None
    clients = Clients(backend, None, lambda: False, states, scratch.flights if run.terms.mode == "buffered" else None)
    # Later rounds delete the files of client states and pending updates, so these runs start from the beginning.
    kept = [] if keeps else [each for each in ledger.checkpoints.with_state() if each < round]
    last = max(kept, default=None)
    progress, _ = committed(initial, ledger, last)
    run = replace(run, terms=run.terms.model_copy(update={"evaluate_every": NEVER}), evaluation=None)
    for each in range(0 if last is None else last + 1, round):
        progress, _ = play(run, progress, each, clients)
    begin = progress.clock if progress.flying else run.begins(round, progress.clock)
    context = run.context(round, begin, {flight.order.client for flight in progress.flying})
    order = asked(run, progress, context, clients, Stopwatch()).order_of[line["client"]]
    work = accept(run.algorithm, order, run.site)
    (outcome,) = [work] if isinstance(work, ClientFailure) else train([work], run.site, run.devices[0])
    update = faulty.arrived(run, order, delivered(run.algorithm, outcome, order, run.site))
    if isinstance(work, ClientFailure) or isinstance(update, ClientFailure):
        raise ConfigError(f"client {order.client} fails when round {round + 1} is computed again: {outcome}")
    _check(update, line, round)
    change = {name: t - work.start[name] for name, t in update.payload.items() if _alike(t, work.start.get(name))}
    return ClientRound(order, work.task, work.start, update, change)


def _alike(tensor: Any, other: Any) -> bool:
    return other is not None and tensor.shape == other.shape


def _check(update: ClientUpdate, line: dict[str, Any], round: int) -> None:
    told: Sequence[str] = [name for name in SAME if name in line and line[name] != update.metrics.get(name)]
    if told:
        raise IntegrityError(
            f"client {update.client} of round {round + 1}, computed again, reports {told[0]} "
            f"{update.metrics[told[0]]!r}; the run has {line[told[0]]!r}. Was it computed elsewhere, or by other code?"
        )
