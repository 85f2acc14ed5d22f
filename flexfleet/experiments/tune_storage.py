"""The storage of a study (a file in its folder, or a database that workers share), and its MLflow run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    Refused,
    Stopped,
    Unreachable,
    UnreachableAddress,
    first_line,
    masked,
)
from fl_engine.core.text import at_home
from flexfleet.config import Config
from flexfleet.files.run_folder import go_on
from flexfleet.tracking import databases, server
from flexfleet.tracking.record import tracker
from flexfleet.tracking.trackers import TOKEN, MLflow

LOCKED_S = 60
"""Seconds that a worker waits for the others' transactions on an SQLite file."""


def address(config: Config) -> str | None:
    """Return the address of the database that workers share; None: the study is a file in its folder."""
    return config.tune.storage or at_home(os.environ.get("FLEXFLEET_TUNE_STORAGE", "")) or None


def open_study(config: Config, folder: Path, name: str, *, begun: bool = False) -> Any:
    """Open the study in `tune.storage`, else in FLEXFLEET_TUNE_STORAGE (a secret), else in `<folder>/study.log`.

    A missing study is created, unless it has `begun`. Raises ConfigError if the storage cannot be used,
    UnreachableAddress if a database does not answer.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = address(config)
    where = f"tune.storage = {url}" if url else f"{folder / 'study.log'}"
    databases.check_spelling("tune.storage", url or "")
    by_clock = config.rounds.stop_simulated_s is not None  # then the number of rounds is unknown
    warm_up = 1 if by_clock else max(1, config.rounds.stop // 4)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warm_up)
    try:
        storage = _data_base(url, begun) if url else _file(folder)
        settings = {"storage": storage, "study_name": name, "sampler": sampler(config.seed), "pruner": pruner}
        if begun:
            return optuna.load_study(**settings)
        return optuna.create_study(**settings, direction="maximize", load_if_exists=True)
    except (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError, ValueError, KeyError) as error:
        if begun and databases.is_away(error):
            raise  # `answering` reports an outage during the study
        if begun and isinstance(error, KeyError):
            raise ConfigError(
                f"{masked(where)} does not have the study {name!r}. Set the address of a database that every worker "
                "reaches, not of a file of one machine"
            ) from error
        kind = UnreachableAddress if databases.is_away(error) else ConfigError
        raise kind(f"{masked(where)} cannot be used: {first_line(databases.cause(error))}") from error


def _file(folder: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    folder.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(folder / "study.log")))


def _data_base(url: str, begun: bool) -> Any:
    """Return the storage at this address; create the folder of an SQLite file, unless the study has `begun`.

    Optuna locks a waiting trial's row, so that only one worker gets the trial. SQLite cannot lock rows, so its
    transactions lock the whole file from their first statement on (SQLAlchemy's recipe for serializable SQLite).
    """
    from optuna.storages import RDBStorage
    from sqlalchemy import event, make_url

    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        # After a restart of the database, the next transaction makes a new connection.
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    if not begun and parsed.database and not parsed.database.startswith((":", "file:")):
        with suppress(OSError):  # SQLite reports what it cannot open
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCKED_S}})

    def no_implicit_begin(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    event.listen(storage.engine, "connect", no_implicit_begin)
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    storage.engine.dispose()  # closes the connections that were opened before
    return storage


@contextmanager
def answering(config: Config) -> Iterator[None]:
    """Translate errors of the database of a study that has begun: Unreachable if it does not answer, Refused if it
    refuses."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        where, said = masked(address(config) or "file"), first_line(databases.cause(error))
        if databases.is_away(error):
            raise Unreachable(f"the study's database ({where}) does not answer: {said}") from error
        raise Refused(f"the study's database ({where}) refuses: {said}") from error


@contextmanager
def told_how_to_go_on(id: str) -> Iterator[None]:
    """Add the way to continue the study to a stop or an EnvironmentFailure."""
    try:
        yield
    except (Stopped, EnvironmentFailure) as error:
        raise type(error)(f"{error}: {go_on(id)}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(go_on(id)) from None


def sampler(seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed % 2**32)


PARENT = "mlflow-run"
"""Attribute of the study: the MLflow run that is the parent of the trials' runs."""


def parent(config: Config, study: Any, given: Mapping[str, str]) -> MLflow | None:
    """Begin or continue the study's MLflow run, with the tags `given`. The study stores a token first, so that a
    resumed study finds an MLflow run that began when MLflow stopped answering."""
    id, known = study.study_name, study.user_attrs.get(PARENT)
    if known is None and TOKEN not in study.user_attrs:
        study.set_user_attr(TOKEN, uuid.uuid4().hex)
    token = study.user_attrs.get(TOKEN, "")
    tags = {"flexfleet.study": id, "algorithm": str(config.algorithm["name"]), TOKEN: token, **given}
    return tracker(config, f"study {id}", tags, known)


def end_left(of: MLflow, study: Any) -> None:
    """End the MLflow runs of finished trials that are still running, because MLflow did not answer when they ended.
    `of`: the study's MLflow run."""
    with server.answering(of.uri, "does not end the runs of trials that are over"):
        running = f"attributes.status = 'RUNNING' and tags.`flexfleet.study` = '{study.study_name}'"
        for run in of.client.search_runs([of.experiment_id], running):
            if run.data.tags.get(server.PARENT) == of.root and "flexfleet.trial" in run.data.tags:
                of.client.set_terminated(run.info.run_id, "KILLED")


def tags(study: Any, **more: str) -> dict[str, str]:
    parent = study.user_attrs.get(PARENT)
    of = {} if parent is None else {server.PARENT: str(parent)}
    return {**of, "flexfleet.study": study.study_name, **{f"flexfleet.{key}": value for key, value in more.items()}}
