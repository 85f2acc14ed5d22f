"""Computes committed rounds again, and compares them with the ledger.

A round depends only on the previous state, the round number and the seed. If the results of a round were kept
(`run.keep`), its merge is computed again from these results. Otherwise its clients train again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fl_engine.core.contracts import Backend
from fl_engine.core.errors import IntegrityError
from fl_engine.core.records import parsed
from fl_engine.exchange.manifest import ResultManifest
from fl_engine.rounds.chain import state_sum
from fl_engine.rounds.collect import Clients
from fl_engine.rounds.ledger import Closed, Ledger, RoundMailbox
from fl_engine.rounds.loop import load_progress
from fl_engine.rounds.round import Progress, run_round
from fl_engine.rounds.run import Run
from fl_engine.storage.checkpoints import RESULT_FILES, Row
from fl_engine.storage.run_files import round_folder
from fl_engine.storage.store import FolderStore

UPDATES = RESULT_FILES[-1]
NEVER = 10**9
"""Value of `rounds.evaluate_every` for rounds that are computed again."""


def without_evaluation(run: Run) -> Run:
    return replace(run, options=run.options.model_copy(update={"evaluate_every": NEVER}), evaluation=None)


def scratch_clients(run: Run, backend: Backend, scratch: Ledger, ledger: Ledger | None = None) -> Clients:
    """Return clients whose states and pending updates are written to `scratch`, and read from `scratch` or `ledger`."""
    if ledger is not None:
        scratch.states.behind, scratch.pending.behind = ledger.states, ledger.pending
    states = scratch.states if run.client_state else None
    pending = scratch.pending if run.options.mode == "buffered" else None
    return Clients(backend, None, states=states, pending=pending)


def last_state(ledger: Ledger, round: int) -> int | None:
    """Return the last round before `round` whose state was kept; None for the initial state."""
    return max((each for each in ledger.checkpoints.with_state() if each < round), default=None)


def kept_results(ledger: Ledger) -> set[int]:
    """Return the rounds whose results were kept."""
    return {each for each in ledger.checkpoints.commits() if ledger.store.list(f"{round_folder(each)}closed.json")}


def stored_progress(initial: Any, ledger: Ledger, row: Row) -> Progress:
    """Load the progress after the round of `row`. Raises IntegrityError if the stored state differs from the row."""
    progress = load_progress(initial, ledger, row.round)[0]
    if state_sum(progress.state) != row.model:
        raise IntegrityError(f"round {row.round + 1}: the stored state differs from the ledger's checksum")
    return progress


def verify_rounds(
    run: Run, initial: Any, backend: Backend, ledger: Ledger, rounds: Collection[int], train: bool
) -> Iterator[tuple[int, str]]:
    """Compute `rounds` again. Yield (round, "merged") if the round was merged from kept results, or (round, "trained").

    `initial` is the state before round 0. `train` is True to train the clients even if their results were kept. Raises
    IntegrityError with the first round, client or file that differs.
    """
    if not rounds:
        return
    rows, kept = ledger.checkpoints.rows(), kept_results(ledger)
    run = without_evaluation(run)
    progress, done = Progress(initial), -1
    with TemporaryDirectory() as folder:
        scratch = Ledger(FolderStore(Path(folder)), rules=ledger.mailbox.rules)
        clients = scratch_clients(run, backend, scratch, ledger)
        for round in sorted(rounds):
            last = last_state(ledger, round)
            if last is not None and last > done:
                progress, done = stored_progress(initial, ledger, rows[last]), last
            merges = round in kept and not train and clients.states is None and clients.pending is None
            while done < round:
                done += 1
                mailbox = _kept(ledger, scratch, round) if merges and done == round else None
                try:
                    progress, row = run_round(run, progress, done, replace(clients, mailbox=mailbox))
                except IntegrityError as error:  # a damaged copy of a kept result
                    raise IntegrityError(str(error).replace(folder, ledger.store.uri().rstrip("/"))) from error
                check_equal(row, rows[done])
                plan = f"{round_folder(done)}plan.json"
                if mailbox is not None and scratch.store.get(plan) != ledger.store.get(plan):
                    raise IntegrityError(f"{ledger.store.uri(plan)} has changed since the round was committed")
            yield round, "merged" if merges else "trained"


def _kept(ledger: Ledger, scratch: Ledger, round: int) -> RoundMailbox:
    """Copy a round's kept results, and return a mailbox with the copies. The merge checks the tensors. Raises
    IntegrityError if another file contains other bytes than the coordinator wrote."""
    folder = round_folder(round)
    files = {key.removeprefix(folder): ledger.store.get(key) for key in ledger.store.list(folder)}
    files = {name: value for name, value in files.items() if name.startswith(RESULT_FILES)}
    closed = parsed(Closed, files.get("closed.json", b""), ledger.store.uri(f"{folder}closed.json"))
    for name, value in files.items():
        uri = ledger.store.uri(folder + name)
        if name.startswith(UPDATES) and name.endswith(".json"):
            manifest = parsed(ResultManifest, value, uri)
            known = closed.metrics.get(manifest.client, {})
            same = manifest.model_dump_json().encode() == value.rstrip(b" ") and manifest.metrics == known
        else:
            same = name != "closed.json" or closed.model_dump_json().encode() == value
        if not same:
            raise IntegrityError(f"{uri} has changed since the round was committed")
        scratch.store.put(folder + name, value)
    return scratch.mailbox


def check_equal(row: Row, stored: Row) -> None:
    """Raise IntegrityError with the first difference between a round that was computed again and the stored round."""
    name = f"round {stored.round + 1}"
    if row.plan != stored.plan:
        raise IntegrityError(f"{name}: the assignments differ from the ledger")
    sums = {line["client"]: line.get("sha256") for line in row.clients}
    for line in stored.clients:
        if sums.get(line["client"]) != line.get("sha256"):
            raise IntegrityError(f"{name}: the update of client {line['client']} differs from the ledger")
    if row.model != stored.model:
        raise IntegrityError(f"{name}: the merged model differs from the ledger")
    clock = [each.metrics.get("seconds_simulated") for each in (row, stored)]
    if clock[0] != clock[1]:
        raise IntegrityError(f"{name}: the simulated clock differs from the ledger ({clock[0]} and {clock[1]} s)")
