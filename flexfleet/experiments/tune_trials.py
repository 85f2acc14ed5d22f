"""The trials of a study: who runs them, how they report their rounds, and how they end or are tried again."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import isfinite
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from typing import Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import Diverged, EnvironmentFailure, InUse, Refused, Stopped, Unreachable, first_line
from fl_engine.data.files import OF_DISKS
from flexfleet.pipeline.evaluate import SMALLER
from flexfleet.tracking import databases

log = logging.getLogger("flexfleet")

WORKER = "worker"
"""Attribute of a trial: which process runs it."""
BEAT = "beat"
"""Attribute of a running trial that its worker changes every BEAT_S seconds."""
BEAT_S = 15.0
SILENT_S = 90.0
"""Seconds after which a worker whose process cannot be seen, as on another machine, counts as gone, if its trial still
has the same beat."""
TRIED = "tried"
"""Attribute of a trial: how many workers have died with the same values before it."""
GOES_ON = "goes-on"
"""Attribute of a trial: the number of an interrupted one with the same values, whose runs it goes on with."""
DEFAULT = "default"
"""Attribute of the trial that runs the configuration unchanged: the names whose configured values lie in the space."""
INFEASIBLE, DIVERGED = "infeasible", "diverged"
"""Attributes of a trial without a value: the reason why its values give no pool, or why its training gave no result."""
MERGED = "clients_trained"
"""Measurement of a round: the number of updates that were merged."""
MOST_TRIED = 4
"""Values on which this many workers have died are not tried again: the values may be the cause (memory, say)."""
TOKEN = token_hex(8)
"""Tells this process from others, in place of when it began, where there is no /proc (macOS)."""


class Pruned(Stopped):
    """A trial's run is behind the others at the same round."""


class TakenOver(Stopped):
    """The other workers believed that a trial's worker is gone, and another one tries its values again."""


def begun(study: Any) -> list[Any]:
    """The trials that count: done, or running."""
    from optuna.trial import TrialState

    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    return [*study.get_trials(deepcopy=False, states=states)]


def done(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return [*study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))]


def surplus(study: Any, trial: Any, wanted: int) -> bool:
    """Whether the wanted number of trials had begun before this one: two workers may both have seen that one trial was
    missing. Trials that wait to be tried again count too, since they had begun before."""
    from optuna.trial import TrialState

    states = tuple(state for state in TrialState if state != TrialState.FAIL)
    before = [t for t in study.get_trials(deepcopy=False, states=states) if t.number < trial.number]
    return len(before) >= wanted


def check_converges(value: float | None, merged: float, metric: str) -> None:
    """Raises Diverged if `merged`, the number of updates merged so far, is 0, or if `value`, the run's metric, is not
    finite (None: histories leave such values out)."""
    if not merged:
        raise Diverged(
            "no update was merged, so the model is untrained; the log says why clients failed. If their training "
            f"diverged: {SMALLER[0].lower()}{SMALLER[1:]}"
        )
    if value is None or not isfinite(value):
        raise Diverged(f"the model has diverged: {metric} of the last round is not a finite number. {SMALLER}")


class Reporter(Tracker):
    """Reports a run's metric to its trial. Raises Pruned if the trial is behind the others, and Diverged instead if the
    metric is not finite or no update was merged so far."""

    def __init__(self, trial: Any, metric: str) -> None:
        self._trial, self._metric, self._merged = trial, metric, 0.0

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        for step, values in rows:
            self._merged += values.get(MERGED, 0)
            if self._metric in values:
                try:
                    self._trial.report(values[self._metric], step)
                except UpdateFinishedTrialError as error:
                    raise TakenOver("another worker tries these values again") from error
                if self._trial.should_prune():
                    check_converges(values[self._metric], self._merged, self._metric)
                    raise Pruned(f"pruned after round {step}")


# ----------------------------------------------------------------------------------------------- workers that end
def me() -> str:
    """A name of this process that no later process gets; a process number alone is used again."""
    return f"{socket.gethostname()}:{os.getpid()}:{_began('self') or TOKEN}"


def _began(pid: str) -> str | None:
    """When a process of this machine began, in ticks of the machine's clock; None if there is none of this number, and
    where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def clear_stale(study: Any, folder: Path, seen: dict[int, tuple[Any, float]] | None = None) -> list[int]:
    """Marks trials whose worker is gone as failed, so that their values are tried again. Gives their numbers. `folder`:
    of the study, on this machine.

    A worker of this machine is gone if its process is gone, or if it has left word (`cut_off`); one of another machine
    is gone if its trial's beat has not changed for SILENT_S, and so is one of this machine where there is no /proc
    (macOS). `seen`, kept from call to call, is which beat each trial had and since when, so that clocks of two machines
    are never compared.
    """
    from optuna.trial import TrialState

    gone, now, seen = [], time.monotonic(), {} if seen is None else seen
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        signs = (trial.user_attrs.get(WORKER), trial.user_attrs.get(BEAT))
        before, since = seen.get(trial.number, (None, now))
        if before != signs:
            seen[trial.number], since = (signs, now), now
        host, _, rest = str(signs[0] or "").partition(":")
        left_word = _cut_off(folder, trial.number).exists()
        ended = left_word or (host == socket.gethostname() and _ended(*rest.split(":")))
        if (ended or now - since >= SILENT_S) and give_back(study, trial, died=not left_word, goes_on=ended):
            gone.append(trial.number)
    if gone:
        log.info("trials whose worker is gone are tried again: %s", ", ".join(map(str, gone)))
    return gone


def meets_any_values(error: BaseException) -> bool:
    """Whether this would have ended a trial of any values: a stop, a server that is gone or refuses something, a full
    disk."""
    cause = error.__cause__ if isinstance(error, EnvironmentFailure) else error
    full = isinstance(cause, OSError) and cause.errno in OF_DISKS
    return full or isinstance(error, Stopped | KeyboardInterrupt | Unreachable | InUse | Refused)


def is_default(trial: Any) -> bool:
    """Whether the trial runs the configuration unchanged."""
    return DEFAULT in trial.user_attrs


def runs_of(trial: Any) -> int:
    """The number in the names of the trial's runs."""
    return int(trial.user_attrs.get(GOES_ON, trial.number))


def give_back(study: Any, trial: Any, died: bool, goes_on: bool) -> bool:
    """Marks the trial as failed, and puts its values first among those to try; False: another worker did that.

    `died`: the values may be why its worker has ended. `goes_on`: with its runs; they begin anew where their worker is
    silent, and may still write into them, and where they themselves may be what is wrong."""
    import optuna

    try:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        return False
    values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}  # drawn, or set before the trial
    tried = int(trial.user_attrs.get(TRIED, 0)) + died
    default = {DEFAULT: trial.user_attrs[DEFAULT]} if is_default(trial) else {}
    if tried < MOST_TRIED and (values or default):
        runs = {GOES_ON: runs_of(trial)} if goes_on else {}
        study.enqueue_trial(values, user_attrs={TRIED: tried, **default, **runs})
    elif values or default:
        log.warning("%d workers have died on these values, which are not tried again: %s", tried, values)
    return True


def cut_off(folder: Path, number: int) -> None:
    """Leaves word in the study's folder that a trial was interrupted, and not given back since the study's database
    does not answer: for whoever resumes the study, its values have ended no worker."""
    _cut_off(folder, number).parent.mkdir(parents=True, exist_ok=True)
    _cut_off(folder, number).touch()


def _cut_off(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number}.cut-off"


def give_up(trial: Any, outcome: str, why: Exception) -> Any:
    """Says why a trial has no value, under `outcome`, an attribute of it. Gives its state: done, and no trial whose
    values are to be followed."""
    from optuna.trial import TrialState

    trial.set_user_attr(outcome, str(why))
    trial.set_constraint("possible", 1.0)
    return TrialState.PRUNED


def drop(study: Any, trial: Any) -> None:
    """Marks the trial as failed; nobody tries its values again."""
    import optuna

    study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)


def _ended(pid: str, began: str) -> bool:
    """Whether a process of this machine is known to be gone. Nothing is known where there is no /proc."""
    return _began("self") is not None and _began(pid) != began


@contextmanager
def beating(trial: Any) -> Iterator[None]:
    """Within this context the trial's worker gives signs of life."""
    from optuna.exceptions import OptunaError, UpdateFinishedTrialError
    from sqlalchemy.exc import SQLAlchemyError

    over = Event()

    def beat() -> None:
        for number in count():
            if over.wait(BEAT_S):
                return
            try:
                trial.set_user_attr(BEAT, number)
            except UpdateFinishedTrialError:
                return  # the worker sees it after the next round
            except (OptunaError, SQLAlchemyError, OSError) as error:
                log.warning("no sign of life got through, the next may: %s", first_line(databases.cause(error)))

    thread = Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
