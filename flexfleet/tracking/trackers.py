"""Log the metrics of rounds to MLflow. The round loop calls the trackers after each commit."""

from __future__ import annotations

import json
import logging
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import Refused, Stopped, Unreachable, masked
from fl_engine.storage.outage import Outage
from fl_engine.storage.store import sha256
from flexfleet.files.artifacts import ConfusionFile
from flexfleet.tracking.server import PARENT, Client, connect, first_calls

log = logging.getLogger("flexfleet")

NAME = "mlflow.runName"
TABLES = "mlflow.loggedArtifacts"
"""Tag with the list of tables that MLflow's UI shows."""
TOKEN = "flexfleet.token"
JOB = "kfp."
"""Prefix of MLflow tags about the last pipeline run that started or resumed the run."""
MLFLOW_BATCH = 1000
MLFLOW_PARAM_CHARS = 6000
MLFLOW_TAG_CHARS = 5000
MLFLOW_KEY_CHARS = 250
ENDING_S = 8.0
"""Maximum seconds that a stopped or failed run waits for MLflow. Kubernetes kills a pod 30 seconds after SIGTERM."""
BAD_CHARS = re.compile(r"[^\w ./:-]")
"""Characters that MLflow does not allow in the names of metrics and parameters."""


class MLflow:
    """Log a run to MLflow. MLflow's step is the round number. A resumed run continues its MLflow run and skips logged
    steps.

    A thread sends the metrics, so rounds do not wait for an unreachable server. `finish` sends the remaining metrics.
    Methods raise EnvironmentFailure if a value cannot be logged. When the run is resumed, values that are missing in
    MLflow are logged. `patience_s` and `check` are passed to `Client`.
    """

    WAIT_S = 2.0
    """Maximum seconds that a round waits for MLflow to store the metrics."""
    AGAIN_S = 10.0
    """Seconds between two calls to an unreachable server."""
    HASTE_S = 3.0
    """Maximum seconds that a stopped or failed run waits for the remaining metrics to be sent."""

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
        client, self.experiment_id = connect(uri, experiment, patience_s)
        with first_calls(uri):
            if not run_id and tags.get(TOKEN):  # an earlier process may not have stored the ID
                found = client.search_runs([self.experiment_id], f"tags.`{TOKEN}` = '{tags[TOKEN]}'")
                run_id = str(found[0].info.run_id) if found else None
            if run_id is None:
                run = client.create_run(self.experiment_id, tags={NAME: name, **tags})
            else:
                run = client.get_run(run_id)
                known = run.data.tags  # a resumed run keeps its first parent
                for key, value in tags.items():
                    if key.startswith(JOB) or (key == PARENT and PARENT not in known):
                        client.set_tag(run_id, key, value)
            self.run_id, self.experiment_id = str(run.info.run_id), str(run.info.experiment_id)
            self.parent: str | None = run.data.tags.get(PARENT, tags.get(PARENT))
            client.update_run(self.run_id, status="RUNNING")
            logged = client.get_metric_history(self.run_id, "seconds_round")
        self._client = Client(uri)  # rounds do not wait for MLflow, so this client has no patience
        self.client = Client(uri, patience_s, check)
        self._patience_s, self._check = patience_s, check
        self._last_step = max((int(m.step) for m in logged), default=0)
        self._unsent: list[list[Any]] = []
        self._lock = threading.Lock()
        """Lock that protects `_unsent` and `_sender`."""
        self._sender: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._failed: BaseException | None = None

    @property
    def root(self) -> str:
        """ID of the MLflow run that becomes the parent of new runs: this run's parent if it has one, or this run."""
        return self.parent or self.run_id

    def params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self.client.get_run(self.run_id).data.params
        texts = {name_in_mlflow(k): str(v)[:MLFLOW_PARAM_CHARS] for k, v in values.items()}
        params = [Param(key, text) for key, text in texts.items() if key not in known]
        for start in range(0, len(params), 100):
            self.client.log_batch(self.run_id, params=params[start : start + 100])

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log the rows that are missing in MLflow. A thread sends the rows; wait for at most WAIT_S seconds."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # if a point is sent again with the same time, MLflow stores it once
        new = [(step, values) for step, values in rows if step > self._last_step]
        with self._lock:
            self._unsent += [[Metric(name_in_mlflow(k), v, now, step) for k, v in row.items()] for step, row in new]
            self._last_step = max([self._last_step, *(step for step, _ in new)])
            sender = None
            if self._unsent and self._sender is None and not self._is_ending.is_set():
                sender = self._sender = threading.Thread(target=self._send_in_background, daemon=True, name="mlflow")
                sender.start()
        if sender is not None:  # wait at most once for each sender thread
            sender.join(self.WAIT_S)
        self._raise_failure()

    def _send_in_background(self) -> None:
        """Send all rows. After server errors, retries are unlimited, because rounds do not depend on MLflow."""
        outage, is_away = Outage(f"MLflow at {masked(self.uri)}", math.inf), False
        while True:
            try:
                if is_away:
                    self._check()
                self._send_batch(self._client)
                outage.ended()
                is_away = False
            except (Unreachable, Refused) as error:
                outage.failed(error, "rounds continue, and metrics are logged when MLflow is available again")
                is_away = True
                self._is_ending.wait(self.AGAIN_S)
            except BaseException as error:
                self._failed = error
            with self._lock:
                if not self._unsent or self._failed is not None or self._is_ending.is_set():
                    self._sender = None
                    return

    def _send_batch(self, client: Any) -> None:
        """Send rows as one batch. A row is never split, because resumed runs skip rounds that have `seconds_round`."""
        batch: list[Any] = []
        steps = 0
        for metrics in list(self._unsent):
            if batch and len(batch) + len(metrics) > MLFLOW_BATCH:
                break
            batch += metrics
            steps += 1
        client.log_batch(self.run_id, metrics=batch)
        del self._unsent[:steps]

    def _send_rest(self, wait_s: float) -> None:
        """Wait for the sending thread, and send the remaining rows. Raises Unreachable after `wait_s` seconds."""
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

    def chart(self, name: str, values: Mapping[int, float]) -> None:
        """Log the value of a metric for each step, unless MLflow already has this value."""
        from mlflow.entities import Metric

        known = {point.step: point.value for point in self.client.get_metric_history(self.run_id, name)}
        new = {step: value for step, value in values.items() if known.get(step) != value}
        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, metrics=[Metric(name, value, now, step) for step, value in new.items()])

    def table(self, columns: Sequence[str], lines: Iterable[Mapping[str, Any]], name: str) -> None:
        log_table(self.client, self.run_id, columns, lines, name)

    def dataset(self, name: str, digest: str, source: str, context: str) -> None:
        """Log an input data set of the run. MLflow stores only 36 characters of the digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        made = Dataset(name=name, digest=digest[:36], source_type="local", source=json.dumps({"uri": source}))
        self.client.log_inputs(self.run_id, [DatasetInput(made, [InputTag("mlflow.data.context", context)])])

    def tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        texts = {name_in_mlflow(key): str(value)[:MLFLOW_TAG_CHARS] for key, value in values.items()}
        self.client.log_batch(self.run_id, tags=[RunTag(key, text) for key, text in texts.items()])

    def settings(self, values: Mapping[str, Any]) -> None:
        """Log parameters as tags, because a resumed run may change them. Values that are None are not logged."""
        known = self.client.get_run(self.run_id).data.tags
        for key in (key for key, value in values.items() if value is None and name_in_mlflow(key) in known):
            self.client.delete_tag(self.run_id, name_in_mlflow(key))
        self.tags({key: value for key, value in values.items() if value is not None})

    def finish(self, status: str) -> None:
        """Send the remaining rows, and set the final status. If the run did not finish, wait for at most HASTE_S."""
        is_finished = status == "FINISHED"
        with nullcontext() if is_finished else suppress(Refused, Unreachable):
            self._send_rest(max(self._patience_s, self.HASTE_S) if is_finished else self.HASTE_S)
        self.client.set_terminated(self.run_id, status)


@contextmanager
def ending(tracker: Tracker | None, *silent: type[BaseException]) -> Iterator[None]:
    """If the code in the context fails or is stopped, finish the tracker, unless the error is an instance of a class in
    `silent`. Wait at most ENDING_S, because the failure may be caused by an unreachable server."""
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
    with suppress(Exception):  # do not replace the error that stopped the run
        tracker.finish(status)


class Several:
    """A group of trackers. Each method calls the same method of all trackers."""

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
    """Convert the name of a metric or parameter to a name that MLflow accepts. If a name is too long or invalid, the
    changed name ends in a digest, so that all names remain unique."""
    parts = BAD_CHARS.sub("_", name).split("/")
    key = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if key == name and len(name) <= MLFLOW_KEY_CHARS:
        return name
    end = f"-{sha256(name.encode())[:5]}"
    return key[: MLFLOW_KEY_CHARS - len(end)] + end


def log_outcome(
    client: Client,
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    files: Sequence[str],
    folder: Path | None = None,
) -> None:
    """Log final metrics, tags, files and a folder to an MLflow run that has already ended."""
    known = client.get_run(run_id).data.metrics
    for key, value in ((name_in_mlflow(name), value) for name, value in metrics.items()):
        if known.get(key) != value:  # a killed process may have logged the metric
            before = client.get_metric_history(run_id, key) if key in known else ()
            newest = max((each.timestamp for each in before), default=0)
            # MLflow shows the point with the latest time, and the clock of another machine may be ahead.
            client.log_metric(run_id, key, value, timestamp=max(int(time.time() * 1000), newest + 1))
    for key, text in tags.items():
        client.set_tag(run_id, key, text)
    for path in files:
        client.log_artifact(run_id, path)
    if folder is not None:
        client.log_artifacts(run_id, str(folder), folder.name)


def log_table(
    client: Client, run_id: str, columns: Sequence[str], lines: Iterable[Mapping[str, Any]], name: str
) -> None:
    """Log a table for MLflow's UI. Unlike MLflow's `log_table`, replace an existing table."""
    with tempfile.TemporaryDirectory() as scratch:
        with open(Path(scratch) / name, "w", encoding="utf-8") as file:
            file.write(f'{{"columns": {json.dumps(list(columns))}, "data": [')
            for i, line in enumerate(lines):
                file.write(",\n" * bool(i) + json.dumps([line.get(column) for column in columns]))
            file.write("]}")
        client.log_artifact(run_id, file.name)
    tables = json.loads(client.get_run(run_id).data.tags.get(TABLES, "[]"))
    tables = [each for each in tables if each["path"] != name] + [{"path": name, "type": "table"}]
    client.set_tag(run_id, TABLES, json.dumps(tables))


def log_confusion(client: Client, run_id: str, path: Path) -> None:
    """Log the file confusion.json of a run, and a table with the confusion matrix of its largest level."""
    client.log_artifact(run_id, str(path))
    found = ConfusionFile.read(path)
    for matrix in list(found.levels.values())[-1:]:
        # MLflow's UI does not show the values of columns whose names contain a dot.
        names = [str(name).replace(".", "_") for name in found.names or range(len(matrix))]
        lines = [
            {"true class": name, **dict(zip(names, row, strict=True))} for name, row in zip(names, matrix, strict=True)
        ]
        log_table(client, run_id, ["true class", *names], lines, "confusion_matrix.json")
