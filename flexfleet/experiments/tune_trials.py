"""The trials of a study: how they report their rounds, how they end, and how they are tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import isfinite
from threading import Event, Thread
from typing import Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import Diverged, EnvironmentFailure, InUse, Refused, Stopped, Unreachable, first_line
from fl_engine.data.files import OF_DISKS
from flexfleet.pipeline.evaluate import SMALLER
from flexfleet.tracking import databases

log = logging.getLogger("flexfleet")

BEAT = "beat"
"""Attribute of a running trial that its worker changes every BEAT_S seconds."""
BEAT_S = 15.0
SILENT_S = 90.0
"""Seconds without a new beat after which a trial's worker counts as gone."""
TRIED = "tried"
"""Attribute of a trial: the number of workers that have died on the same values."""
MOST_TRIED = 4
"""Values on which this many workers have died are not tried again, because they may be the cause (memory, say)."""
GOES_ON = "goes-on"
"""Attribute of a trial: the number of the interrupted trial with the same values whose runs it continues."""
DEFAULT = "default"
"""Attribute of the trial that runs the configuration unchanged: the names whose configured values are in the space."""
INFEASIBLE, DIVERGED = "infeasible", "diverged"
"""Attributes of a trial without a value: why its values give no pool, or why its training gave no result."""
MERGED = "clients_trained"
"""Measurement of a round: the number of updates that were merged."""


class Pruned(Stopped):
    """A trial's run is worse than the others at the same round."""


class TakenOver(Stopped):
    """Another worker has given the trial's values back, because it believed that this worker is gone."""


def begun(study: Any) -> list[Any]:
    """Return the trials that are done or running."""
    from optuna.trial import TrialState

    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    return [*study.get_trials(deepcopy=False, states=states)]


def done(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return [*study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))]


def is_default(trial: Any) -> bool:
    """Return whether the trial runs the configuration unchanged."""
    return DEFAULT in trial.user_attrs


def runs_of(trial: Any) -> int:
    """Return the number in the names of the trial's runs."""
    return int(trial.user_attrs.get(GOES_ON, trial.number))


def surplus(study: Any, trial: Any, wanted: int) -> bool:
    """Return whether the wanted number of trials had begun before this one, as when two workers both saw that one trial
    was missing. Trials that wait to be tried again count too."""
    from optuna.trial import TrialState

    states = tuple(state for state in TrialState if state != TrialState.FAIL)
    before = [t for t in study.get_trials(deepcopy=False, states=states) if t.number < trial.number]
    return len(before) >= wanted


# --------------------------------------------------------------------------------------------------- rounds
def check_converges(value: float | None, merged: float, metric: str) -> None:
    """Raise Diverged if no update was merged so far, or if the run's metric is not finite (None in histories)."""
    if not merged:
        raise Diverged(
            "no update was merged, so the model is untrained; the log says why clients failed. If their training "
            f"diverged: {SMALLER[0].lower()}{SMALLER[1:]}"
        )
    if value is None or not isfinite(value):
        raise Diverged(f"the model has diverged: {metric} of the last round is not a finite number. {SMALLER}")


class Reporter(Tracker):
    """Reports a run's metric to its trial. Raises Pruned if the trial is worse than the others, and Diverged instead if
    the metric is not finite or no update was merged so far."""

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


# ----------------------------------------------------------------------------------------------------- ends
@contextmanager
def beating(trial: Any) -> Iterator[None]:
    """Change the trial's beat every BEAT_S seconds while the context is open."""
    from optuna.exceptions import OptunaError, UpdateFinishedTrialError
    from sqlalchemy.exc import SQLAlchemyError

    over = Event()

    def beat() -> None:
        for number in count():
            try:
                trial.set_user_attr(BEAT, number)
            except UpdateFinishedTrialError:
                return  # the worker notices it after the next round
            except (OptunaError, SQLAlchemyError, OSError) as error:
                log.warning("a heartbeat of the trial was not stored: %s", first_line(databases.cause(error)))
            if over.wait(BEAT_S):
                return

    thread = Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def give_back_stale(study: Any, seen: dict[int, tuple[Any, float]]) -> list[int]:
    """Give back the trials whose beat has not changed for SILENT_S, and return their numbers.

    `seen`, kept from call to call: each trial's last beat and when it was seen first, so that clocks of two machines
    are never compared.
    """
    now, stale = time.monotonic(), []
    for trial in _running(study):
        beat = trial.user_attrs.get(BEAT)
        before, since = seen.get(trial.number, (None, now))
        if trial.number not in seen or before != beat:
            seen[trial.number] = (beat, now)
        elif now - since >= SILENT_S:
            stale.append(trial)
    return _given_back([trial for trial in stale if give_back(study, trial, died=True, goes_on=False)])


def give_back_all(study: Any) -> list[int]:
    """Give back all running trials of a study that no other process works on, and return their numbers."""
    return _given_back([trial for trial in _running(study) if give_back(study, trial, died=True, goes_on=True)])


def _running(study: Any) -> Any:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def _given_back(trials: Sequence[Any]) -> list[int]:
    numbers = [trial.number for trial in trials]
    if numbers:
        log.info("trials whose worker is gone are tried again: %s", ", ".join(map(str, numbers)))
    return numbers


def give_back(study: Any, trial: Any, died: bool, goes_on: bool) -> bool:
    """Mark the trial as failed, and enqueue its values; False if another worker did that.

    Args:
        died: The values may be the reason why the trial's worker has ended.
        goes_on: Continue the trial's runs. False if its worker may still write into them, or if they may be wrong.
    """
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


def meets_any_values(error: BaseException) -> bool:
    """Return whether this error could have ended a trial of any values: a stop, a server that is away or refuses, a
    full disk."""
    cause = error.__cause__ if isinstance(error, EnvironmentFailure) else error
    full = isinstance(cause, OSError) and cause.errno in OF_DISKS
    return full or isinstance(error, Stopped | KeyboardInterrupt | Unreachable | InUse | Refused)


def give_up(trial: Any, outcome: str, why: Exception) -> Any:
    """Store why the trial has no value, under the attribute `outcome`. Return the state to end it with."""
    from optuna.trial import TrialState

    trial.set_user_attr(outcome, str(why))
    trial.set_constraint("possible", 1.0)  # the sampler avoids such values
    return TrialState.PRUNED


def drop(study: Any, trial: Any) -> None:
    """Mark the trial as failed, without trying its values again."""
    import optuna

    study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
