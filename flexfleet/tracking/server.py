"""MLflow's server or database: its address, a client of it, and its errors in the project's words."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    Refused,
    Unreachable,
    UnreachableAddress,
    did_you_mean,
    first_line,
    masked,
    printable,
)
from fl_engine.storage.outage import LONGEST_PAUSE_S, Outage
from flexfleet.config.form_fields import platform_uri
from flexfleet.files.progress import span, told_while
from flexfleet.tracking import databases

log = logging.getLogger("flexfleet")

PARENT = "mlflow.parentRunId"
"""Tag with a run's parent: MLflow shows the run below it."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment: MLflow's UI then shows runs and their charts, not its pages for language models."""
DELETED = "deleted"
"""The stage of an experiment or a run that somebody has deleted and MLflow still has: it takes nothing."""
SQLITE = "sqlite:///"
IN_ADDRESSES = re.compile(r"\?|%[0-9A-Fa-f]{2}")
"""What SQLAlchemy reads in the address of a SQLite file: the start of options, and a character by its number."""
SCHEMES = ("http", "https", "sqlite", *databases.KINDS, "databricks", "file")
"""Of addresses that MLflow takes, besides those of its plugins."""
HOST_AND_PORT = re.compile(r"[A-Za-z0-9._-]+:\d+(/.*)?")
"""What is no scheme and no folder that anybody names so: an address whose http:// was forgotten."""
SILENT_S = 10.0
"""Seconds after which a person is told that a server is waited for."""
ANSWER_S = 30
"""Seconds that each answer of MLflow's server may take."""
CONFLICT = re.compile("UNIQUE constraint failed|duplicate key value|Duplicate entry|Cannot insert duplicate key")
"""What SQLite, PostgreSQL, MySQL and SQL Server say if another writer was first."""


def client_of(uri: str) -> Any:
    """MLflow's client, made quiet: no bar for each small file, no line for each table and version, no link to the run
    on stdout, which would contain the address with its password, and nothing sent to MLflow's makers. Creates a missing
    SQLite file. Raises ConfigError if the address cannot be used, EnvironmentFailure without mlflow."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # Read when MLflow is imported. Its telemetry is a thread that changes the environment, which fails calls meanwhile.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        import mlflow
    except ImportError as error:
        raise EnvironmentFailure(
            "tracking.mlflow is set, but mlflow is not installed: pip install 'flexfleet[tracking]', "
            "or --set tracking.mlflow=null"
        ) from error
    for noisy in ("alembic", "mlflow.store.model_registry", "mlflow.tracking.fluent"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # each error of a database, with a traceback
    databases.check_spelling("tracking.mlflow", uri)
    _obey_few_tries()
    with usable(uri):
        called = address(uri)
        _create_sqlite(uri)
        databases.check_let_in(called)
        return Shared(mlflow.MlflowClient(tracking_uri=called))


# ------------------------------------------------------------------------------------------------- the platform
@dataclass(frozen=True)
class Platform:
    """What the environment says about MLflow besides the server's address; each part may be missing."""

    experiment: str | None = None
    """Name of the experiment."""
    parent: str | None = None
    """The MLflow run of the pipeline whose task this is."""


def is_platforms(uri: str) -> bool:
    return masked(uri).rstrip("/") == platform_uri()


def platform_experiment(uri: str | None) -> str | None:
    """The id of the experiment that the environment names, if `uri` is the environment's server."""
    return os.environ.get("MLFLOW_EXPERIMENT_ID") or None if uri is not None and is_platforms(uri) else None


def address(uri: str) -> str:
    """The address with which MLflow is called: with the password of the environment's address, which configurations do
    not have; and with the whole path of a SQLite file, because MLflow keeps the connections of an address for the whole
    process, also after the process has changed its folder. Raises ConfigError for a folder that no address can name."""
    if uri.startswith(SQLITE) and not uri.startswith((f"{SQLITE}/", f"{SQLITE}:")) and uri != SQLITE:
        named, sign, options = uri.removeprefix(SQLITE).partition("?")
        path = os.path.abspath(named)
        if found := IN_ADDRESSES.search(os.path.dirname(path)):
            raise ConfigError(
                f"tracking.mlflow = {uri!r} cannot be used: it is in {os.path.dirname(path)}, and {found[0]!r} means "
                f"something else in an address: give {SQLITE}/PATH with a path without it, or change to another folder"
            )
        return SQLITE + path + sign + options
    return os.environ["MLFLOW_TRACKING_URI"] if is_platforms(uri) and masked(uri) == uri else uri


def platform_of(uri: str) -> Platform:
    """Experiment and parent of runs, if `uri` is the environment's server. Kubeflow's MLflow plugin makes a run for
    each task, as a child of the pipeline's run. The task's run belongs to Kubeflow: flexfleet only reads its parent.

    Raises ConfigError if the server does not know what the environment names, UnreachableAddress if it does not answer.
    """
    experiment, task = platform_experiment(uri), os.environ.get("MLFLOW_RUN_ID")
    if not is_platforms(uri) or not (experiment or task):
        return Platform()
    client = client_of(uri)
    with usable(uri):
        try:
            return Platform(
                str(client.get_experiment(experiment).name) if experiment else None,
                client.get_run(task).data.tags.get(PARENT) if task else None,
            )
        except errors() as error:
            if _unreachable(error):
                raise
            raise ConfigError(
                f"{masked(uri)} does not know what the environment says, MLFLOW_EXPERIMENT_ID = {experiment!r} and "
                f"MLFLOW_RUN_ID = {task!r}: {first_line(error)}. Unset them, or give another tracking.mlflow"
            ) from error


class Shared:
    """MLflow's client for several processes that write at the same time. MLflow looks whether an entry exists, and then
    inserts it without a lock: the database refuses the second writer, who finds the entry when it calls again. So this
    makes a call once more that ended in such a conflict; the database kept nothing of the first call."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def twice(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except errors() as error:
                if not CONFLICT.search(str(error)):
                    raise
            return call(*args, **kwargs)

        return twice


class Patient:
    """MLflow's client for an address that worked before. A call waits for a server or database that does not answer,
    for at most `patience_s` seconds, and then raises Unreachable. Inside `few_tries` it does not wait.

    `check` is called before each new try. It raises an error if this process must not log any more.
    """

    def __init__(self, uri: str, patience_s: float, check: Callable[[], object] = lambda: None) -> None:
        self.uri = uri
        self._client, self._patience_s, self._check = client_of(uri), patience_s, check

    def __getattr__(self, name: str) -> Any:
        call, server = getattr(self._client, name), f"MLflow at {masked(self.uri)}"

        def waiting(*args: Any, **kwargs: Any) -> Any:
            patience_s = self._patience_s if _few.get() is None else 0.0
            outage, pause = Outage(server, patience_s), 0.5
            while True:
                try:
                    with few_tries(1, ANSWER_S, unless_given=True):
                        found = call(*args, **kwargs)
                except errors() as error:
                    if not _unreachable(error):
                        raise
                    gone = f"{server} does not answer"
                    if outage.failed(Unreachable(gone), f"waiting for up to {patience_s:.0f} s"):
                        raise Unreachable(f"{gone}: {first_line(error)}") from error
                else:
                    outage.ended()
                    return found
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self._check()

        return waiting


def check_address(uri: str, here: bool = True) -> None:
    """Raises ConfigError for an address that cannot be MLflow's, as far as can be seen without asking anybody and
    without writing. `here`: a path in it is one of this machine."""

    def refuse(why: str) -> NoReturn:
        raise ConfigError(f"tracking.mlflow = {masked(uri)!r} cannot be used: {why}")

    databases.check_spelling("tracking.mlflow", uri)
    scheme, sign, rest = uri.partition("://")
    kind = scheme.partition("+")[0].lower()
    known = {*SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))}
    if sign and kind not in known:
        refuse(f"the scheme {printable(scheme)!r} is none of {', '.join(sorted(known))}{did_you_mean(kind, known)}")
    host = re.split("[/?#]", rest)[0].rpartition("@")[2]
    if kind in ("http", "https") and host[:1] in ("", ":"):
        refuse("it names no host")
    if kind in ("http", "https") and "#" in rest:
        refuse(f"it is of a page: the server's address is what comes before the #, {masked(uri).partition('#')[0]}")
    if HOST_AND_PORT.fullmatch(uri) and not Path(uri).exists():
        refuse(f"a server's address begins with http:// or https://, as in http://{uri}; for a folder give ./{uri}")
    if not here:
        return
    try:
        if uri.startswith(SQLITE) and (named := uri.removeprefix(SQLITE).partition("?")[0]) and named[0] != ":":
            address(uri)
            if Path(named).is_dir():
                refuse(f"{named} is a folder, the file of a database is expected")
            _need_folder(Path(named).parent, refuse)
        elif not sign or kind == "file":
            _need_folder(Path(rest if sign else uri), refuse)
    except OSError as error:
        refuse(f"{error.filename} cannot be looked at: {error.strerror}")


def _need_folder(path: Path, refuse: Callable[[str], NoReturn]) -> None:
    """Refuses what is no folder and cannot become one."""
    there = next((each for each in (path, *path.parents) if each.exists()), None)
    if there is not None and not there.is_dir():
        refuse(f"{there} is a file, a folder is expected; the file of a database is {SQLITE}PATH")


def connect(uri: str, experiment: str) -> tuple[Any, str]:
    """A client, and the id of the experiment, which it creates if it is missing. Raises ConfigError if the address
    cannot be used or the experiment is deleted, EnvironmentFailure without mlflow."""
    client = client_of(uri)
    from mlflow.exceptions import MlflowException

    with usable(uri):
        known = client.get_experiment_by_name(experiment)
        if known is None:
            try:
                return client, str(client.create_experiment(experiment, tags=KIND))
            except MlflowException:  # another run has created it meanwhile
                known = client.get_experiment_by_name(experiment)
                if known is None:
                    raise
    if known.lifecycle_stage == DELETED:
        raise ConfigError(
            f"the experiment {experiment!r} is deleted in MLflow at {masked(uri)}: restore it (`mlflow experiments "
            f"restore --experiment-id {known.experiment_id}`), or choose another: --set tracking.experiment=NAME"
        )
    return client, str(known.experiment_id)


@contextmanager
def usable(uri: str) -> Iterator[None]:
    """Turns what MLflow raises into a ConfigError that names the address."""
    try:
        with _waiting_is_told(uri):
            yield
    except errors() as error:
        kind = (
            UnreachableAddress if _unreachable(error) else EnvironmentFailure if _refuses_writes(error) else ConfigError
        )
        raise kind(f"tracking.mlflow = {masked(uri)!r} cannot be used: {first_line(error)}") from error


@contextmanager
def answering(uri: str, what: str = "does not take measurements any more") -> Iterator[None]:
    """Around calls of `Patient`: raises Unreachable if the server does not answer, Refused for its other errors.
    `what`: what the server does not do, for people."""
    try:
        yield
    except errors() as error:
        said = f"MLflow at {masked(uri)} {what}: {first_line(error)}"
        raise (Unreachable if _unreachable(error) else Refused)(said) from error


@contextmanager
def _waiting_is_told(uri: str) -> Iterator[None]:
    """MLflow tries a server that fails, and a database that is locked, for minutes and without a word."""
    with told_while(lambda s: log.warning("waiting for MLflow at %s, %s so far", masked(uri), span(s)), SILENT_S):
        yield


@dataclass(frozen=True)
class _Few:
    tries: int
    timeout: int
    unless_given: bool


_few: ContextVar[_Few | None] = ContextVar("few", default=None)
"""What `few_tries` has set. Changing the environment instead would fail calls in other threads that read it."""


@contextmanager
def few_tries(tries: int, timeout: int, unless_given: bool = False) -> Iterator[None]:
    """MLflow's calls inside, in this thread, take seconds where its server is gone, not the minutes that its own
    settings make (7 and 120): after its first question it is asked `tries` times more, and each answer may take
    `timeout` seconds. `unless_given`: what the environment says of either holds. The outermost block counts."""
    token = _few.set(_few.get() or _Few(tries, timeout, unless_given))
    try:
        yield
    finally:
        _few.reset(token)


def is_hasty() -> bool:
    """Return whether the caller is inside `few_tries`."""
    return _few.get() is not None


@cache
def _obey_few_tries() -> None:
    """Makes MLflow's settings those of `few_tries`."""
    from mlflow import environment_variables as given

    def obey(setting: Any, name: str) -> None:
        own = setting.get

        def get() -> Any:
            few = _few.get()
            return own() if few is None or (few.unless_given and setting.is_set()) else getattr(few, name)

        setting.get = get

    obey(given.MLFLOW_HTTP_REQUEST_MAX_RETRIES, "tries")
    obey(given.MLFLOW_HTTP_REQUEST_TIMEOUT, "timeout")


def _is_no_try(record: logging.LogRecord) -> bool:
    """False for urllib3's line on each try of MLflow's server, which `_waiting_is_told` tells in the project's words;
    with -v they are shown."""
    text = record.getMessage()
    return not (text.startswith("Retrying") and "/mlflow" in text) or log.isEnabledFor(logging.DEBUG)


logging.getLogger("urllib3.connectionpool").addFilter(_is_no_try)


GONE = re.compile(
    r"Max retries exceeded|too many \d+ error responses|(status|error) code 5\d\d|Response ended prematurely"
)
"""What MLflow and requests say if MLflow's server, or what stands before it, does not answer."""


def _unreachable(error: Exception) -> bool:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    return GONE.search(str(error)) is not None or databases.is_away(error)


def _refuses_writes(error: Exception) -> bool:
    """Whether a database can be read and takes nothing: it is read-only, or its disk or quota is full."""
    said = "readonly database|read-only transaction|Read-only file system|disk is full|No space left|quota exceeded"
    return re.search(said, str(error)) is not None


def errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    # A missing driver, or text that is no address.
    errors: tuple[type[Exception], ...] = (MlflowException, OSError, ImportError, ValueError)
    with suppress(ImportError):  # mlflow-skinny, which can only use servers, lacks it
        from sqlalchemy.exc import SQLAlchemyError

        errors += (SQLAlchemyError,)
    return errors


def experiment_of(uri: str, run_id: str) -> str:
    """The id of the experiment that a run is in. Raises ConfigError if the server does not know the run."""
    client = client_of(uri)
    with usable(uri):
        return str(client.get_run(run_id).info.experiment_id)


def _create_sqlite(uri: str) -> None:
    """MLflow creates its tables in many steps, and a kill or a second run in between leaves an unusable database. So
    this creates the tables in another file beside it, and gives the finished file its name in one step."""
    path = Path(uri.removeprefix(SQLITE))
    if not uri.startswith(SQLITE) or "?" in uri or path.exists():
        return
    import mlflow

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as scratch:
        made = Path(scratch) / "new.db"
        mlflow.MlflowClient(tracking_uri=f"{SQLITE}{made}").search_experiments()
        try:
            os.link(made, path)  # unlike a rename, never replaces a file that another run made first
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(made, path)
