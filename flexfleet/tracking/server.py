"""Connect to MLflow's server or database, and raise flexfleet's errors instead of MLflow's errors."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_engine.core.errors import (
    ConfigError,
    Refused,
    Unreachable,
    UnreachableAddress,
    did_you_mean,
    first_line,
    masked,
    printable,
)
from fl_engine.storage.outage import waiting
from fl_engine.storage.store import sha256
from flexfleet.config.dotted import platform_uri
from flexfleet.files.progress import called_while_waiting, span
from flexfleet.tracking import databases

log = logging.getLogger("flexfleet")

PARENT = "mlflow.parentRunId"
"""MLflow tag that contains the ID of the parent run."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment. The tag prevents MLflow's UI from showing its pages for language models."""
SQLITE = "sqlite:///"
SCHEMES = ("http", "https", "sqlite", *databases.KINDS, "databricks", "file")
"""Address schemes that MLflow supports without plugins."""
HOST_AND_PORT = re.compile(r"[A-Za-z0-9._-]+:\d+(/.*)?")
"""Pattern of a server address in which `http://` is missing."""
SILENT_S = 10.0
"""Seconds after which the first log line about a slow server is written."""
ANSWER_S = 3.0
"""Maximum seconds until a server answers the first request of a command."""
ANSWERED = "FLEXFLEET_MLFLOW_ANSWERED"
"""Environment variable with the digest of the address that has answered, and the process that sent the request. The
processes that this process starts do not repeat the request, because they can make the server slow."""
CURE = (
    "Start the server, correct the address or the login (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN), or set tracking.mlflow=null"
)
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Default settings of MLflow. MLflow itself makes only a few retries, because `Client` waits during longer outages.
MLflow must not print links, because a link would contain the password of the address."""
NOISY = {
    "alembic": logging.WARNING,
    "mlflow.pyfunc": logging.WARNING,
    "mlflow.store.model_registry": logging.WARNING,
    "mlflow.tracking.fluent": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}
"""Map loggers to minimum log levels. By default, these loggers would log each table, version and retry."""


class Client:
    """MLflow's client with retries. MLflow's own log lines are suppressed. A missing SQLite file is created.

    All methods raise Unreachable if the server does not respond for `patience_s` seconds, and Refused for other errors.
    `check` is called before each retry, and can end the retries by raising an error. A rejected call is repeated once,
    because another process may have inserted the same entry.
    """

    def __init__(self, uri: str, patience_s: float = 0.0, check: Callable[[], object] = lambda: None) -> None:
        """Connect to `uri`. Raises ConfigError if the address cannot be used."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import mlflow

        for name, level in NOISY.items():
            logging.getLogger(name).setLevel(level)
        databases.check_spelling("tracking.mlflow", uri)
        if not patience_s:  # a client with patience also waits for the first answer
            _check_answer(uri)
        with first_calls(uri), explained(uri, "the connection"):
            _create_sqlite(uri)
            databases.check_connection(address(uri))
            self._client = mlflow.MlflowClient(tracking_uri=address(uri))
        self.uri, self._patience_s, self._check = uri, patience_s, check

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            def request() -> Any:
                with explained(self.uri, name):
                    return method(*args, **kwargs)

            wait = partial(waiting, request, self._patience_s, f"MLflow at {masked(self.uri)}", self._check)
            try:
                return wait()
            except Refused as error:
                if code_of(error) != "BAD_REQUEST":  # MLflow uses this code for database errors other than outages
                    raise
                return wait()

        return call


def is_platforms(uri: str) -> bool:
    return masked(uri).rstrip("/") == platform_uri()


def named_experiment() -> str | None:
    """Return MLFLOW_EXPERIMENT_NAME; None if this variable is not set."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or None


def platform_experiment(uri: str | None) -> str | None:
    """Return MLFLOW_EXPERIMENT_ID; None if `uri` is not the address in MLFLOW_TRACKING_URI."""
    return os.environ.get("MLFLOW_EXPERIMENT_ID") or None if uri is not None and is_platforms(uri) else None


def address(uri: str) -> str:
    """Return the address for MLflow's client. The platform's address gets the password from MLFLOW_TRACKING_URI. Paths
    of SQLite files are made absolute, because MLflow caches connections by address."""
    if uri.startswith(SQLITE) and not uri.startswith((f"{SQLITE}/", f"{SQLITE}:")) and uri != SQLITE:
        named, sign, options = uri.removeprefix(SQLITE).partition("?")
        return SQLITE + os.path.abspath(named) + sign + options
    return os.environ["MLFLOW_TRACKING_URI"] if is_platforms(uri) and masked(uri) == uri else uri


def platform_of(uri: str) -> tuple[str | None, str | None]:
    """Return the experiment name and the ID of the parent run that the platform has set. Both values are None if `uri`
    is not the address in MLFLOW_TRACKING_URI. Kubeflow's MLflow plugin creates a child run for each task, and a tag of
    this child run contains the ID of the parent run. Raises the errors of `first_calls`."""
    experiment, task = platform_experiment(uri), os.environ.get("MLFLOW_RUN_ID")
    if not is_platforms(uri) or not (experiment or task):
        return None, None
    client = Client(uri)
    with first_calls(uri):
        name = str(client.get_experiment(experiment).name) if experiment else None
        return name, client.get_run(task).data.tags.get(PARENT) if task else None


def active_run() -> tuple[str, str, str] | None:
    """Return the address, the experiment name and the ID of the MLflow run that is active in this process. Return None
    if no MLflow run is active."""
    mlflow = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    if mlflow is None or run is None:
        return None
    return mlflow.get_tracking_uri(), mlflow.get_experiment(run.info.experiment_id).name, run.info.run_id


def check_address(uri: str) -> None:
    """Raise ConfigError if the address is malformed or its scheme is unknown. No request is sent to the server."""
    databases.check_spelling("tracking.mlflow", uri)
    scheme, sign, rest = uri.partition("://")
    kind = scheme.partition("+")[0].lower()
    known = {*SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))}
    wrong = None
    if sign and kind not in known:
        wrong = f"{printable(scheme)!r} is not one of {', '.join(sorted(known))}{did_you_mean(kind, known)}"
    elif kind in ("http", "https") and (re.match("([^/?#]*@)?[:/?#]|$", rest) or "#" in rest):
        wrong = "it must be the address of a server, such as http://mlflow:5000"
    elif HOST_AND_PORT.fullmatch(uri) and not Path(uri).exists():
        wrong = f"it has no scheme. Write http://{uri} for a server, or ./{uri} for a folder"
    if wrong is not None:
        raise ConfigError.at(f"tracking.mlflow = {masked(uri)!r} cannot be used: {wrong}")


def check_server(uri: str) -> None:
    """Check an address before a run starts. Database files are not opened.

    Raises:
        ConfigError: The address is malformed, its server is not an MLflow server, or MLflow refuses the login.
        UnreachableAddress: No server answers within ANSWER_S seconds.
    """
    check_address(uri)
    if find_spec("mlflow") is not None:
        _check_answer(uri)


def _check_answer(uri: str) -> None:
    """Send the first request to a server, which MLflow would retry for minutes. Raises the errors of `check_server`."""
    kind = uri.partition("://")[0].partition("+")[0].lower()
    if kind not in ("http", "https", *databases.KINDS) or _has_answered(uri):
        return
    import mlflow  # the import takes seconds, which are not part of the limit

    failed: list[Exception] = []

    def request() -> None:
        try:
            with explained(uri, "the connection"):
                databases.check_connection(address(uri))
                if kind not in databases.KINDS:
                    mlflow.MlflowClient(tracking_uri=address(uri)).search_experiments(max_results=1)
        except (Unreachable, Refused) as error:
            failed.append(type(error)(f"{error}. {CURE}"))
        except Exception as error:
            failed.append(error)

    with first_calls(uri):
        thread = threading.Thread(target=request, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        if thread.is_alive():
            raise Unreachable(f"MLflow at {masked(uri)} does not answer within {ANSWER_S:g} s. {CURE}")
        if failed:
            raise failed[0]
    os.environ[ANSWERED] = f"{sha256(address(uri).encode())} {os.getpid()}"


def _has_answered(uri: str) -> bool:
    """Return whether the server has answered the process that started this process."""
    digest, _, process = os.environ.get(ANSWERED, "").partition(" ")
    return digest == sha256(address(uri).encode()) and process != str(os.getpid())


def connect(uri: str, experiment: str, patience_s: float = 0.0) -> tuple[Client, str]:
    """Connect to MLflow; return the client and the experiment's ID. If the experiment does not exist, it is created.

    If the server has answered the process that started this process, such as a comparison, wait up to `patience_s`
    seconds for the server. Raises ConfigError if the address cannot be used.
    """
    client = Client(uri, patience_s if _has_answered(uri) else 0.0)
    with first_calls(uri):
        known = client.get_experiment_by_name(experiment)
        if known is None:
            try:
                return client, str(client.create_experiment(experiment, tags=KIND))
            except Refused:  # another process may have created the experiment
                known = client.get_experiment_by_name(experiment)
                if known is None:
                    raise
    return client, str(known.experiment_id)


def runs_by_alias(client: Client, run_ids: Iterable[str]) -> dict[str, set[str]]:
    """Map each alias, and each address models:/NAME@ALIAS, to those of the MLflow runs from which its models come."""
    found: dict[str, set[str]] = {}
    for run in run_ids:
        for each in client.search_model_versions(f"run_id = '{run}'"):
            for alias in client.get_model_version(each.name, each.version).aliases:
                for word in (alias, f"models:/{each.name}@{alias}"):
                    found.setdefault(word, set()).add(run)
    return found


def delete_run(client: Client, run_id: str, dry_run: bool) -> int:
    """Delete an MLflow run, its artifacts and its model versions, or nothing if `dry_run` is True. Return the size of
    the artifacts in bytes."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    try:
        uri = client.get_run(run_id).info.artifact_uri
    except Refused as error:
        if code_of(error) != "RESOURCE_DOES_NOT_EXIST":
            raise
        return 0
    for version in () if dry_run else client.search_model_versions(f"run_id = '{run_id}'"):
        client.delete_model_version(version.name, version.version)
    with explained(client.uri, "a call for artifacts"):
        artifacts = get_artifact_repository(uri, tracking_uri=address(client.uri))
        files = artifacts.list_artifacts()
        for each in files:
            files += artifacts.list_artifacts(each.path) if each.is_dir else []
        if not dry_run:
            artifacts.delete_artifacts()
    if not dry_run:
        client.delete_run(run_id)
    return sum(each.file_size or 0 for each in files)


@contextmanager
def first_calls(uri: str) -> Iterator[None]:
    """Log slow calls. Raises ConfigError for a rejected call, and UnreachableAddress if the server does not respond."""
    try:
        text = "waiting for MLflow at %s for %s"
        with called_while_waiting(lambda seconds: log.warning(text, masked(uri), span(seconds)), SILENT_S):
            yield
    except (Refused, Unreachable) as error:
        kind = UnreachableAddress if isinstance(error, Unreachable) else ConfigError
        raise kind(f"tracking.mlflow cannot be used: {error}", path="tracking.mlflow") from error


@contextmanager
def explained(uri: str, what: str) -> Iterator[None]:
    """Raise Unreachable or Refused instead of MLflow's errors. `what` is the name of the request."""
    try:
        yield
    except _errors() as error:
        server = f"MLflow at {masked(uri)}"
        if is_away(error):
            reason = [*databases.causes(error)][-1]  # MLflow's own message repeats the whole request
            why = getattr(reason, "strerror", None) or first_line(reason)
            raise Unreachable(f"{server} does not answer: {why}") from error
        raise Refused(f"{server} refused {what}: {first_line(error)}") from error


def code_of(error: Exception) -> str | None:
    """Return MLflow's error code for this error, such as RESOURCE_DOES_NOT_EXIST."""
    return getattr(error.__cause__, "error_code", None)


def is_away(error: BaseException) -> bool:
    """Return whether the error means that the server or database of MLflow has failed or does not respond."""
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
    return isinstance(error, MlflowException) and int(error.get_http_status_code()) in (500, 502, 503, 504)


def _errors() -> tuple[type[Exception], ...]:
    """Return the exception classes that MLflow raises, including errors for missing drivers and wrong addresses."""
    from mlflow.exceptions import MlflowException

    errors: tuple[type[Exception], ...] = (MlflowException, OSError, ImportError, ValueError)
    with suppress(ImportError):  # mlflow-skinny has no SQLAlchemy
        from sqlalchemy.exc import SQLAlchemyError

        errors += (SQLAlchemyError,)
    return errors


def _create_sqlite(uri: str) -> None:
    """If the SQLite file does not exist, create it with MLflow's tables. The tables are created in a temporary file,
    because an interrupted creation leaves an unusable database."""
    path = Path(uri.removeprefix(SQLITE))
    if not uri.startswith(SQLITE) or "?" in uri or path.exists():
        return
    import mlflow

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as scratch:
        made = Path(scratch) / "new.db"
        mlflow.MlflowClient(tracking_uri=f"{SQLITE}{made}").search_experiments()
        with suppress(FileExistsError):
            os.link(made, path)  # unlike a rename, a link cannot replace the file of another process
