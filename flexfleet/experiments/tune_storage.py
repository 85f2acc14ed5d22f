"""Open the storage of a study (a file or a database), and start the MLflow run of the study."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, Refused, Unreachable, UnreachableAddress, first_line, masked
from fl_engine.core.text import at_home
from flexfleet.config import Config
from flexfleet.tracking import databases, record, server
from flexfleet.tracking.trackers import NAME, TOKEN, MLflow

LOCKED_S = 60
"""Maximum number of seconds that a worker waits for a lock on an SQLite file."""
PARENT = "mlflow-run"
"""Attribute of the study with the ID of the MLflow run that is the parent of all trials."""


def address(config: Config) -> str | None:
    """Return the address of the study's database; None if the study is stored in a file."""
    return config.tune.storage or at_home(os.environ.get("FLEXFLEET_TUNE_STORAGE", "")) or None


def open_study(config: Config, folder: Path, name: str, *, begun: bool = False) -> Any:
    """Open the study in `tune.storage` or FLEXFLEET_TUNE_STORAGE. If both are unset, use `<folder>/study.log`.

    A missing study is created unless `begun` is True. Raises ConfigError if the storage cannot be used, and
    UnreachableAddress if the database is unreachable.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = address(config)
    where = f"tune.storage = {url}" if url else f"{folder / 'study.log'}"
    databases.check_spelling("tune.storage", url or "")
    unknown = config.rounds.simulated_limit is not None or config.rounds.until is not None  # the number of rounds
    warm_up = 1 if unknown else max(1, config.rounds.stop // 4)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warm_up)
    try:
        if url:
            storage = _data_base(url, begun)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
            storage = optuna.storages.JournalStorage(backend)
        settings = {"storage": storage, "study_name": name, "sampler": sampler(config.seed), "pruner": pruner}
        if begun:
            return optuna.load_study(**settings)
        return optuna.create_study(**settings, direction="maximize", load_if_exists=True)
    except (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError, ValueError, KeyError) as error:
        if begun and databases.is_away(error):
            raise  # the caller's `answering` block reports the outage
        if begun and isinstance(error, KeyError):
            raise ConfigError(
                f"{masked(where)} does not have the study {name!r}. Set the address of a database that every worker "
                "can reach, not of a file on one machine",
                path="tune.storage",
            ) from error
        kind = UnreachableAddress if databases.is_away(error) else ConfigError
        message = f"{masked(where)} cannot be used: {first_line(databases.cause(error))}"
        raise kind(message, path="tune.storage") from error


def _data_base(url: str, begun: bool) -> Any:
    """Open the database at this address. The folder of an SQLite file is created unless `begun` is True.

    Optuna locks the database row of a waiting trial, so that only one worker runs the trial. SQLite cannot lock rows,
    so transactions must lock the whole file from the first statement on (SQLAlchemy's recipe for serializable SQLite).
    """
    from optuna.storages import RDBStorage
    from sqlalchemy import event, make_url

    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        # With pool_pre_ping, SQLAlchemy reconnects after a restart of the database.
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    if not begun and parsed.database and not parsed.database.startswith((":", "file:")):
        with suppress(OSError):  # if this fails, opening the file reports the error
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCKED_S}})

    def no_implicit_begin(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    event.listen(storage.engine, "connect", no_implicit_begin)
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    storage.engine.dispose()  # close connections that were opened without the listeners
    return storage


@contextmanager
def answering(config: Config) -> Iterator[None]:
    """Raise Unreachable instead of a database error if the database does not respond, and Refused for other errors."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        where, reason = masked(address(config) or "file"), first_line(databases.cause(error))
        if databases.is_away(error):
            raise Unreachable(f"the study's database ({where}) does not answer: {reason}") from error
        raise Refused(f"the study's database ({where}) rejected a request: {reason}") from error


def sampler(seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed % 2**32)


def parent(config: Config, study: Any, given: Mapping[str, str]) -> MLflow | None:
    """Start or continue the MLflow run of the study, and add the tags `given`. Before that, store a token in the study,
    so that the MLflow run can be found even if its ID could not be stored."""
    id, known = study.study_name, study.user_attrs.get(PARENT)
    if known is None and TOKEN not in study.user_attrs:
        study.set_user_attr(TOKEN, uuid.uuid4().hex)
    token = study.user_attrs.get(TOKEN, "")
    method, metric = str(config.algorithm["name"]), config.tune.metric
    note = f"Searches parameters of {method} for the highest {metric} after the last round: {record.task_of(config)}."
    about = {"flexfleet.kind": "study", record.NOTE: note, record.STUDY: id, "algorithm": method, TOKEN: token}
    return record.tracker(config, id, {**about, **given}, known)


def tags(study: Any, name: str, **more: str) -> dict[str, str]:
    """Return the MLflow tags for a run of a trial or a held-out seed. `name` is the name of the run in the study."""
    parent = study.user_attrs.get(PARENT)
    below = {} if parent is None else {server.PARENT: str(parent)}
    about = {NAME: f"{study.study_name}/{name}", record.STUDY: study.study_name}
    return {**below, **about, **{f"flexfleet.{key}": value for key, value in more.items()}}
