"""Where measurements go: MLflow, the console, memory. Called after the ledger's commit, never before."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_engine.errors import ConfigError, EnvironmentFailure, first_line, masked
from fl_engine.types import Tracker

log = logging.getLogger("flexfleet")

TOKEN = "flexfleet.token"
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Of an experiment: MLflow's UI shows runs and their charts, not what it has for language models."""
MLFLOW_BATCH = 1000
MLFLOW_PARAM_CHARS = 6000
CONFLICT = re.compile("UNIQUE constraint failed|duplicate key value|Duplicate entry|Cannot insert duplicate key")
"""What SQLite, PostgreSQL, MySQL and SQL Server say where another writer was first."""


class Memory:
    """Keeps everything, for tests and notebooks."""

    def __init__(self) -> None:
        self.logged_params: dict[str, Any] = {}
        self.rows: dict[int, dict[str, float]] = {}
        self.artifacts: list[str] = []
        self.status: str | None = None

    def params(self, values: Mapping[str, Any]) -> None:
        self.logged_params.update(values)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self.rows.update({step: dict(values) for step, values in rows})

    def artifact(self, path: str) -> None:
        self.artifacts.append(path)

    def finish(self, status: str) -> None:
        self.status = status


class Console:
    """A bar on a terminal, a line per round in a log; both on stderr."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total = total
        self._done = done
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="round", file=sys.stderr)

    def params(self, values: Mapping[str, Any]) -> None:
        pass

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            if step <= self._done:
                continue
            if self._bar is not None:
                if step > self._bar.n:
                    self._bar.update(step - self._bar.n)
                self._bar.set_postfix_str(brief(values))
            else:
                log.info("round %d/%d  %s", step, self._total, brief(values))

    def artifact(self, path: str) -> None:
        pass

    def finish(self, status: str) -> None:
        if self._bar is not None:
            self._bar.close()


def brief(values: Mapping[str, float]) -> str:
    """A round's measurements in a few words."""
    parts = [f"{k} {100 * values[k]:.1f} %" for k in ("avg", "full") if k in values]
    parts.append(f"loss {values['train_loss']:.3f}" if "train_loss" in values else "no client trained")
    counts = {kind: int(values[f"clients_{kind}"]) for kind in ("trained", "pruned", "failed")}
    # Viewers of logs paint a line red that speaks of failures.
    said = [f"{count} {kind}" for kind, count in counts.items() if count or kind == "trained"]
    return "  ".join([*parts, ", ".join(said), f"{values['seconds_round']:.1f} s"])


def client_of(uri: str) -> Any:
    """MLflow's client, quiet: no bar for each small file, no line for each table and version, and no link to the run on
    stdout, which would say the address with its password. An SQLite file that is not there yet is created. Raises
    ConfigError where the address cannot be used, EnvironmentFailure without mlflow."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    try:
        import mlflow
    except ImportError as error:
        raise EnvironmentFailure(
            "tracking.mlflow is set, but mlflow is not installed: pip install 'flexfleet[tracking]', "
            "or --set tracking.mlflow=null"
        ) from error
    for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry", "mlflow.tracking.fluent"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with _usable(uri):
        _create_sqlite(uri)
        return Shared(mlflow.MlflowClient(tracking_uri=uri))


class Shared:
    """MLflow's client beside others that write at the same instant. MLflow looks whether something is there and inserts
    it then, without a lock: to the second one it is refused, who finds it when the call is made again. So a call that
    ends in such a conflict is made once more; nothing of it was kept."""

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


def connect(uri: str, experiment: str) -> tuple[Any, str]:
    """A client, and the id of the experiment, which is created where it is not there yet. Raises ConfigError where the
    address cannot be used, EnvironmentFailure without mlflow."""
    client = client_of(uri)
    from mlflow.exceptions import MlflowException

    with _usable(uri):
        found = client.get_experiment_by_name(experiment)
        if found is None:
            try:
                return client, str(client.create_experiment(experiment, tags=KIND))
            except MlflowException:  # another run has created it meanwhile
                found = client.get_experiment_by_name(experiment)
                if found is None:
                    raise
    return client, str(found.experiment_id)


@contextmanager
def _usable(uri: str) -> Iterator[None]:
    """Turns what MLflow raises into a ConfigError that names the address."""
    try:
        yield
    except _errors() as error:
        raise ConfigError(f"tracking.mlflow = {masked(uri)!r} cannot be used: {first_line(error)}") from error


@contextmanager
def _answering(uri: str) -> Iterator[None]:
    """Of an address that has been used: its server may be gone by now, beyond what MLflow's own retries bridge."""
    try:
        yield
    except _errors() as error:
        said = f"MLflow at {masked(uri)} does not take measurements any more: {first_line(error)}"
        raise EnvironmentFailure(said) from error


def _errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    # A driver that is not installed, an address that is none.
    errors: tuple[type[Exception], ...] = (MlflowException, OSError, ImportError, ValueError)
    with suppress(ImportError):  # mlflow-skinny, which talks to servers alone, comes without
        from sqlalchemy.exc import SQLAlchemyError

        errors += (SQLAlchemyError,)
    return errors


class MLflow:
    """One flat run; step = round. A resumed run goes on in the same MLflow run and skips steps already there. What
    cannot be logged raises EnvironmentFailure: the ledger has it, and a resumed run logs it."""

    def __init__(
        self, uri: str, experiment: str, name: str, tags: Mapping[str, str], run_id: str | None = None
    ) -> None:
        self._uri = uri
        self._client, self.experiment_id = connect(uri, experiment)
        with _usable(uri):
            run_id = run_id or self._begun(tags.get(TOKEN))
            if run_id is None:
                run_id = self._client.create_run(self.experiment_id, run_name=name, tags=dict(tags)).info.run_id
            self.run_id: str = run_id
            self._client.update_run(self.run_id, status="RUNNING")
            logged = self._client.get_metric_history(self.run_id, "seconds_round")
        self._last_step = max((int(m.step) for m in logged), default=0)

    def _begun(self, token: str | None) -> str | None:
        """The run that an attempt began which was killed before it could note the run's id."""
        if not token:
            return None
        runs = self._client.search_runs([self.experiment_id], f"tags.`{TOKEN}` = '{token}'")
        return str(runs[0].info.run_id) if runs else None

    def params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with _answering(self._uri):
            known = self._client.get_run(self.run_id).data.params
            new = {k: str(v)[:MLFLOW_PARAM_CHARS] for k, v in values.items() if k not in known}
            for chunk in _chunks([Param(k, v) for k, v in new.items()], 100):
                self._client.log_batch(self.run_id, params=chunk)

    def tags(self, values: Mapping[str, str]) -> None:
        with _answering(self._uri):
            for key, value in values.items():
                self._client.set_tag(self.run_id, key, value)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = [(step, values) for step, values in rows if step > self._last_step]
        # A step is never split: a batch is written whole or not at all, and `seconds_round` marks it as there.
        batch: list[Metric] = []
        with _answering(self._uri):
            for step, values in new:
                if len(batch) + len(values) > MLFLOW_BATCH:
                    self._client.log_batch(self.run_id, metrics=batch)
                    batch = []
                batch += [Metric(key, value, now, step) for key, value in values.items()]
            if batch:
                self._client.log_batch(self.run_id, metrics=batch)
        self._last_step = max([self._last_step, *(step for step, _ in new)])

    def table(self, columns: Sequence[str], lines: Sequence[Mapping[str, Any]], name: str) -> None:
        """A table that MLflow's UI shows. Replaces the one of the same name (its own `log_table` appends)."""
        data = [[line.get(column) for column in columns] for line in lines]
        with _answering(self._uri):
            self._client.log_dict(self.run_id, {"columns": list(columns), "data": data}, name)
            self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps([{"path": name, "type": "table"}]))

    def dataset(self, name: str, digest: str, source: str, context: str) -> None:
        """An input of the run. The same one again changes nothing. MLflow keeps 36 characters of a digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        found = Dataset(name=name, digest=digest[:36], source_type="local", source=json.dumps({"uri": source}))
        with _answering(self._uri):
            self._client.log_inputs(self.run_id, [DatasetInput(found, [InputTag("mlflow.data.context", context)])])

    def file(self, values: Mapping[str, Any], name: str) -> None:
        with _answering(self._uri):
            self._client.log_dict(self.run_id, dict(values), name)

    def artifact(self, path: str) -> None:
        with _answering(self._uri):
            self._client.log_artifact(self.run_id, path)

    def finish(self, status: str) -> None:
        with _answering(self._uri):
            self._client.set_terminated(self.run_id, status)


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _create_sqlite(uri: str) -> None:
    """MLflow creates its tables in many steps, and a kill or a second run in between leaves a data base that nobody
    can use. So they are created beside it, and the finished file gets its name at once."""
    prefix = "sqlite:///"
    path = Path(uri.removeprefix(prefix))
    if not uri.startswith(prefix) or "?" in uri or path.exists():
        return
    import mlflow

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as scratch:
        made = Path(scratch) / "new.db"
        mlflow.MlflowClient(tracking_uri=f"{prefix}{made}").search_experiments()
        try:
            os.link(made, path)  # unlike a rename, never replaces a file that another run was first to make
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

    def artifact(self, path: str) -> None:
        for t in self._trackers:
            t.artifact(path)

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
    with _answering(uri):
        known = client.get_run(run_id).data.metrics
        for key, value in metrics.items():
            if known.get(key) != value:  # told again after a kill, it is no second point
                client.log_metric(run_id, key, value)
        for key, text in tags.items():
            client.set_tag(run_id, key, text)
        for path in files:
            client.log_artifact(run_id, path)
        if folder is not None:
            client.log_artifacts(run_id, str(folder), folder.name)
