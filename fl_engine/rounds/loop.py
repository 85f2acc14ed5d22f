"""The loop over rounds: each is committed, then tracked. It resumes after a kill.

A round is a function of the committed state, the round number and the seed, and an unfinished round is computed again.
So a run that was killed gives the same global model, bit for bit, as one that was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fl_engine.core.contracts import Backend, Tracker, Watcher
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError, Stopped, brief
from fl_engine.core.state import pack, unpack
from fl_engine.core.types import Params
from fl_engine.rounds import pending
from fl_engine.rounds.acceptance import History
from fl_engine.rounds.checks import check_begun
from fl_engine.rounds.collect import Clients, Heard, nobody_listens
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.round import Progress, play
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.tensor_files import FILES, KEY, named
from fl_engine.training.memory import resident_peak, restart_peak

log = logging.getLogger("flexfleet")

AUTO_COMMIT_S = 2.0

HISTORY, CLOCK = "rounds/lengths", "rounds/clock"
"""Keys of a commit's JSON, beside the fields of the algorithm's state; no field can have such a name."""
HISTORIES = TypeAdapter(History)


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
    heard: Heard = nobody_listens,
) -> Any:
    """Run the rounds that are not committed yet, and return the final state.

    Args:
        run: The parts that all rounds share; `run.terms` has the last round.
        initial: The algorithm's state before round 0.
        backend: Executes assignments.
        ledger: The run's store.
        tracker: Gets the metrics of committed rounds.
        should_stop: Asked after each result.
        discard_damaged: Go back to the last good commit if the ledger is damaged.
        watcher: Gets each round, and may stop the run.
        heard: Called with the number of clients of a round whose results have arrived.

    Raises:
        Stopped: `should_stop` or `watcher` asked for it; finished rounds are committed.
        IntegrityError: The ledger is damaged.
        EnvironmentFailure: The store or the backend does not respond.
    """
    terms = run.terms
    mailbox = ledger.mailbox if terms.keep_updates or backend.durable else None
    states = ledger.states if run.client_state else None
    waiting = ledger.flights if terms.mode == "buffered" else None
    clients = Clients(backend, mailbox, should_stop, states, waiting, watcher, heard)
    kept = [files for files in (states, waiting) if files is not None]
    with told_how_to_go_on(ledger):
        progress, first = _resume(initial, ledger, discard_damaged)
        check_begun(run.algorithm, progress.state)
        del initial
        for files in kept:
            files.prune()
        rows = ledger.checkpoints.rows(lines=False)
        end = _end(terms, rows)
        tracker.metrics([(row.round + 1, row.metrics) for row in rows])
        pending: list[Row] = []
        last_commit = time.monotonic()

        def commit() -> None:
            nonlocal last_commit
            if pending:
                ledger.checkpoints.commit(pending[-1].round, *_packed(progress, terms), pending)
                for files in kept:
                    files.prune()
                ledger.checkpoints.check_lease()  # if it was replaced, its successor logs these rows
                tracker.metrics([(row.round + 1, row.metrics) for row in pending])
                pending.clear()
            last_commit = time.monotonic()

        held, before = restart_peak()
        for round in range(first, terms.stop if end is None else first):
            try:
                after, row = play(run, progress, round, clients)
                peak = resident_peak()
                row.metrics["peak_mb"] = max(peak, before) / 1e6
                row.metrics["peak_mb_rounds"] = (peak - held) / 1e6  # without libraries, data and pre-training
                stop = watcher is not None and watcher.round(round + 1, row.metrics, row.clients, after.state)
            except (IntegrityError, EnvironmentFailure):
                raise  # of the store, for one: nothing can be committed
            except Exception:  # nobody comes online any more, for one, or the watcher has failed
                commit()
                raise
            progress = after  # not before: what is committed on an error is the round before
            pending.append(row)
            over = terms.over(round + 1, progress.clock)
            if stop or over or _due(terms, backend, round, last_commit):
                commit()
            if over:
                break
            if stop:
                raise Stopped(f"stopped by a callback after round {round + 1}: resume with --resume")
        if terms.stop_simulated_s is not None:
            log.info(
                "the simulated clock is at %.1f s; rounds.stop_simulated_s = %g", progress.clock, terms.stop_simulated_s
            )
    return progress.state


def check_end(ledger: Ledger, terms: RoundsConfig, discard_damaged: bool = False) -> None:
    """Raise the ConfigError that `federate` would raise for the end in these terms, for callers that write before the
    rounds begin. Damage is left for `federate` to report."""
    with suppress(IntegrityError):
        last = _last_good(ledger) if discard_damaged else max(ledger.checkpoints.commits(), default=None)
        if last is not None and (last + 1 >= terms.stop or terms.stop_simulated_s is not None):
            _end(terms, list(islice(ledger.checkpoints.each_row(lines=False), last + 1)))


def _end(terms: RoundsConfig, rows: Sequence[Row]) -> int | None:
    """Return after how many rounds the run ends, or None if that is beyond the committed rounds `rows`. Raises
    ConfigError if more rounds are committed, or none of them was evaluated."""
    end, done = terms.end(row.metrics for row in rows), len(rows)
    if end is not None and done > end:
        raise ConfigError(f"{_what_ends(terms, end)}, but {done} rounds are committed: a run cannot go back")
    if rows and done == end and not any("avg" in row.metrics or "diverged" in row.metrics for row in rows):
        ends = _what_ends(terms, end)
        raise ConfigError(
            f"{ends}, and the {done} rounds that are committed were not evaluated: set {ends.split()[0]} to more"
        )
    return end


def _what_ends(terms: RoundsConfig, end: int) -> str:
    """The parameter that ends the run after `end` rounds, in words that begin with its name."""
    if end >= terms.stop:
        return f"rounds.stop = {terms.stop}"
    return f"rounds.stop_simulated_s = {terms.stop_simulated_s:g}, which the simulated clock passes in round {end}"


@contextmanager
def told_how_to_go_on(ledger: Ledger | None = None) -> Iterator[None]:
    """Add to an EnvironmentFailure that the run can be resumed. With `ledger`, an IntegrityError is replaced by the
    error of a lost lease if another coordinator has taken over."""
    try:
        yield
    except IntegrityError:
        if ledger is not None:
            ledger.checkpoints.check_lease()  # the coordinator that took over may have removed what is missing here
        raise
    except EnvironmentFailure as error:
        raise type(error)(f"{error}. What was committed stays: mend the cause, then go on with --resume") from error


def _resume(initial: Any, ledger: Ledger, discard_damaged: bool) -> tuple[Progress, int]:
    """Return the progress to continue from, and the round to compute next."""
    commits = ledger.checkpoints.commits()
    last = commits[-1] if commits else None
    if discard_damaged:
        last = _last_good(ledger)
        if commits and last != commits[-1]:
            log.warning("going on after round %d, the last good commit", 0 if last is None else last + 1)
        ledger.checkpoints.discard_after(last)
    progress, rest = committed(initial, ledger, last)
    if not discard_damaged:  # else `last_good` has looked
        ledger.checkpoints.rows(lines=False)  # raises where they are damaged
        pending.check(ledger.flights, rest)
    ledger.checkpoints.tidy()  # only after all was checked: without `discard_damaged`, damaged files stay as they are
    if last is None:
        return progress, 0
    log.info("resuming after round %d", last + 1)
    return progress, last + 1


def _last_good(ledger: Ledger) -> int | None:
    return ledger.checkpoints.last_good(partial(pending.check, ledger.flights))


def committed(initial: Any, ledger: Ledger, last: int | None) -> tuple[Progress, dict[str, Any]]:
    """Return the progress after round `last` and the JSON of its commit. With `last` None nothing is committed, and the
    run begins with `initial`. Raises IntegrityError."""
    if last is None:
        return Progress(initial), {}
    tensors, rest = ledger.checkpoints.read(last)
    return Progress(unpack(initial, tensors, rest), _history(rest), _clock(rest), named(rest), pending.read(rest)), rest


def _packed(progress: Progress, terms: RoundsConfig) -> tuple[Params, dict[str, Any]]:
    tensors, rest = pack(progress.state)
    rest[CLOCK] = progress.clock
    if terms.bound is not None:
        rest[HISTORY] = HISTORIES.dump_python(progress.history, mode="json")
    if progress.flying:
        rest[pending.KEY] = pending.said(progress.flying)
    if progress.states:
        rest[KEY] = FILES.dump_python(dict(progress.states), mode="json")
    return tensors, rest


def _history(rest: Mapping[str, Any]) -> History:
    try:
        return HISTORIES.validate_python(rest.get(HISTORY, History()))
    except ValidationError as error:
        said = f"stored state: {HISTORY!r} is no list of how far updates moved: {brief(error)}"
        raise IntegrityError(said) from error


def _clock(rest: Mapping[str, Any]) -> float:
    told = rest.get(CLOCK)
    if not isinstance(told, int | float) or not 0 <= told < math.inf:
        raise IntegrityError(f"stored state: {CLOCK!r} is no number of seconds: {told!r}")
    return float(told)


def _due(terms: RoundsConfig, backend: Backend, round: int, last_commit: float) -> bool:
    if terms.keep_every and (round + 1) % terms.keep_every == 0:
        return True
    if terms.commit_every == "auto":
        return terms.keep_updates or backend.durable or time.monotonic() - last_commit >= AUTO_COMMIT_S
    return (round + 1) % terms.commit_every == 0
