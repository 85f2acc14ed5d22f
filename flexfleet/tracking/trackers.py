"""The trackers that get the measurements: MLflow, and several at once (console.py has the one that people watch). The
round loop calls them after the ledger's commit."""

from __future__ import annotations

import json
import logging
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import ConfigError, Refused, Stopped, Unreachable, masked
from fl_engine.storage.store import sha256
from flexfleet.tracking.server import DELETED, PARENT, Patient, answering, connect, usable

log = logging.getLogger("flexfleet")

TOKEN = "flexfleet.token"
RESUMED_IN = "flexfleet.resumed_in"
"""Tag of a run that was resumed below another parent: the newest such parent. The run stays below its first one."""
BEGUN = "flexfleet.begun"
"""Tag that a run shares only with its twins. If the answer to its creation is lost, MLflow's client repeats the
request, and the server makes a second run."""
JOB = "kfp."
"""Prefix of the tags that say which pipeline run made a run, or resumed it last."""
MLFLOW_BATCH = 1000
MLFLOW_PARAM_CHARS = 6000
MLFLOW_KEY_CHARS = 250
WAIT_S = 2.0
"""Seconds that a round waits for MLflow to store its metrics, unless MLflow is away."""
AGAIN_S = 10.0
"""Seconds between two tries of a server that is away, while the rounds continue."""
HASTE_S = 3.0
"""Seconds that a run which was stopped, or has failed, waits for its metrics."""
ENDING_S = 8.0
"""Seconds that a run which was stopped, or has failed, waits for MLflow in all. Kubernetes waits for half a minute, in
which a nightly run ends after its comparison, and that after its runs."""
BAD_CHARS = re.compile(r"[^\w ./:-]")
"""Characters that MLflow refuses in the names of metrics and parameters."""


class MLflow:
    """One MLflow run; step = round. A resumed run continues the same MLflow run and skips steps that are there.
    Raises EnvironmentFailure for what cannot be logged; the ledger has it, and a resumed run logs it.

    The rounds do not wait for a server that is away. A thread sends their metrics, and `finish` sends what is left.
    `patience_s` and `check` are passed to `Patient`.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        name: str,
        tags: Mapping[str, str],
        run_id: str | None = None,
        patience_s: float = 0.0,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.uri = uri
        self._client, self.experiment_id = connect(uri, experiment)
        with usable(uri):
            run_id = run_id or self._begun(tags.get(TOKEN))
            if run_id is None:
                begun = {**tags, BEGUN: uuid.uuid4().hex}
                run = self._client.create_run(self.experiment_id, run_name=name, tags=begun)
            else:
                run = self._known(run_id)
                self._go_on(run, tags)
            self.run_id, self.experiment_id = str(run.info.run_id), str(run.info.experiment_id)
            self._delete_twins(run)
            self.parent: str | None = run.data.tags.get(PARENT, tags.get(PARENT))
            self._client.update_run(self.run_id, status="RUNNING")
            logged = self._client.get_metric_history(self.run_id, "seconds_round")
        self.client = Patient(uri, patience_s, check)
        self._patience_s, self._check = patience_s, check
        self._last_step = max((int(m.step) for m in logged), default=0)
        self._unsent: list[list[Any]] = []
        self._lock = threading.Lock()
        """Held while rows are added, and while the sender decides that none is left."""
        self._sender: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._is_away = False
        self._failed: BaseException | None = None

    def _known(self, run_id: str) -> Any:
        """Raises ConfigError if the run is missing, for example because the database is a new one, or deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ConfigError(
                f"tracking.mlflow = {masked(self.uri)!r} does not have the MLflow run {run_id}, in which this run was "
                "begun. Give the address that has it, or --set tracking.mlflow=null"
            ) from error
        if run.info.lifecycle_stage == DELETED:
            raise ConfigError(
                f"the MLflow run {run_id}, in which this run was begun, is deleted at {masked(self.uri)}. Restore it "
                f"with `mlflow runs restore --run-id {run_id}`, or --set tracking.mlflow=null"
            )
        return run

    def _begun(self, token: str | None) -> str | None:
        """The MLflow run of an earlier attempt that was killed before it stored the MLflow run's ID."""
        if not token:
            return None
        runs = self._client.search_runs([self.experiment_id], f"tags.`{TOKEN}` = '{token}'")
        return str(runs[0].info.run_id) if runs else None

    def _delete_twins(self, run: Any) -> None:
        """Delete the empty runs that a repeated request has made, which would be RUNNING for ever."""
        from mlflow.exceptions import MlflowException

        begun = run.data.tags[BEGUN]
        for twin in self._client.search_runs([run.info.experiment_id], f"tags.`{BEGUN}` = '{begun}'"):
            if twin.info.run_id != run.info.run_id and not twin.data.metrics and not twin.data.params:
                with suppress(MlflowException):  # some servers let only the owner of an experiment delete
                    self._client.delete_run(twin.info.run_id)

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
        """The parent of runs that belong to this one. There is only one level of nesting."""
        return self.parent or self.run_id

    def wait(self) -> None:
        """Marks the run as begun, for another process to continue."""
        with answering(self.uri):
            self.client.update_run(self.run_id, status="SCHEDULED")

    def params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with answering(self.uri):
            known = self.client.get_run(self.run_id).data.params
            told = {name_in_mlflow(k): str(v)[:MLFLOW_PARAM_CHARS] for k, v in values.items()}
            new = {k: v for k, v in told.items() if k not in known}
            for chunk in _chunks([Param(k, v) for k, v in new.items()], 100):
                self.client.log_batch(self.run_id, params=chunk)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log the rows that MLflow does not have. If it does not take them within WAIT_S, a thread logs them later."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # stays the same at another try: MLflow stores equal points once
        new = [(step, values) for step, values in rows if step > self._last_step]
        with self._lock:
            self._unsent += [[Metric(name_in_mlflow(k), v, now, step) for k, v in row.items()] for step, row in new]
            self._last_step = max([self._last_step, *(step for step, _ in new)])
            sender = None
            if self._unsent and self._sender is None and not self._is_ending.is_set():
                sender = self._sender = threading.Thread(target=self._send_in_background, daemon=True, name="mlflow")
                sender.start()
        if sender is not None:  # a sender that still runs has kept an earlier round waiting
            sender.join(WAIT_S)
        self._raise_failure()

    def _send_in_background(self) -> None:
        """Send rows until none is left. No round needs MLflow, so a server that is away or refuses is tried again."""
        sent = 0
        while True:
            try:
                if self._is_away:
                    self._check()
                sent += self._send_batch(self._client)
            except (Unreachable, Refused) as error:
                if not self._is_away:
                    log.warning("%s. Rounds continue, and metrics are logged when MLflow takes them", error)
                self._is_away = True
                self._is_ending.wait(AGAIN_S)
            except BaseException as error:
                self._failed = error
            with self._lock:
                if not self._unsent or self._failed is not None or self._is_ending.is_set():
                    self._sender = None
                    break
        if self._is_away and not self._unsent:
            log.info("MLflow at %s answers again: logged the metrics of %d rounds", masked(self.uri), sent)
            self._is_away = False

    def _send_batch(self, client: Any) -> int:
        """Send rows as one batch, which MLflow writes as a whole or not at all; return their number. `seconds_round`
        marks a step as logged, so a step is never split."""
        batch: list[Any] = []
        steps = 0
        for metrics in list(self._unsent):
            if batch and len(batch) + len(metrics) > MLFLOW_BATCH:
                break
            batch += metrics
            steps += 1
        with answering(self.uri):
            client.log_batch(self.run_id, metrics=batch)
        del self._unsent[:steps]
        return steps

    def _send_rest(self, wait_s: float) -> None:
        """Send what is left, after waiting for the sender. Raises Unreachable if it does not end in time."""
        self._is_ending.set()
        sender = self._sender
        if sender is not None:
            sender.join(wait_s)
            if sender.is_alive():
                raise Unreachable(f"MLflow at {masked(self.uri)} does not answer")
        self._raise_failure()
        while self._unsent:
            self._send_batch(self.client)

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def table(self, columns: Sequence[str], lines: Iterable[Mapping[str, Any]], name: str) -> None:
        """Log a table that MLflow's UI shows. Replaces the table of the same name; MLflow's `log_table` appends."""
        with tempfile.TemporaryDirectory() as scratch:
            with open(Path(scratch) / name, "w", encoding="utf-8") as file:
                file.write(f'{{"columns": {json.dumps(list(columns))}, "data": [')
                for i, line in enumerate(lines):
                    file.write(",\n" * bool(i) + json.dumps([line.get(column) for column in columns]))
                file.write("]}")
            with answering(self.uri):
                self.client.log_artifact(self.run_id, file.name)
                tables = json.dumps([{"path": name, "type": "table"}])
                self.client.set_tag(self.run_id, "mlflow.loggedArtifacts", tables)

    def dataset(self, name: str, digest: str, source: str, context: str) -> None:
        """Log an input of the run. MLflow stores 36 characters of its digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        made = Dataset(name=name, digest=digest[:36], source_type="local", source=json.dumps({"uri": source}))
        with answering(self.uri):
            self.client.log_inputs(self.run_id, [DatasetInput(made, [InputTag("mlflow.data.context", context)])])

    def file(self, values: Mapping[str, Any], name: str) -> None:
        with answering(self.uri):
            self.client.log_dict(self.run_id, dict(values), name)

    def tags(self, values: Mapping[str, str]) -> None:
        with answering(self.uri):
            for key, value in values.items():
                self.client.set_tag(self.run_id, key, value)

    def finish(self, status: str) -> None:
        """Send what is left, and set the run's status. A run that did not finish gets its status without the rest if
        MLflow does not take it soon."""
        is_finished = status == "FINISHED"
        with nullcontext() if is_finished else suppress(Refused, Unreachable):
            self._send_rest(max(self._patience_s, HASTE_S) if is_finished else HASTE_S)
        with answering(self.uri):
            self.client.set_terminated(self.run_id, status)


@contextmanager
def ending(tracker: Tracker | None, *silent: type[BaseException]) -> Iterator[None]:
    """If the work inside fails or is stopped, tell the tracker, unless the error is one of `silent`. Waits for the
    tracker for at most ENDING_S, because a server that is away may be why the work failed."""
    try:
        yield
    except BaseException as error:
        if tracker is not None and not isinstance(error, silent):
            status = "KILLED" if isinstance(error, Stopped | KeyboardInterrupt) else "FAILED"
            thread = threading.Thread(target=_finish, args=(tracker, status), daemon=True)
            thread.start()
            thread.join(ENDING_S)
        raise


def _finish(tracker: Tracker, status: str) -> None:
    with suppress(Exception):  # the error that ended the work is the one to report
        tracker.finish(status)


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


class Several:
    """Passes everything to each of several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def params(self, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.params(values)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for tracker in self._trackers:
            tracker.metrics(rows)

    def finish(self, status: str) -> None:
        for tracker in self._trackers:
            tracker.finish(status)


def name_in_mlflow(name: str) -> str:
    """The name of a metric or parameter in MLflow. It may contain names of tiers and levels with characters that MLflow
    refuses, or be too long; a digest at its end then keeps different names apart."""
    parts = BAD_CHARS.sub("_", name).split("/")
    key = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if key == name and len(name) <= MLFLOW_KEY_CHARS:
        return name
    end = f"-{sha256(name.encode())[:5]}"
    return key[: MLFLOW_KEY_CHARS - len(end)] + end


def log_outcome(
    client: Patient,
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    files: Sequence[str],
    folder: Path | None = None,
) -> None:
    """Add final metrics, tags, files and a folder to a run that has ended."""
    with answering(client.uri):
        known = client.get_run(run_id).data.metrics
        for key, value in ((name_in_mlflow(name), value) for name, value in metrics.items()):
            if known.get(key) != value:  # after a kill the metric may be logged already
                before = client.get_metric_history(run_id, key) if key in known else ()
                newest = max((each.timestamp for each in before), default=0)
                # MLflow shows the latest point. Another machine's clock may be ahead of this one.
                client.log_metric(run_id, key, value, timestamp=max(int(time.time() * 1000), newest + 1))
        for key, text in tags.items():
            client.set_tag(run_id, key, text)
        for path in files:
            client.log_artifact(run_id, path)
        if folder is not None:
            client.log_artifacts(run_id, str(folder), folder.name)
