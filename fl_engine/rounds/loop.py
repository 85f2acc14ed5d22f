"""Runs the loop over rounds. Each round is committed and then logged to the tracker. A killed run can be resumed.

A round depends only on the committed state, the round number and the seed. After a kill, the unfinished round is
computed again. Therefore a resumed run gives the same global model bit for bit as an uninterrupted run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

from pydantic import ValidationError

from fl_engine.core.contracts import Backend, Tracker, Watcher
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError, Stopped, brief
from fl_engine.core.fields import NotNegative, adapter
from fl_engine.core.state import pack, unpack
from fl_engine.core.system import resident_peak, restart_peak
from fl_engine.core.types import Params
from fl_engine.rounds import buffer, chain
from fl_engine.rounds.acceptance import MovementHistory
from fl_engine.rounds.checks import check_begun
from fl_engine.rounds.collect import Clients, OnResult
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import Course, RoundsConfig
from fl_engine.rounds.round import Progress, run_round
from fl_engine.rounds.run import Run
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.tensor_files import KEY, named

log = logging.getLogger("flexfleet")

AUTO_COMMIT_S = 2.0

HISTORY, CLOCK = "rounds/lengths", "rounds/clock"
"""Keys in the JSON of a commit. The slash prevents name clashes with the fields of the algorithm's state."""


def federate(
    run: Run,
    initial: Any,
    backend: Backend,
    ledger: Ledger,
    tracker: Tracker,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    discard_damaged: bool = False,
    watcher: Watcher | None = None,
    on_result: OnResult = lambda round, results, clients: None,
) -> Any:
    """Run the rounds that are not committed yet, and return the final state.

    Args:
        initial: The algorithm's state before round 0.
        tracker: Receives the metrics of committed rounds.
        should_stop: Function that is called after each result. The run stops if `should_stop` returns true.
        discard_damaged: If the ledger is damaged, continue from the last undamaged commit.
        watcher: Function that is called after each round and may stop the run.

    Raises:
        Stopped: `should_stop` or `watcher` returned true. Finished rounds are committed.
        IntegrityError: The ledger is damaged.
        EnvironmentFailure: The store or the backend does not respond.
    """
    options = run.options
    stored = options.keep_updates or backend.durable or ledger.checkpoints.keep_rounds > 0
    mailbox = ledger.mailbox if stored else None
    states = ledger.states if run.client_state else None
    waiting = ledger.pending if options.mode == "buffered" else None
    clients = Clients(backend, mailbox, should_stop, states, waiting, watcher, on_result)
    kept = [files for files in (states, waiting) if files is not None]
    with resume_hint(ledger):
        progress, first = _resume(initial, ledger, discard_damaged, options)
        check_begun(run.algorithm, progress.state)
        del initial
        for files in kept:
            files.prune()
        rows = ledger.checkpoints.rows(lines=False)
        end = _end(options, rows)
        tracker.metrics([(row.round + 1, row.metrics) for row in rows])
        link, course = rows[-1].link if rows else "", Course(options, (row.metrics for row in rows))
        uncommitted: list[Row] = []
        last_commit = time.monotonic()

        def commit() -> None:
            nonlocal last_commit
            if uncommitted:
                ledger.checkpoints.commit(uncommitted[-1].round, *_packed(progress, options), uncommitted)
                for files in kept:
                    files.prune()
                ledger.checkpoints.check_lock()  # Do not send metrics if another coordinator has the lock.
                tracker.metrics([(row.round + 1, row.metrics) for row in uncommitted])
                uncommitted.clear()
            last_commit = time.monotonic()

        held, before = restart_peak()
        for round in range(first, options.stop if end is None else first):
            try:
                after, row = run_round(run, progress, round, clients)
                peak = resident_peak()
                row.metrics["peak_mb"] = max(peak, before) / 1e6
                row.metrics["peak_mb_rounds"] = (peak - held) / 1e6  # Exclude the memory of libraries and data.
                row = chain.linked(row, link)
                stop = watcher is not None and watcher.round(round + 1, row.metrics, row.clients, after.state)
            except (IntegrityError, EnvironmentFailure):
                raise  # Do not commit, because the store may have failed.
            except Exception:  # A callback may raise any exception.
                commit()
                raise
            progress = after  # After an exception, only earlier rounds are committed.
            uncommitted.append(row)
            link = row.link
            over = course.add(row.metrics)
            ledger.checkpoints.best = course.best
            due = course.best == round or ledger.checkpoints.keep_rounds > 0
            if stop or over or due or _due(options, stored, round, last_commit):
                commit()
            if over:
                break
            if stop:
                raise Stopped(f"a callback stopped the run after round {round + 1}. Resume with --resume")
        if course.rounds < options.stop:
            log.info("stopping after round %d and %.1f simulated seconds", course.rounds, progress.clock)
    return progress.state


def check_end(ledger: Ledger, options: RoundsConfig, discard_damaged: bool = False) -> None:
    """Raise ConfigError if the run has more committed rounds than `options` allow. Call this function before writing to
    the store. A damaged ledger is ignored, because `federate` reports it."""
    with suppress(IntegrityError):
        last = _last_good(ledger) if discard_damaged else max(ledger.checkpoints.commits(), default=None)
        if last is not None and (last + 1 >= options.stop or options.simulated_limit or options.until):
            _end(options, list(islice(ledger.checkpoints.each_row(lines=False), last + 1)))


def _end(options: RoundsConfig, rows: Sequence[Row]) -> int | None:
    """Return the number of rounds after which the run ends; None if the run continues after the committed rounds
    `rows`. Raises ConfigError if more rounds are committed, or if the run would end without an evaluation."""
    end, done = options.end(row.metrics for row in rows), len(rows)
    evaluated = any("avg" in row.metrics or "diverged" in row.metrics for row in rows)
    if end is None or (done <= end and (done < end or evaluated or not rows)):
        return end
    shorter = "rounds.until" if options.until else "rounds.stop_simulated_s"
    path = "rounds.stop" if end >= options.stop else shorter
    why = f"{done} rounds are committed" + ("" if done > end else " without an evaluation")
    raise ConfigError(f"{path} ends the run after round {end}, but {why}. Increase {path}", path=path)


@contextmanager
def resume_hint(ledger: Ledger | None = None) -> Iterator[None]:
    """Append instructions for resuming to the message of an EnvironmentFailure. If another coordinator has acquired the
    lock of `ledger`, the error for the lost lock replaces an IntegrityError."""
    try:
        yield
    except IntegrityError:
        if ledger is not None:
            ledger.checkpoints.check_lock()  # Another coordinator may have deleted the file.
        raise
    except EnvironmentFailure as error:
        text = f"{error}. Committed rounds are kept. Fix the cause, then continue with --resume"
        raise type(error)(text, code=error.code, path=error.path) from error


def _resume(initial: Any, ledger: Ledger, discard_damaged: bool, options: RoundsConfig) -> tuple[Progress, int]:
    """Load the last committed round. Return the run's progress, and the number of the next round."""
    commits = ledger.checkpoints.commits()
    last = commits[-1] if commits else None
    if discard_damaged:
        last = _last_good(ledger)
        if commits and last != commits[-1]:
            log.warning("continuing after round %d, the last undamaged commit", 0 if last is None else last + 1)
        ledger.checkpoints.discard_after(last)
    progress, rest = load_progress(initial, ledger, last)
    rows = ledger.checkpoints.rows(lines=False)
    ledger.checkpoints.best = Course(options, (row.metrics for row in rows)).best
    if not discard_damaged:  # `discard_damaged` has already checked the files.
        buffer.check_files(ledger.pending, rest)
    ledger.checkpoints.tidy()  # Do this after the checks, because only `discard_damaged` may delete damaged files.
    if last is None:
        return progress, 0
    log.info("resuming after round %d", last + 1)
    return progress, last + 1


def _last_good(ledger: Ledger) -> int | None:
    return ledger.checkpoints.last_good(partial(buffer.check_files, ledger.pending))


def load_progress(initial: Any, ledger: Ledger, last: int | None) -> tuple[Progress, dict[str, Any]]:
    """Load the commit of round `last`. Return the run's progress after this round, and the commit's JSON. If `last` is
    None, the progress is the state `initial` before the first round. Raises IntegrityError if the commit is damaged."""
    if last is None:
        return Progress(initial), {}
    tensors, rest = ledger.checkpoints.read(last)
    state = unpack(initial, tensors, rest)
    try:
        history: MovementHistory = adapter(MovementHistory).validate_python(rest.get(HISTORY, MovementHistory()))
        clock: float = adapter(NotNegative).validate_python(rest[CLOCK])
    except (ValidationError, KeyError) as error:
        reason = brief(error) if isinstance(error, ValidationError) else f"{error} is missing"
        raise IntegrityError(f"the commit of round {last + 1} has invalid entries: {reason}") from error
    return Progress(state, history, clock, named(rest), buffer.pending_in(rest)), rest


def _packed(progress: Progress, options: RoundsConfig) -> tuple[Params, dict[str, Any]]:
    tensors, rest = pack(progress.state)
    rest[CLOCK] = progress.clock
    if options.bound is not None:
        rest[HISTORY] = adapter(MovementHistory).dump_python(progress.history, mode="json")
    if progress.pending:
        rest[buffer.KEY] = adapter(tuple[buffer.PendingUpdate, ...]).dump_python(progress.pending, mode="json")
    if progress.states:
        rest[KEY] = {str(client): file for client, file in progress.states.items()}
    return tensors, rest


def _due(options: RoundsConfig, stored: bool, round: int, last_commit: float) -> bool:
    if options.keep_every and (round + 1) % options.keep_every == 0:
        return True
    if options.commit_every == "auto":
        return stored or time.monotonic() - last_commit >= AUTO_COMMIT_S
    return (round + 1) % options.commit_every == 0
