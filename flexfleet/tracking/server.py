"""MLflow's server or database: its address, a client of it, and its errors as flexfleet's errors."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

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
"""The stage of an experiment or run that was deleted and can be restored."""
SQLITE = "sqlite:///"
SCHEMES = ("http", "https", "sqlite", *databases.KINDS, "databricks", "file")
"""Schemes of the addresses that MLflow supports without plugins."""
HOST_AND_PORT = re.compile(r"[A-Za-z0-9._-]+:\d+(/.*)?")
"""An address whose http:// was forgotten."""
SILENT_S = 10.0
"""Seconds after which waiting for a server is logged."""
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's settings where the environment has none: two retries, since `Patient` waits for longer outages; no progress
bars; no link on stdout, which would show the password of the address; nothing sent to MLflow's makers."""
NOISY = {
    "alembic": logging.WARNING,
    "mlflow.store.model_registry": logging.WARNING,
    "mlflow.tracking.fluent": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}
"""Levels of loggers that would log each table, version and retry."""


def client_of(uri: str) -> Any:
    """Return MLflow's client, without its noise. Creates a missing SQLite file.

    Raises:
        ConfigError: The address cannot be used.
        EnvironmentFailure: mlflow is not installed.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ImportError as error:
        raise EnvironmentFailure(
            "tracking.mlflow is set, but mlflow is not installed: pip install 'flexfleet[tracking]', "
            "or --set tracking.mlflow=null"
        ) from error
    for name, level in NOISY.items():
        logging.getLogger(name).setLevel(level)
    databases.check_spelling("tracking.mlflow", uri)
    with usable(uri):
        _create_sqlite(uri)
        databases.check_connection(address(uri))
        return Shared(mlflow.MlflowClient(tracking_uri=address(uri)))


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
    """The ID of the experiment that the environment names, if `uri` is the environment's server."""
    return os.environ.get("MLFLOW_EXPERIMENT_ID") or None if uri is not None and is_platforms(uri) else None


def address(uri: str) -> str:
    """The address that MLflow is called with. It has the password of the environment's address, which configurations
    leave out, and the whole path of a SQLite file, because MLflow caches connections by address even if the working
    directory changes."""
    if uri.startswith(SQLITE) and not uri.startswith((f"{SQLITE}/", f"{SQLITE}:")) and uri != SQLITE:
        named, sign, options = uri.removeprefix(SQLITE).partition("?")
        return SQLITE + os.path.abspath(named) + sign + options
    return os.environ["MLFLOW_TRACKING_URI"] if is_platforms(uri) and masked(uri) == uri else uri


def platform_of(uri: str) -> Platform:
    """Experiment and parent of runs, if `uri` is the environment's server. Kubeflow's MLflow plugin makes a run for
    each task, as a child of the pipeline's run; flexfleet reads only the parent of the task's run.

    Raises:
        ConfigError: The server does not have what the environment names.
        UnreachableAddress: The server does not answer.
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
            if is_away(error):
                raise
            raise ConfigError(
                f"{masked(uri)} does not know what the environment names, MLFLOW_EXPERIMENT_ID = {experiment!r} and "
                f"MLFLOW_RUN_ID = {task!r}: {first_line(error)}. Unset them, or give another tracking.mlflow"
            ) from error


class Shared:
    """MLflow's client for several processes that write at the same time. MLflow checks whether an entry exists and
    then inserts it without a lock. If the database refuses an entry that another process has just inserted, this calls
    again and finds that entry."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def twice(*args: Any, **kwargs: Any) -> Any:
            from mlflow.exceptions import MlflowException

            try:
                return call(*args, **kwargs)
            except MlflowException as error:
                if error.error_code != "BAD_REQUEST":  # MLflow's code for all database errors but outages
                    raise
            return call(*args, **kwargs)

        return twice


class Patient:
    """MLflow's client for an address that worked before. A call waits for a server or database that is away for at
    most `patience_s` seconds, and then raises Unreachable.

    `check` is called before each new try. It raises an error if this process must not log any more.
    """

    def __init__(self, uri: str, patience_s: float, check: Callable[[], object] = lambda: None) -> None:
        self.uri = uri
        self._client, self._patience_s, self._check = client_of(uri), patience_s, check

    def __getattr__(self, name: str) -> Any:
        call, server = getattr(self._client, name), f"MLflow at {masked(self.uri)}"

        def waiting(*args: Any, **kwargs: Any) -> Any:
            outage, pause = Outage(server, self._patience_s), 0.5
            while True:
                try:
                    found = call(*args, **kwargs)
                except errors() as error:
                    if not is_away(error):
                        raise
                    gone = f"{server} does not answer"
                    if outage.failed(Unreachable(gone), f"waiting for up to {self._patience_s:.0f} s"):
                        raise Unreachable(f"{gone}: {first_line(error)}") from error
                else:
                    outage.ended()
                    return found
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self._check()

        return waiting


def check_address(uri: str) -> None:
    """Raise ConfigError if the address cannot be MLflow's, without asking a server."""
    databases.check_spelling("tracking.mlflow", uri)
    scheme, sign, rest = uri.partition("://")
    kind = scheme.partition("+")[0].lower()
    known = {*SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))}
    host = re.split("[/?#]", rest)[0].rpartition("@")[2]
    wrong = None
    if sign and kind not in known:
        wrong = f"the scheme {printable(scheme)!r} is none of {', '.join(sorted(known))}{did_you_mean(kind, known)}"
    elif kind in ("http", "https") and host[:1] in ("", ":"):
        wrong = "it has no host"
    elif kind in ("http", "https") and "#" in rest:
        wrong = f"it is the address of a page. Give the server's, {masked(uri).partition('#')[0]}"
    elif HOST_AND_PORT.fullmatch(uri) and not Path(uri).exists():
        wrong = f"it has no scheme. For a server give http://{uri}, for a folder ./{uri}"
    if wrong is not None:
        raise ConfigError(f"tracking.mlflow = {masked(uri)!r} cannot be used: {wrong}")


def connect(uri: str, experiment: str) -> tuple[Any, str]:
    """Return a client and the ID of the experiment, which is created if it is missing.

    Raises:
        ConfigError: The address cannot be used, or the experiment is deleted.
        EnvironmentFailure: mlflow is not installed.
    """
    client = client_of(uri)
    from mlflow.exceptions import MlflowException

    with usable(uri):
        known = client.get_experiment_by_name(experiment)
        if known is None:
            try:
                return client, str(client.create_experiment(experiment, tags=KIND))
            except MlflowException:  # another process has just created it
                known = client.get_experiment_by_name(experiment)
                if known is None:
                    raise
    if known.lifecycle_stage == DELETED:
        raise ConfigError(
            f"tracking.experiment: {experiment!r} is deleted in MLflow at {masked(uri)}. Restore it with `mlflow "
            f"experiments restore --experiment-id {known.experiment_id}`, or choose another experiment"
        )
    return client, str(known.experiment_id)


def experiment_of(uri: str, run_id: str) -> str:
    """The ID of a run's experiment. Raises ConfigError if the server does not have the run."""
    client = client_of(uri)
    with usable(uri):
        return str(client.get_run(run_id).info.experiment_id)


# ------------------------------------------------------------------------------------------------------ errors
@contextmanager
def usable(uri: str) -> Iterator[None]:
    """Around the first calls: raise a ConfigError that names the address, UnreachableAddress if nobody answers."""
    try:
        with told_while(lambda s: log.warning("waiting for MLflow at %s, %s so far", masked(uri), span(s)), SILENT_S):
            yield
    except errors() as error:
        kind = UnreachableAddress if is_away(error) else ConfigError
        raise kind(f"tracking.mlflow = {masked(uri)!r} cannot be used: {first_line(error)}") from error


@contextmanager
def answering(uri: str, what: str = "does not take measurements any more") -> Iterator[None]:
    """Around calls of `Patient`: raise Unreachable if the server does not answer, Refused for its other errors.
    `what` says what the server does not do."""
    try:
        yield
    except errors() as error:
        said = f"MLflow at {masked(uri)} {what}: {first_line(error)}"
        raise (Unreachable if is_away(error) else Refused)(said) from error


def is_away(error: BaseException) -> bool:
    """Whether MLflow's server or database did not answer, or answered that it is broken."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import InvalidURL, RequestException, SSLError

    for each in databases.causes(error):
        if isinstance(each, SSLError | InvalidURL):
            return False
        if isinstance(each, RequestException):
            return True
    with suppress(ImportError):  # mlflow-skinny has no SQLAlchemy
        if databases.is_away(error):
            return True
    return isinstance(error, MlflowException) and int(error.get_http_status_code()) >= 500


def errors() -> tuple[type[Exception], ...]:
    """What MLflow raises: its own exceptions, and others for a missing driver or a text that is not an address."""
    from mlflow.exceptions import MlflowException

    errors: tuple[type[Exception], ...] = (MlflowException, OSError, ImportError, ValueError)
    with suppress(ImportError):  # mlflow-skinny has no SQLAlchemy
        from sqlalchemy.exc import SQLAlchemyError

        errors += (SQLAlchemyError,)
    return errors


def _create_sqlite(uri: str) -> None:
    """Create a missing SQLite file with MLflow's tables. MLflow creates its tables in many steps, and a kill or a
    second run in between leaves an unusable database. Therefore the tables are created in another file, which gets the
    name in one step."""
    path = Path(uri.removeprefix(SQLITE))
    if not uri.startswith(SQLITE) or "?" in uri or path.exists():
        return
    import mlflow

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as scratch:
        made = Path(scratch) / "new.db"
        mlflow.MlflowClient(tracking_uri=f"{SQLITE}{made}").search_experiments()
        try:
            os.link(made, path)  # unlike a rename, never replaces a file that another run has created
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(made, path)
