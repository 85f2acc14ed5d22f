"""Follow a pipeline run until it ends, and report its rounds (from the ledger) and task states.

Unless `retries` is set, only read requests are sent. Server outages do not end the process.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import BadInput, Diverged, EnvironmentFailure, GateFailed, IntegrityError, printable
from fl_engine.storage.outage import waiting
from flexfleet.config import Config
from flexfleet.files.terminal import expected
from flexfleet.kubeflow.client import api_of, connected, link, parameters_of, translated
from flexfleet.kubeflow.failures import SIGNALS, Cause, causes, logs, tasks_in

if TYPE_CHECKING:
    from fl_engine.storage.checkpoints import Row

PAUSE_S, PATIENCE_S = 5.0, 600.0
RETRIES = 3
"""Maximum number of retries by `submit --wait`, which retries a run only if its failure may be temporary."""
EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "SKIPPED": 1, "CANCELED": 3}
"""Map each final state of a run to an exit code. Code 3 means that the run was terminated and can be resumed."""
CANCELLED = ("CANCELING", "CANCELED")
WORDS = {"CANCELED": "terminated"}
PIPELINES = {"run_id": "train", "comparison_id": "compare", "study_id": "tune", "night_id": "nightly"}
"""Map the form field that names the run, comparison or study to the pipeline that executes it."""
COMMITTED = re.compile(r"(.+)/rounds/([0-9]{5,})/(?:[0-9]+-)?COMMITTED")

Report = Callable[[str], None]
Tasks = dict[str, dict[str, int]]
NewRounds = Callable[[], "list[tuple[str, Row]]"]
"""Function that returns a pair (run name, round) for each round that was committed since the last call. If the pipeline
has only one run, the name is empty. The function raises EnvironmentFailure if the rounds cannot be read."""


@dataclass(frozen=True)
class Followed:
    """Outcome of a pipeline run."""

    run_id: str
    url: str
    """URL of the run in the UI; empty if the URL of the UI is unknown."""
    state: str
    """Final state: SUCCEEDED, FAILED, SKIPPED or CANCELED."""
    tasks: Tasks
    """Map each task name to {state: number of tasks}. Tasks in a loop have the same name."""
    rounds: dict[str, dict[str, float]]
    """Map the name of each run to the metrics of its last round. If the pipeline has only one run, the name is empty.
    The metric `round` is the number of this round, counted from 1."""
    error: str
    """Causes of the failure, with one line for each failed task; empty if the run did not fail."""
    retried: int
    """Number of retries that this process has started."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def follow(
    run_id: str,
    *,
    host: str | None = None,
    retries: int = 0,
    report: Report = print,
    pause_s: float = PAUSE_S,
    patience_s: float = PATIENCE_S,
) -> Followed:
    """Follow a pipeline run until it ends, and report its rounds and task states.

    Args:
        host: As in `submit`.
        retries: Maximum number of retries. The run is retried only if a pod was killed, evicted or deleted.
        patience_s: Seconds to wait for a server that does not respond.

    Raises:
        EnvironmentFailure: The run does not exist, or the server did not respond for `patience_s` seconds.
    """
    with connected(host) as client:
        run = _run(client, run_id, patience_s)
        url, name, parameters = link(host, "runs", run_id), printable(run.display_name), parameters_of(client, run)
        report(f"following {name}" + (f": {url}" if url else f" ({run_id})"))
        read_rounds = rounds_of(parameters, run_id, report)
        tasks: Tasks = {}
        last: dict[str, dict[str, float]] = {}
        retried, is_terminated = 0, False
        while True:
            now = tasks_of(run)
            for task, states in now.items():
                if states != tasks.get(task):
                    report(f"{task}: {_described(states)}")
            tasks = now
            last |= _report_rounds(read_rounds, parameters.get("rounds"), report)
            is_terminated |= run.state in CANCELLED  # CANCELING may be missing from the state history
            if (state := "CANCELED" if is_terminated and run.state == "FAILED" else state_of(run)) in EXIT_CODES:
                found = waiting(partial(causes, client, run), patience_s) if state == "FAILED" else []
                if not found or retried == retries or not all(cause.is_curable for cause in found):
                    break
                retried += 1
                report(f"{_lines(found)}; retrying the run ({retried} of {retries})")
                waiting(partial(retry, client, run_id), patience_s)
            time.sleep(pause_s)
            run = _run(client, run_id, patience_s)
    followed = Followed(run_id, url, state, tasks, last, _lines(found), retried)
    report(f"{name}: {WORDS.get(state, state.lower())}" + (f": {url}" if url else ""))
    if followed.exit_code:
        for line in filter(None, (followed.error, _advice(found, parameters, run_id))):
            report(line)
    return followed


def _run(client: Any, run_id: str, patience_s: float = PATIENCE_S) -> Any:
    """Return the run. If the server does not respond, retry for up to `patience_s` seconds."""

    def request() -> Any:
        with translated():
            run = client.get_run(run_id)
        if run.run_id != run_id:
            raise EnvironmentFailure(f"The server has no run with the ID {run_id}: {printable(str(run))[:300]}")
        return run

    return waiting(request, patience_s)


def state_of(run: Any) -> str:
    """Return the state of a run, or CANCELED if the run was terminated. Kubeflow 2.17 reports a terminated run as
    FAILED, with CANCELING in its state history."""
    if run.state != "FAILED":
        return str(run.state or "PENDING")
    states = [each.state for each in run.state_history or []]
    while states and states[-1] == "FAILED":
        states.pop()
    for state in reversed(states):
        if state in CANCELLED:
            return "CANCELED"
        if state in EXIT_CODES:  # an earlier attempt ended in this state
            break
    return "FAILED"


def _report_rounds(read: NewRounds | None, total: Any, report: Report) -> dict[str, dict[str, float]]:
    """Report the new rounds, and return the last round of each run."""
    if read is None:
        return {}
    from flexfleet.tracking.console import summary

    try:
        new = read()
    except EnvironmentFailure:  # the outage may be temporary, because an earlier call succeeded
        return {}
    last = {}
    of = f"/{whole(total)}" if total else ""
    for run, row in new:
        report(f"{printable(run) + '  ' if run else ''}round {row.round + 1}{of}  {summary(row.metrics)}")
        last[run] = {"round": row.round + 1, **row.metrics}
    return last


def tasks_of(run: Any) -> Tasks:
    """Return {task name: {state: number of tasks}}, in the order in which the tasks were created."""
    tasks: dict[str, Counter[str]] = {}
    for task in tasks_in(run):
        tasks.setdefault(printable(task.display_name), Counter())[str(task.state or "PENDING")] += 1
    return {name: dict(sorted(states.items())) for name, states in tasks.items()}


def _described(states: Mapping[str, int]) -> str:
    words = {state: WORDS.get(state, state.lower()) for state in states}
    if sum(states.values()) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{count} {words[state]}" for state, count in states.items())


def _lines(found: list[Cause]) -> str:
    return "\n".join(f"{cause.task}: {cause.message}" for cause in found)


FINAL = {1, BadInput.exit_code, Diverged.exit_code, GateFailed.exit_code}
"""Exit codes after which a run cannot be continued. The last log lines of the failed task contain advice."""


def _advice(found: list[Cause], parameters: Mapping[str, Any], run_id: str) -> str:
    """Return advice on how to continue a failed or terminated run, or "" if the run cannot be continued."""
    key, name = name_of(parameters, run_id)
    codes = {cause.code for cause in found}
    if not key or codes & FINAL:
        return ""
    again = f"`flexfleet submit {PIPELINES[key]} --param {key}={name}` with the same settings"
    if not found:
        return f"To continue: {again}."
    memory = "If the pod was out of memory, increase FLEXFLEET_TRAIN_MEMORY. " if SIGNALS["killed"] in codes else ""
    return f"{memory}To continue: `flexfleet submit --retry {run_id}`, or {again}."


def name_of(parameters: Mapping[str, Any], job_id: str) -> tuple[str, str]:
    """Return the form field that names the output of a pipeline (see PIPELINES), and the name in this field. If the
    field is empty, return the name that the first task generates. For other projects' pipelines, both are empty."""
    key = next((key for key in PIPELINES if key in parameters), "")
    algorithm, seed = parameters.get("algorithm", "flexfl"), Config.model_fields["seed"].default
    given = parameters.get(key) or {
        "run_id": f"{algorithm}-s{whole(parameters.get('seed', seed))}-{job_id}",
        "comparison_id": f"compare-{job_id}",
        "study_id": f"{algorithm}-s{seed}-tune-{job_id}",
        "night_id": f"night-{job_id}",
    }.get(key, "")
    return key, str(given)


def whole(value: Any) -> str:
    """Convert a value to a string. Round numbers to integers, because Kubeflow stores integers as floats."""
    return f"{value:.0f}" if isinstance(value, int | float) else str(value)


def rounds_of(parameters: Mapping[str, Any], job_id: str, report: Callable[[str], None]) -> NewRounds | None:
    """Return a function that reads new rounds. If this machine cannot read the ledgers, call `report` with the reason
    and return None."""
    key, name = name_of(parameters, job_id)
    store_uri = str(parameters.get("store_uri") or "")
    if not key:
        return None
    if "://" not in store_uri and not (Path(store_uri).is_absolute() and Path(store_uri).is_dir()):
        report(f"Only the states of the tasks are shown, because store_uri = {store_uri!r} is not on this machine.")
        return None
    prefixes = [f"{name}/"]
    if key == "night_id":  # each case has its own folder <night_id>-<case>
        from flexfleet.experiments.nightly_suite import FOLDER, NightlySuite
        from flexfleet.experiments.published_suites import names, read_suite

        suite = str(parameters.get("suite") or "")
        cases = read_suite(FOLDER / f"{suite}.yaml", NightlySuite).cases if suite in names(FOLDER) else ()
        prefixes = [f"{name}-{case}/" for case in cases] or [f"{name}-"]  # `{name}-` also matches <name>-2
    try:
        return _ledgers(store_uri, name, prefixes)
    except Exception as error:
        reason = expected(error)
        if reason is None:
            raise
        report(f"Only the states of the tasks are shown, because this machine cannot read the rounds: {reason}")
        return None


def _ledgers(store_uri: str, name: str, prefixes: list[str]) -> NewRounds:
    from fl_engine.storage.checkpoints import Checkpoints
    from fl_engine.storage.s3 import open_store

    store = open_store(store_uri)
    last: dict[str, int] = {}

    def read() -> list[tuple[str, Row]]:
        keys = (key for prefix in prefixes for key in store.list(prefix))
        commits = [(commit[1], int(commit[2])) for commit in filter(None, map(COMMITTED.fullmatch, keys))]
        new: list[tuple[str, Row]] = []
        for folder in dict.fromkeys(folder for folder, round in commits if round > last.get(folder, -1)):
            try:
                rows = Checkpoints(open_store(f"{store_uri.rstrip('/')}/{folder}")).rows(lines=False)
            except IntegrityError:  # the coordinator has just removed a listed file, so wait for the next call
                continue
            run = folder.removeprefix(name).strip("/-")
            new += [(run, row) for row in rows if row.round > last.get(folder, -1)]
            last[folder] = max((row.round for row in rows), default=-1)
        return new

    store.list(prefixes[0])  # fail early if the store cannot be read
    return read


def retry(client: Any, run_id: str) -> None:
    """Restart the failed tasks of a run, like the button Retry in Kubeflow's UI."""
    import kfp_server_api

    with translated():
        kfp_server_api.RunServiceApi(api_of(client)).run_service_retry_run(run_id)


def log_lines(client: Any, run_id: str) -> list[str]:
    """Return the log lines of a run's pods. Raises EnvironmentFailure if no log is available."""
    found = list(logs(client, _run(client, run_id)))
    if not found:
        raise EnvironmentFailure(f"Kubeflow has no logs of run {run_id}. No task has started, or all pods were deleted")
    return [line for task, pod, log in found for line in (f"==> {task or 'task'} ({pod}) <==", log.rstrip("\n"))]
