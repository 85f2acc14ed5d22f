"""Searching hyper-parameters with Optuna: the space, the study, and a trial's report of each round.

A study searches values of dotted names of the configuration, so it can tune every parameter of every algorithm. This
module draws values, sets them, checks sizes, and prunes; its caller (`flexfleet.studies.study`) trains the trials.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from typing import Any

from pydantic import ValidationError

from fl_engine.core.contracts import ModelFamily, Tracker
from fl_engine.core.errors import (
    BadInput,
    ConfigError,
    EnvironmentFailure,
    InUse,
    Stopped,
    Unreachable,
    brief,
    first_line,
    masked,
)
from fl_engine.core.search import Interval, Searched
from fl_engine.core.types import Pool
from fl_engine.data.files import OF_DISKS
from fl_engine.fleet import devices
from fl_engine.selection.capacity import lacks
from flexfleet.config import Config, Range, algorithm, parse, set_path
from flexfleet.files.begun import go_on

log = logging.getLogger("flexfleet")

WORKER = "worker"
"""Attribute of a trial: which process runs it."""
BEAT = "beat"
"""Attribute of a running trial that its worker changes every BEAT_S seconds."""
BEAT_S = 15.0
SILENT_S = 90.0
"""Seconds after which a worker whose process cannot be seen, as on another machine, counts as gone, if its trial still
has the same beat."""
LOCKED_S = 60
"""Seconds that a worker waits for the others' transactions on an SQLite file."""
TRIED = "tried"
"""Attribute of a trial: how many workers have died with the same values before it."""
INFEASIBLE, DIVERGED = "infeasible", "diverged"
"""Attributes of a trial without a value: why its values give no pool, and how its model diverged."""
MOST_TRIED = 4
"""Values on which this many workers have died are not tried again: the values may be the cause (memory, say)."""
GO_ON = re.compile("(go on|resume) with --resume")
"""How the run of a trial says that it goes on, which it does with its study."""
Values = Mapping[str, Any]


class Pruned(Stopped):
    """A trial's run is behind the others at the same round."""


class Taken(Stopped):
    """The other workers believed that a trial's worker is gone, and another one tries its values again."""


# ------------------------------------------------------------------------------------------------------ the space
def space_of(config: Config, pool: Pool) -> dict[str, Range]:
    """`tune.space`, else the space that the algorithm declares (`pool` is the default's). Raises ConfigError if there
    is none, or for a range that is none."""
    if config.tune.space:
        check_whole(config.tune.space)
        return dict(config.tune.space)
    space = {path: _range(path, each) for path, each in _declared(config, pool).items()}
    check_whole(space)
    if not space:
        raise ConfigError(
            f"tune.space is empty, and {config.algorithm['name']} declares no search space of its own as it is "
            "configured: say what to search, a.b: {low, high}"
        )
    return space


def check_whole(space: Mapping[str, Range]) -> None:
    """Raises ConfigError for a range of whole numbers whose ends are none: what is drawn would lie outside of it. (Not
    when the configuration is read: records of earlier versions have such ranges.)"""
    for path, each in space.items():
        ends = [end for end in (each.low, each.high) if end is not None]
        if each.whole and not all(end.is_integer() for end in ends):
            raise ConfigError(f"tune.space, {path}: low and high are whole numbers where whole is true, got {ends}")


def _range(path: str, each: Interval) -> Range:
    try:
        return Range(low=each.low, high=each.high, log=each.log, whole=each.whole, choices=each.choices)
    except ValidationError as error:
        raise ConfigError(f"the search space of the algorithm, {path}: {brief(error)}, got {each}") from error


def _declared(config: Config, pool: Pool) -> dict[str, Interval]:
    """The search space that the algorithm declares, by dotted names; empty if it declares none."""
    chosen = algorithm(config)
    space = chosen.search_space(pool) if isinstance(chosen, Searched) else {}
    return {f"algorithm.{path}": interval for path, interval in space.items()}


def unchanged(config: Config, space: Mapping[str, Range], pool: Pool) -> dict[str, Any]:
    """The configuration's values of the names in the space. If a value is null, the algorithm may say which value it
    uses instead (`pool` is the default's); else it is left out."""
    declared = _declared(config, pool)
    values = {}
    for path in space:
        here = configured(config, path)
        if here is None and path in declared:
            here = declared[path].start
        if here is not None:
            values[path] = here
    return values


def defaults(config: Config, space: Mapping[str, Range], pool: Pool) -> dict[str, Any]:
    """The first trial: the `unchanged` values. A value outside the space is left out, so that it is drawn, which the
    log says: a space may well exclude the default."""
    values = {path: here for path, here in unchanged(config, space, pool).items() if _within(here, space[path])}
    if drawn := [f"{path} ({configured(config, path)})" for path in space if path not in values]:
        log.info(
            "trial 0 is not the default: what is configured lies outside the search space, so it draws %s",
            ", ".join(drawn),
        )
    return values


def configured(config: Config, path: str) -> Any:
    """The configuration's value of a parameter; None if it has none."""
    section, *rest = path.split(".")
    here: Any = vars(algorithm(config)) if section == "algorithm" else config.model_dump(mode="json").get(section)
    for part in rest:
        here = _inside(here, part)
    return here


def _inside(value: Any, part: str) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value[int(part)] if part.isdecimal() and int(part) < len(value) else None
    return value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)


def _within(value: Any, range: Range) -> bool:
    if range.choices:
        return value in range.choices
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    assert range.low is not None and range.high is not None
    return numeric and range.low <= value <= range.high


def suggest(trial: Any, space: Mapping[str, Range]) -> dict[str, Any]:
    """Draws a value for each name."""
    values = {}
    for path, r in space.items():
        if r.choices:
            values[path] = trial.suggest_categorical(path, list(r.choices))
        elif r.whole:
            values[path] = trial.suggest_int(path, int(r.low or 0), int(r.high or 0), log=r.log)
        else:
            values[path] = trial.suggest_float(path, r.low, r.high, log=r.log)
    return values


def applied(config: Config, values: Values) -> Config:
    """The configuration with these values, checked. `a.b.0` and `a.b.1` set the whole list a.b."""
    out, lists = config.model_dump(mode="json"), dict[str, dict[int, Any]]()
    for path, value in values.items():
        parent, _, last = path.rpartition(".")
        if last.isdecimal():
            lists.setdefault(parent, {})[int(last)] = value
        else:
            set_path(out, path, value)
    for path, items in lists.items():
        if sorted(items) != list(range(len(items))):
            raise ConfigError(f"tune.space: of {path} {sorted(items)} are searched: all of a list have to be")
        set_path(out, path, [items[i] for i in range(len(items))])
    return parse(out)


def check_names(config: Config) -> None:
    """Raises ConfigError where a name in `tune.space` takes none of its values: it is misspelt, say. Names may need
    each other, as an option and what has it, so what can be together is not looked at one by one."""
    values = {
        path: list(r.choices) or [int(v) if r.whole else v for v in (r.low or 0, r.high or 0)]
        for path, r in config.tune.space.items()
    }
    most = max(map(len, values.values()), default=0)
    if any(_wrong(config, {path: of[min(k, len(of) - 1)] for path, of in values.items()}) is None for k in range(most)):
        return
    for path, of in values.items():
        if not path.rpartition(".")[2].isdecimal() and all(wrongs := [_wrong(config, {path: value}) for value in of]):
            raise ConfigError(f"tune.space: {path}: {wrongs[0]}")


def _wrong(config: Config, values: Values) -> str | None:
    try:
        applied(config, values)
    except BadInput as error:
        return str(error)
    return None


def excess(pool: Pool, config: Config, family: ModelFamily) -> dict[str, float]:
    """By how many points (% of the full model) each level is larger than its tier can hold; 0 or less: it fits. Level i
    belongs to tier i if there are as many levels as tiers; else only the smallest level has to fit the weakest tier.

    The full model is left out, since no search makes it smaller; so is a level that is sent alone: its method ignores
    memory on purpose, or asks only devices that hold it, and refuses a fleet that has none."""
    levels = sorted(model.share for model in pool if model.dispatched)
    if len(levels) == 1:
        return {}
    named = config.fleet.tiers
    configured = devices.named(named) if isinstance(named, str) else named
    tiers = sorted(
        (devices.device_of(0, devices.holding(tier, family)) for tier in configured), key=lambda device: device.most
    )
    if len(levels) != len(tiers):
        levels, tiers = levels[:1], tiers[:1]
    pairs = zip(levels, tiers, strict=True)
    return {f"size/{device.tier}": lacks(device, level) for level, device in pairs if level < 1}


# ------------------------------------------------------------------------------------------------------ the study
def address(config: Config) -> str | None:
    """The address of the database that workers on several machines share; None: the study is a file in its folder."""
    return config.tune.storage or os.environ.get("FLEXFLEET_TUNE_STORAGE") or None


def open_study(config: Config, folder: Path, name: str, *, begun: bool = False) -> Any:
    """The study in `tune.storage`, else in the environment's FLEXFLEET_TUNE_STORAGE (an address that nobody shall see),
    else in `<folder>/study.log`. Creates it if it is missing, unless it has `begun`. Raises ConfigError if the storage
    cannot be used."""
    import optuna
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = address(config)
    where = f"tune.storage = {url}" if url else f"{folder / 'study.log'}"
    by_clock = config.rounds.stop_simulated_s is not None  # then rounds.stop says little of how many there are
    warm_up = 1 if by_clock else max(1, config.rounds.stop // 4)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warm_up)
    try:
        storage = _data_base(url) if url else _file(folder)
        settings = {"storage": storage, "study_name": name, "sampler": sampler(config.seed), "pruner": pruner}
        if begun:
            return optuna.load_study(**settings)
        return optuna.create_study(**settings, direction="maximize", load_if_exists=True)
    except (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError, ValueError, KeyError) as error:
        if begun and isinstance(error, optuna.exceptions.StorageInternalError | DBAPIError):
            raise  # the storage was reached before: `answering` reports the error
        if begun and isinstance(error, KeyError):
            raise ConfigError(
                f"{masked(where)} has no study {name!r}, though it was begun: give the address of a database that "
                "every worker reaches, no file of one machine"
            ) from error
        raise ConfigError(f"{masked(where)} cannot be used: {first_line(error)}") from error


def _file(folder: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    folder.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(folder / "study.log")))


def _data_base(url: str) -> Any:
    """The storage at this address. Optuna gives a waiting trial to one worker alone by locking its row; SQLite has no
    locks for rows, so two workers could get the same trial. Here its transactions lock the whole file from their first
    statement on (SQLAlchemy's recipe for serializable SQLite)."""
    from optuna.storages import RDBStorage
    from sqlalchemy import event, make_url

    if make_url(url).get_backend_name() != "sqlite":
        return RDBStorage(url)
    storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCKED_S}})

    def no_implicit_begin(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    event.listen(storage.engine, "connect", no_implicit_begin)
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    storage.engine.dispose()  # closes the connections that were opened before
    return storage


@contextmanager
def answering(config: Config) -> Iterator[None]:
    """Around work on a study that has begun. Raises Unreachable if its database does not answer."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        where = masked(address(config) or "file")
        raise Unreachable(f"the study's database ({where}) does not answer: {masked(first_line(error))}") from error


@contextmanager
def told_how_to_go_on(id: str) -> Iterator[None]:
    """A stop or an EnvironmentFailure inside says how the study goes on."""
    try:
        yield
    except (Stopped, EnvironmentFailure) as error:
        said = GO_ON.sub(go_on(id), str(error))
        raise type(error)(said if said != str(error) else f"{said}: {go_on(id)}") from error
    except KeyboardInterrupt:
        log.warning("interrupted: %s", go_on(id))
        raise


def sampler(seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed % 2**32)


TOKEN = token_hex(8)
"""Tells this process from others, in place of when it began, where there is no /proc (macOS)."""


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


# ----------------------------------------------------------------------------------------------- workers that end
def clear_stale(study: Any, seen: dict[int, tuple[Any, float]] | None = None) -> list[int]:
    """Marks trials whose worker is gone as failed, so that their values are tried again. Gives their numbers.

    A worker of this machine is gone if its process is gone; one of another machine is gone if its trial's beat has not
    changed for SILENT_S, and so is one of this machine where there is no /proc (macOS). `seen`, kept from call to call,
    is which beat each trial had and since when, so that clocks of two machines are never compared.
    """
    from optuna.trial import TrialState

    gone, now, seen = [], time.monotonic(), {} if seen is None else seen
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        signs = (trial.user_attrs.get(WORKER), trial.user_attrs.get(BEAT))
        before, since = seen.get(trial.number, (None, now))
        if before != signs:
            seen[trial.number], since = (signs, now), now
        host, _, rest = str(signs[0] or "").partition(":")
        ended = host == socket.gethostname() and _ended(*rest.split(":"))
        if (ended or now - since >= SILENT_S) and give_back(study, trial, trial.user_attrs.get(TRIED, 0) + 1):
            gone.append(trial.number)
    return gone


def tried(trial: Any, error: BaseException) -> int:
    """How many workers have died with the trial's values, now that this one ends with `error`. A stop, a server that is
    gone and a full disk would have met any values."""
    cause = error.__cause__ if isinstance(error, EnvironmentFailure) else error
    full = isinstance(cause, OSError) and cause.errno in OF_DISKS
    elsewhere = full or isinstance(error, Stopped | KeyboardInterrupt | Unreachable | InUse)
    return int(trial.user_attrs.get(TRIED, 0)) + (not elsewhere)


def give_back(study: Any, trial: Any, tried: int) -> bool:
    """Marks the trial as failed, and puts its values first among those to try; False: another worker did that."""
    import optuna

    try:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        return False
    values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}  # drawn, or set before the trial
    if tried < MOST_TRIED and values:
        study.enqueue_trial(values, user_attrs={TRIED: tried})
    elif values:
        log.warning("%d workers have died on these values, which are not tried again: %s", tried, values)
    return True


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
                log.warning("no sign of life got through, the next may: %s", masked(first_line(error)))

    thread = Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def surplus(study: Any, trial: Any, wanted: int) -> bool:
    """Whether the wanted number of trials had begun before this one: two workers may both have seen that one trial was
    missing. Trials that wait to be tried again count too, since they had begun before."""
    from optuna.trial import TrialState

    states = tuple(state for state in TrialState if state != TrialState.FAIL)
    before = [t for t in study.get_trials(deepcopy=False, states=states) if t.number < trial.number]
    return len(before) >= wanted


class Reporter(Tracker):
    """Reports a run's metric to its trial, and raises Pruned where the trial is behind. The trial has its
    parameters, and its worker tells the study how it ended."""

    def __init__(self, trial: Any, metric: str) -> None:
        self._trial, self._metric = trial, metric

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        for step, values in rows:
            if self._metric in values:
                try:
                    self._trial.report(values[self._metric], step)
                except UpdateFinishedTrialError as error:
                    raise Taken("another worker tries these values again") from error
                if self._trial.should_prune():
                    raise Pruned(f"pruned after round {step}")
