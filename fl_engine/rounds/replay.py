"""Repeats one client's training in one round.

A round depends only on the previous state, the round number and the seed. `replay` loads the last stored state, and
computes the rounds after it without committing them. Then it executes the client's assignment. If clients have a state
or rounds are asynchronous, `replay` computes all earlier rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.types import Assignment, ClientFailure, ClientUpdate, LocalTask, Params
from fl_engine.exchange.client import accept, deliver, train
from fl_engine.rounds.chain import update_sum
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.loop import load_progress
from fl_engine.rounds.round import plan_round, run_round
from fl_engine.rounds.run import Run
from fl_engine.rounds.timing import Stopwatch
from fl_engine.rounds.verify import last_state, scratch_clients, without_evaluation
from fl_engine.storage.store import FolderStore
from fl_engine.training.local import OnStep


@dataclass(frozen=True, repr=False)
class ClientRound:
    """Assignment and result of one client in one round.

    Attributes:
        assignment: The client's assignment. `assignment.payload` contains the received weights.
        task: Training task of the client. `task.spec` is the sub-model after pruning on the device.
        start: Weights of `task.spec` before training.
        update: Update of the client. `update.payload` contains the weights that the server decodes.
        change: `update.payload` minus `start`, for all tensors that have the same shape in both.
        same_bits: True if the update is identical to the update in the run; None if other settings were used.

    Examples:
        >>> flexfleet.load("runs/a").replay(round=2, client=7).change["fc.weight"]
    """

    assignment: Assignment
    task: LocalTask
    start: Params
    update: ClientUpdate
    change: Params
    same_bits: bool | None

    def __repr__(self) -> str:
        at = f"client {self.update.client} in round {self.assignment.round + 1}"
        trained = f"{self.update.num_examples} samples, loss {self.update.metrics['loss']:.4g}"
        return f"<flexfleet.ClientRound: {at}, {trained}, {len(self.change)} tensors>"


def replay(
    run: Run,
    initial: Any,
    backend: Backend,
    ledger: Ledger,
    round: int,
    client: int,
    other: Algorithm | None = None,
    on_step: OnStep | None = None,
    shared: tuple[int, str] = (0, ""),
) -> ClientRound:
    """Return the assignment and the result of `client` in `round`, counted from 0.

    `initial` is the state before round 0. `backend` executes the earlier rounds again. `other` is the algorithm with
    other settings for this training only. `on_step` is called before each training step. `shared` contains the number
    of rounds that another run shares, and the ID of this run. Raises ConfigError if the client was not selected or
    failed, and IntegrityError if the update differs from the ledger.
    """
    rows = ledger.checkpoints.rows()
    if not 0 <= round < len(rows):
        raise ConfigError(f"round must be from 1 to {len(rows)}, the number of committed rounds, got {round + 1}")
    line = next((line for line in rows[round].clients if line["client"] == client), None)
    metrics = rows[round].metrics
    if not rows[round].clients and (metrics.get("clients_trained") or metrics.get("clients_failed")):
        raise ConfigError(
            f"round {round + 1} cannot be replayed, because packing the ledger deleted its client records"
        )
    if line is None:
        choices = ", ".join(str(line["client"]) for line in rows[round].clients)
        raise ConfigError(f"client {client} was not selected in round {round + 1}. Choose from {choices}")
    if "failure" in line:
        raise ConfigError(f"client {client} failed in round {round + 1}: {line['failure']}")
    round -= int(line.get("staleness", 0))  # the round that sent the assignment
    if round < shared[0]:
        raise ConfigError(f"round {round + 1} of a fork cannot be replayed. Replay a round of {shared[1]}")
    with TemporaryDirectory() as folder:
        clients = scratch_clients(run, backend, Ledger(FolderStore(Path(folder))), ledger)
        last = last_state(ledger, round)
        progress, _ = load_progress(initial, ledger, last)
        run = without_evaluation(run)
        for each in range(0 if last is None else last + 1, round):
            progress, _ = run_round(run, progress, each, clients)
        plan, _ = plan_round(run, progress, round, clients, Stopwatch())
    assignment = plan.assignment_of[client]
    algorithm = other or run.algorithm
    work = accept(algorithm, assignment, run.site)
    (result,) = [work] if isinstance(work, ClientFailure) else train([work], run.site, run.devices[0], on_step)
    result = deliver(algorithm, result, assignment, run.site)
    update = run.inject_fault(result, assignment)
    if isinstance(work, ClientFailure) or isinstance(update, ClientFailure):
        raise ConfigError(f"client {assignment.client} failed in the replay of round {round + 1}: {result}")
    same_bits = None
    if other is None and "staleness" not in line:
        same_bits = update_sum(update) == line["sha256"]
        if not same_bits:
            raise IntegrityError(
                f"client {client} in round {round + 1}: the update differs from the run. Replay with the same code on "
                "the same type of machine as the run"
            )
    start = work.start
    change = {n: t - start[n] for n, t in update.payload.items() if n in start and t.shape == start[n].shape}
    return ClientRound(assignment, work.task, start, update, change, same_bits)
