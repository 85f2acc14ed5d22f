"""Read the rounds of a pipeline's runs on this machine, while its tasks run in a cluster.

The rounds come from the ledgers in `store_uri` if this machine reaches it, otherwise from MLflow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, IntegrityError, first_line, masked
from flexfleet.files import terminal

NAMED = {"run_id": "train", "comparison_id": "compare", "study_id": "tune", "night_id": "nightly"}
"""Map the parameter that names a pipeline's output to the pipeline."""
COMMITTED = re.compile(r"(.+)/rounds/[0-9]{5,}/(?:[0-9]+-)?COMMITTED")
FIGURES = ("avg", "full", "train_loss", "clients_trained", "clients_pruned", "clients_failed")


@dataclass(frozen=True)
class RoundLine:
    run: str
    """Name of the run in a comparison, a nightly regression run or a study; empty if the pipeline is one run."""
    number: int
    """Counted from 1."""
    metrics: Mapping[str, float]


Look = Callable[[], list[RoundLine]]
"""Returns the rounds that are new since its last call. Raises EnvironmentFailure if they cannot be read."""


def name_of(parameters: Mapping[str, Any], job_id: str) -> tuple[str, str]:
    """Return the parameter that names the pipeline's output, and the name. Both are empty for a pipeline that is not
    flexfleet's. If the form has no name, the first task chooses it in the same way."""
    key = next((key for key in NAMED if key in parameters), "")
    given = parameters.get(key) or {
        "run_id": f"{parameters.get('algorithm', 'flexfl')}-s{whole(parameters.get('seed', 0))}-{job_id}",
        "comparison_id": f"compare-{job_id}",
        "study_id": f"{parameters.get('algorithm', 'flexfl')}-s0-tune-{job_id}",
        "night_id": f"night-{job_id}",
    }.get(key, "")
    return key, str(given)


def whole(value: Any) -> str:
    """Return the text of a whole number, which Kubeflow stores as a float, or of any other value."""
    return f"{value:.0f}" if isinstance(value, int | float) else str(value)


def rounds_of(parameters: Mapping[str, Any], job_id: str, report: Callable[[str], None]) -> Look | None:
    """Return a function that reads new rounds. None if this machine can read neither the ledgers nor MLflow; `report`
    is then called with the reason."""
    key, name = name_of(parameters, job_id)
    if not key:
        return None
    store, mlflow = str(parameters.get("store_uri") or ""), str(parameters.get("mlflow_uri") or "")
    reasons = []
    cases = _cases(str(parameters.get("suite") or "")) if key == "night_id" else None
    readers = {store: partial(_ledgers, store, name, cases), mlflow: partial(_mlflow, mlflow, name, job_id)}
    for where, begin in readers.items():
        try:
            look = begin()
        except ModuleNotFoundError as error:
            reasons.append(f"{masked(where)}: {terminal.missing(str(error.name))}")
        except FlexfleetError as error:
            reasons.append(str(error))
        else:
            if look is not None:
                return look
    why = f" ({'; '.join(reasons)})" if reasons else ""
    report(f"no rounds can be read from this machine{why}; only the states of the tasks are shown")
    return None


def _cases(name: str) -> list[str]:
    """Return the cases of a suite; empty if only the tasks' image has the suite."""
    from flexfleet.experiments import nightly_suite

    return list(nightly_suite.load(nightly_suite.path_of(name)).cases) if name in nightly_suite.names() else []


def _ledgers(store_uri: str, name: str, cases: Sequence[str] | None) -> Look | None:
    """Read ledgers in the store. Returns None if the store is a folder that this machine does not have.

    `cases`: the cases of a nightly regression run, each in a folder `<night_id>-<case>`; empty if they are unknown on
    this machine; None for other pipelines.
    """
    if "://" not in store_uri and not (Path(store_uri).is_absolute() and Path(store_uri).is_dir()):
        return None
    from fl_engine.storage.checkpoints import Checkpoints
    from fl_engine.storage.s3 import open_store
    from fl_engine.storage.store import Store

    store: Store = open_store(store_uri)
    by_case = [f"{name}-{case}/" for case in cases or ()] or [f"{name}-"]  # the last also matches the run <name>-2
    prefixes = [f"{name}/"] if cases is None else by_case
    ledgers: dict[str, Checkpoints] = {}
    marks: dict[str, list[str]] = {}
    last: dict[str, int] = {}

    def look() -> list[RoundLine]:
        seen: dict[str, list[str]] = {}
        keys = (key for prefix in prefixes for key in store.list(prefix))
        for commit in filter(None, map(COMMITTED.fullmatch, keys)):
            seen.setdefault(commit[1], []).append(commit[0])
        new = []
        for folder, commits in seen.items():
            if marks.get(folder) == commits:
                continue
            ledger = ledgers.setdefault(folder, Checkpoints(open_store(f"{store_uri.rstrip('/')}/{folder}")))
            try:
                rows = ledger.rows(lines=False)
            except IntegrityError:  # its coordinator has removed a listed file; the next call reads a newer one
                continue
            marks[folder] = commits
            run = folder.removeprefix(name).strip("/-")
            new += [RoundLine(run, row.round + 1, row.metrics) for row in rows if row.round > last.get(folder, -1)]
            last[folder] = max((row.round for row in rows), default=-1)
        return new

    store.list(prefixes[0])  # raises now if the store cannot be read
    return look


def _mlflow(uri: str, name: str, job_id: str) -> Look | None:
    """Read the metrics of MLflow runs, which are found by the tag of the pipeline run. A run that an earlier pipeline
    run began has the tag of that one, so it is found by its name.

    MLFLOW_TRACKING_URI is the server's address on this machine; tasks may use another one.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or uri if uri else ""
    if not uri:
        return None
    from flexfleet.tracking.server import client_of

    client = client_of(uri)
    from mlflow.exceptions import MlflowException

    @contextmanager
    def asking() -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            raise _unread(uri, error) from error

    last: dict[str, int] = {}

    def runs() -> Iterator[Any]:
        experiments = [each.experiment_id for each in client.search_experiments()]
        for tag, value in (("kfp.job_id", job_id), ("flexfleet.run_id", name)):
            page = client.search_runs(experiments, f"tags.`{tag}` = '{value}'", order_by=["start_time DESC"])
            if page:
                yield from page if tag == "kfp.job_id" else page[:1]
                return

    def history(id: str, figure: str) -> dict[int, float]:
        return {int(each.step): float(each.value) for each in client.get_metric_history(id, figure)}

    def look() -> list[RoundLine]:
        new = []
        with asking():
            for run in runs():
                id, label = run.info.run_id, run.data.tags.get("flexfleet.run_id", "")
                seconds = {s: v for s, v in history(id, "seconds_round").items() if s > last.get(id, 0)}
                figures = {figure: history(id, figure) for figure in FIGURES} if seconds else {}
                for step, value in sorted(seconds.items()):
                    metrics = {figure: values[step] for figure, values in figures.items() if step in values}
                    new.append(RoundLine("" if label == name else label, step, {**metrics, "seconds_round": value}))
                last[id] = max(seconds, default=last.get(id, 0))
        return new

    with asking():
        client.search_experiments(max_results=1)
    return look


def _unread(uri: str, error: Exception) -> EnvironmentFailure:
    said = first_line(error)
    if "failed with exception" in said:  # followed by MLflow's transport errors
        said = "the server does not answer. Set MLFLOW_TRACKING_URI to its address as this machine reaches it"
    return EnvironmentFailure(f"MLflow at {masked(uri)}: {said}")
