"""The trackers that get the measurements: MLflow, and several at once (console.py has the one that people watch). The
loop calls them after the ledger's commit."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    Stopped,
    Unreachable,
    UnreachableAddress,
    did_you_mean,
    first_line,
    masked,
    printable,
)
from flexfleet.config.platform import platform_uri

log = logging.getLogger("flexfleet")

TOKEN = "flexfleet.token"
PARENT = "mlflow.parentRunId"
"""Tag with a run's parent: MLflow shows the run below it."""
RESUMED_IN = "flexfleet.resumed_in"
"""Tag of a run that was resumed below another parent: the newest such parent. The run stays below its first one."""
JOB = "kfp."
"""Prefix of the tags that say which pipeline run made a run, or resumed it last."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment: MLflow's UI then shows runs and their charts, not its pages for language models."""
SQLITE = "sqlite:///"
IN_ADDRESSES = re.compile(r"\?|%[0-9A-Fa-f]{2}")
"""What SQLAlchemy reads in the address of a SQLite file: the start of options, and a character by its number."""
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "file")
"""Of addresses that MLflow takes, besides those of its plugins."""
FEW_TRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's settings where nobody wants to wait for its server: its own are 7 and 120 seconds."""
MLFLOW_BATCH = 1000
MLFLOW_PARAM_CHARS = 6000
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
    with _usable(uri):
        called = address(uri)
        _create_sqlite(uri)
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
    with _usable(uri):
        try:
            return Platform(
                str(client.get_experiment(experiment).name) if experiment else None,
                client.get_run(task).data.tags.get(PARENT) if task else None,
            )
        except _errors() as error:
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
            except _errors() as error:
                if not CONFLICT.search(str(error)):
                    raise
            return call(*args, **kwargs)

        return twice


def check_address(uri: str) -> None:
    """Raises ConfigError for an address that cannot be MLflow's, as far as can be seen without asking anybody and
    without writing."""

    def refuse(why: str) -> NoReturn:
        raise ConfigError(f"tracking.mlflow = {masked(uri)!r} cannot be used: {why}")

    scheme, sign, rest = uri.partition("://")
    kind = scheme.partition("+")[0].lower()
    known = {*SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))}
    if sign and kind not in known:
        refuse(f"the scheme {printable(scheme)!r} is none of {', '.join(sorted(known))}{did_you_mean(kind, known)}")
    host = re.split("[/?#]", rest)[0].rpartition("@")[2]
    if kind in ("http", "https") and host[:1] in ("", ":"):
        refuse("it names no host")
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
    cannot be used, EnvironmentFailure without mlflow."""
    client = client_of(uri)
    from mlflow.exceptions import MlflowException

    with _usable(uri):
        known = client.get_experiment_by_name(experiment)
        if known is None:
            try:
                return client, str(client.create_experiment(experiment, tags=KIND))
            except MlflowException:  # another run has created it meanwhile
                known = client.get_experiment_by_name(experiment)
                if known is None:
                    raise
    return client, str(known.experiment_id)


@contextmanager
def _usable(uri: str) -> Iterator[None]:
    """Turns what MLflow raises into a ConfigError that names the address."""
    try:
        yield
    except _errors() as error:
        kind = (
            UnreachableAddress if _unreachable(error) else EnvironmentFailure if _refuses_writes(error) else ConfigError
        )
        raise kind(f"tracking.mlflow = {masked(uri)!r} cannot be used: {first_line(error)}") from error


@contextmanager
def answering(uri: str, what: str = "does not take measurements any more") -> Iterator[None]:
    """For an address that worked before: raises Unreachable if the server is gone for longer than MLflow's own retries
    take, EnvironmentFailure for other errors of its own. `what`: what the server does not do, for people."""
    try:
        yield
    except _errors() as error:
        said = f"MLflow at {masked(uri)} {what}: {first_line(error)}"
        raise (Unreachable if _unreachable(error) else EnvironmentFailure)(said) from error


GONE = re.compile(
    r"Max retries exceeded|too many \d+ error responses|status code 5\d\d|could not connect|database is locked"
    r"|server closed the connection|[Cc]onnection (refused|reset|aborted|timed out)"
)
"""What MLflow, requests and database drivers say if a server does not answer."""


def _unreachable(error: Exception) -> bool:
    said = str(error)
    return GONE.search(said) is not None and "CERTIFICATE_VERIFY_FAILED" not in said


def _refuses_writes(error: Exception) -> bool:
    """Whether a database can be read and takes nothing: it is read-only, or its disk or quota is full."""
    said = "readonly database|read-only transaction|Read-only file system|disk is full|No space left|quota exceeded"
    return re.search(said, str(error)) is not None


def _errors() -> tuple[type[Exception], ...]:
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
    with _usable(uri):
        return str(client.get_run(run_id).info.experiment_id)


class MLflow:
    """One run; step = round. A resumed run continues the same MLflow run and skips steps that are there. Raises
    EnvironmentFailure for what cannot be logged: the ledger has it, and a resumed run logs it."""

    def __init__(
        self, uri: str, experiment: str, name: str, tags: Mapping[str, str], run_id: str | None = None
    ) -> None:
        self.uri = uri
        self._client, self.experiment_id = connect(uri, experiment)
        with _usable(uri):
            run_id = run_id or self._begun(tags.get(TOKEN))
            if run_id is None:
                run = self._client.create_run(self.experiment_id, run_name=name, tags=dict(tags))
            else:
                run = self._known(run_id)
                self._go_on(run, tags)
            self.run_id, self.experiment_id = str(run.info.run_id), str(run.info.experiment_id)
            self.parent: str | None = run.data.tags.get(PARENT, tags.get(PARENT))
            self._client.update_run(self.run_id, status="RUNNING")
            logged = self._client.get_metric_history(self.run_id, "seconds_round")
        self._last_step = max((int(m.step) for m in logged), default=0)

    def _known(self, run_id: str) -> Any:
        """Raises ConfigError for a run that is not there, as where the database is a new one."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            relative = self.uri.startswith(SQLITE) and address(self.uri) != self.uri
            where = " (its path counts from the folder where the command is given)" if relative else ""
            raise ConfigError(
                f"tracking.mlflow = {masked(self.uri)!r}{where} does not have the MLflow run {run_id}, in which this "
                "run was begun: give the tracking.mlflow that has it, or go on without: --set tracking.mlflow=null"
            ) from error

    def _begun(self, token: str | None) -> str | None:
        """The MLflow run of an earlier attempt that was killed before it could store the MLflow run's id."""
        if not token:
            return None
        runs = self._client.search_runs([self.experiment_id], f"tags.`{TOKEN}` = '{token}'")
        return str(runs[0].info.run_id) if runs else None

    def _go_on(self, run: Any, tags: Mapping[str, str]) -> None:
        """Tags a resumed run with its new pipeline run and parent. A run stays below its first parent."""
        known, parent = run.data.tags, tags.get(PARENT)
        new = {key: value for key, value in tags.items() if key.startswith(JOB)}
        if parent is not None and parent != known.get(PARENT):
            new[RESUMED_IN if PARENT in known else PARENT] = parent
        for key, value in new.items():
            if known.get(key) != value:
                self._client.set_tag(run.info.run_id, key, value)

    @property
    def root(self) -> str:
        """The parent for runs that belong to this one: there is only one level of nesting."""
        return self.parent or self.run_id

    def adopt(self, run_ids: Collection[str]) -> None:
        """Puts those runs of its experiment that have no parent below `root`: earlier versions gave them none."""
        if not run_ids:
            return
        listed = ", ".join(f"'{run_id}'" for run_id in run_ids)
        with answering(self.uri):
            for run in self._client.search_runs([self.experiment_id], f"attributes.run_id IN ({listed})"):
                if PARENT not in run.data.tags:
                    self._client.set_tag(run.info.run_id, PARENT, self.root)

    def wait(self) -> None:
        """Marks the run as begun, for another process to continue."""
        with answering(self.uri):
            self._client.update_run(self.run_id, status="SCHEDULED")

    def params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with answering(self.uri):
            known = self._client.get_run(self.run_id).data.params
            new = {k: str(v)[:MLFLOW_PARAM_CHARS] for k, v in values.items() if k not in known}
            for chunk in _chunks([Param(k, v) for k, v in new.items()], 100):
                self._client.log_batch(self.run_id, params=chunk)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = [(step, values) for step, values in rows if step > self._last_step]
        # A step is never split: a batch is written whole or not at all, and `seconds_round` marks it as there.
        batch: list[Metric] = []
        with answering(self.uri):
            for step, values in new:
                if len(batch) + len(values) > MLFLOW_BATCH:
                    self._client.log_batch(self.run_id, metrics=batch)
                    batch = []
                batch += [Metric(key, value, now, step) for key, value in values.items()]
            if batch:
                self._client.log_batch(self.run_id, metrics=batch)
        self._last_step = max([self._last_step, *(step for step, _ in new)])

    def table(self, columns: Sequence[str], lines: Iterable[Mapping[str, Any]], name: str) -> None:
        """A table that MLflow's UI shows. Replaces the one of the same name (its own `log_table` appends)."""
        with tempfile.TemporaryDirectory() as scratch:
            with open(Path(scratch) / name, "w", encoding="utf-8") as file:
                file.write(f'{{"columns": {json.dumps(list(columns))}, "data": [')
                for i, line in enumerate(lines):
                    file.write(",\n" * bool(i) + json.dumps([line.get(column) for column in columns]))
                file.write("]}")
            with answering(self.uri):
                self._client.log_artifact(self.run_id, file.name)
                tables = json.dumps([{"path": name, "type": "table"}])
                self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", tables)

    def dataset(self, name: str, digest: str, source: str, context: str) -> None:
        """Logs an input of the run. Logging it again changes nothing. MLflow keeps 36 characters of a digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        made = Dataset(name=name, digest=digest[:36], source_type="local", source=json.dumps({"uri": source}))
        with answering(self.uri):
            self._client.log_inputs(self.run_id, [DatasetInput(made, [InputTag("mlflow.data.context", context)])])

    def file(self, values: Mapping[str, Any], name: str) -> None:
        with answering(self.uri):
            self._client.log_dict(self.run_id, dict(values), name)

    def finish(self, status: str) -> None:
        with answering(self.uri):
            self._client.set_terminated(self.run_id, status)


@contextmanager
def ending(tracker: Tracker | None, *silent: type[BaseException]) -> Iterator[None]:
    """Tells the tracker, if there is one, that the run was killed or has failed when the work inside does not finish;
    of the errors `silent` it is not told. A server that is gone is not waited for: it may be why the work ended."""
    try:
        yield
    except BaseException as error:
        if tracker is not None and not isinstance(error, silent):
            with _few_tries(), suppress(EnvironmentFailure):  # the first error is the one to report
                tracker.finish("KILLED" if isinstance(error, Stopped | KeyboardInterrupt) else "FAILED")
        raise


@contextmanager
def _few_tries() -> Iterator[None]:
    """MLflow's calls inside take seconds where its server is gone, not minutes."""
    before = {name: os.environ[name] for name in FEW_TRIES if name in os.environ}
    os.environ |= {name: min(most, before.get(name) or most, key=int) for name, most in FEW_TRIES.items()}
    try:
        yield
    finally:
        for name in FEW_TRIES:
            del os.environ[name]
        os.environ |= before


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


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


class Several:
    """Passes everything on to each of several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def params(self, values: Mapping[str, Any]) -> None:
        for t in self._trackers:
            t.params(values)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for t in self._trackers:
            t.metrics(rows)

    def finish(self, status: str) -> None:
        for t in self._trackers:
            t.finish(status)


def log_outcome(
    uri: str,
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    files: Sequence[str],
    folder: Path | None = None,
) -> None:
    """Adds final figures, tags, files and a folder to a run that has ended."""
    client = client_of(uri)
    with answering(uri):
        known = client.get_run(run_id).data.metrics
        for key, value in metrics.items():
            if known.get(key) != value:  # logged again after a kill, it must not be a second point
                before = client.get_metric_history(run_id, key) if key in known else ()
                newest = max((each.timestamp for each in before), default=0)
                # MLflow shows the latest point, which is not this one where a clock goes behind another's.
                client.log_metric(run_id, key, value, timestamp=max(int(time.time() * 1000), newest + 1))
        for key, text in tags.items():
            client.set_tag(run_id, key, text)
        for path in files:
            client.log_artifact(run_id, path)
        if folder is not None:
            client.log_artifacts(run_id, str(folder), folder.name)
