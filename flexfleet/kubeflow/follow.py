"""Follow a pipeline run to its end: its rounds, from its ledger or MLflow, and the states of its tasks.

Following changes nothing on the server, unless `retries` is given. It continues after an outage of the server.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from fl_engine.core.errors import BadInput, ConfigError, Diverged, EnvironmentFailure, GateFailed, printable
from fl_engine.storage.outage import waiting
from flexfleet.kubeflow.client import api_of, connected, link, parameters_of, translated
from flexfleet.kubeflow.failures import SIGNALS, Cause, causes, logs, tasks_in
from flexfleet.kubeflow.progress import NAMED, Look, name_of, rounds_of, whole

EVERY_S = 5.0
SLOWEST_S = 60.0
"""Longest pause between two looks (seconds), if reading the rounds takes long."""
PATIENCE_S = 600.0
"""Seconds for which following waits for a server that does not answer."""
RETRIES = 3
"""How often `submit --wait` retries a run whose cause of failure a retry may cure."""
EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "SKIPPED": 1, "CANCELED": 3}
"""Exit code for each state in which a run ends; 3: it was terminated and can be resumed."""
KILLED = SIGNALS["killed"]
CANCELLED = ("CANCELING", "CANCELED")
WORDS = {"CANCELED": "terminated"}

Report = Callable[[str], None]
Tasks = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Followed:
    """How a run ended."""

    run_id: str
    url: str
    """Address of the run in the UI; empty if the UI's address is not known."""
    state: str
    """SUCCEEDED, FAILED, SKIPPED or CANCELED."""
    tasks: Tasks
    """For each task name, the number of tasks in each state. The tasks of a loop share a name."""
    rounds: dict[str, dict[str, float]]
    """Map the name of each run (empty if the pipeline is one run) to the measurements of its last round, and `round`:
    the number of that round, counted from 1."""
    error: str
    """Why the run failed: one line for each failed task."""
    retried: int
    """How often the run was retried while it was followed."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def follow(run_id: str, *, host: str | None = None, retries: int = 0, report: Report = print) -> Followed:
    """Report what happens until the run has ended.

    Args:
        run_id: Kubeflow's id of the run.
        host: As in `submit`.
        retries: How often a failed run is retried if its cause may be cured so: a killed, drained or vanished pod.
        report: Called with each line.

    Raises:
        EnvironmentFailure: The server does not have the run, or did not answer for PATIENCE_S.
    """
    with connected(host) as client:
        run = _asked(client, run_id)
        url, name, parameters = link(host, "runs", run_id), printable(run.display_name), parameters_of(client, run)
        report(f"following {name}" + (f": {url}" if url else f" ({run_id})"))
        look = rounds_of(parameters, run_id, report)
        tasks: Tasks = {}
        last: dict[str, dict[str, float]] = {}
        retried, is_terminated = 0, False
        while True:
            began = time.monotonic()
            now = tasks_of(run)
            for task, states in now.items():
                if states != tasks.get(task):
                    report(f"{task}: {_described(states)}")
            tasks = now
            last |= _rounds(look, parameters.get("rounds"), report)
            is_terminated |= run.state in CANCELLED  # which the history may lack
            if (state := "CANCELED" if is_terminated and run.state == "FAILED" else state_of(run)) in EXIT_CODES:
                found = waiting(partial(causes, client, run), PATIENCE_S) if state == "FAILED" else []
                if not _is_retried(found, retried, retries):
                    break
                retried += 1
                report(f"{_lines(found)}; retrying the run ({retried} of {retries})")
                waiting(partial(_retried, client, run_id), PATIENCE_S)
            time.sleep(max(EVERY_S, min(10 * (time.monotonic() - began), SLOWEST_S)))
            run = _asked(client, run_id)
    followed = Followed(run_id, url, state, tasks, last, _lines(found), retried)
    report(f"{name}: {WORDS.get(state, state.lower())}{_after(run)}" + (f": {url}" if url else ""))
    if followed.exit_code:
        if followed.error:
            report(followed.error)
        if advice := _advice(found, parameters, run_id):
            report(advice)
    return followed


def _asked(client: Any, run_id: str) -> Any:
    """Return the run; while the server does not answer, ask again for PATIENCE_S."""

    def ask() -> Any:
        with translated():
            run = client.get_run(run_id)
        if run.run_id != run_id:
            raise EnvironmentFailure(f"the server has no run with the id {run_id}: {printable(str(run))[:300]}")
        return run

    return waiting(ask, PATIENCE_S)


def state_of(run: Any) -> str:
    """Return the state of a run; CANCELED if it was terminated. Kubeflow 2.17 ends a terminated run as FAILED, after
    CANCELING in its history."""
    if run.state != "FAILED":
        return str(run.state or "PENDING")
    states = [each.state for each in run.state_history or []]
    while states and states[-1] == "FAILED":
        states.pop()
    for state in reversed(states):
        if state in CANCELLED:
            return "CANCELED"
        if state in EXIT_CODES:  # how it ended before a retry
            break
    return "FAILED"


def _retried(client: Any, run_id: str) -> None:
    """Retry a run, unless an earlier request whose answer was lost has done so."""
    try:
        if _asked(client, run_id).state == "FAILED":
            retry(client, run_id)
    except ConfigError:
        if _asked(client, run_id).state == "FAILED":
            raise


def _is_retried(found: list[Cause], retried: int, retries: int) -> bool:
    return bool(found) and retried < retries and all(cause.is_curable for cause in found)


def _rounds(look: Look | None, total: Any, report: Report) -> dict[str, dict[str, float]]:
    """Report the new rounds; return the last round of each run."""
    if look is None:
        return {}
    from flexfleet.tracking.console import brief

    try:
        new = look()
    except EnvironmentFailure:  # it could be read before, so try again the next time
        return {}
    last = {}
    for each in new:
        of = f"/{whole(total)}" if total else ""
        report(f"{printable(each.run) + '  ' if each.run else ''}round {each.number}{of}  {brief(each.metrics)}")
        last[each.run] = {"round": each.number, **each.metrics}
    return last


def tasks_of(run: Any) -> Tasks:
    """Return the states of a run's tasks by name, in the order in which the tasks began."""
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


def _after(run: Any) -> str:
    if run.created_at is None or run.finished_at is None or run.finished_at < run.created_at:
        return ""
    minutes, seconds = divmod(round((run.finished_at - run.created_at).total_seconds()), 60)
    return f" after {minutes} min {seconds} s" if minutes else f" after {seconds} s"


ADVICE = {
    BadInput.exit_code: "Correct the parameter, and submit again.",
    Diverged.exit_code: "A retry gives the same result. Change the parameters, and submit again with another name.",
    GateFailed.exit_code: "Open the report of the task before: a figure is worse than before.",
    1: "This is a bug in flexfleet or in your own class. The traceback is in `flexfleet submit --logs {run_id}`.",
}
"""What the user can do, by the exit code of the task. All other failures can be continued."""
OUT_OF_MEMORY = "If the pod was out of memory, raise FLEXFLEET_TRAIN_MEMORY. "


def _advice(found: list[Cause], parameters: Mapping[str, Any], run_id: str) -> str:
    """Return what the user can do after a failed or terminated run; empty for a pipeline that is not flexfleet's."""
    key, name = name_of(parameters, run_id)
    if not key:
        return ""
    codes = [cause.code for cause in found]
    if known := next((ADVICE[code] for code in codes if code in ADVICE), ""):
        return known.format(run_id=run_id)
    store = str(parameters.get("store_uri") or "")
    if store and "://" not in store and not PurePosixPath(store).is_absolute():
        return (
            f"store_uri = {store!r} is a folder of each task's own pod, so another run cannot continue this one. Use "
            "s3://bucket/prefix, or a folder of a volume."
        )
    same = "settings and the same image" if key == "night_id" else "settings"
    again = f"`flexfleet submit {NAMED[key]} --param {key}={name}` with the same {same}"
    if not found:
        return f"To continue: {again}."
    memory = OUT_OF_MEMORY if KILLED in codes else ""
    return f"{memory}To continue: `flexfleet submit --retry {run_id}`, or {again}."


# ------------------------------------------------------------------------------------------------- one command each
def retry(client: Any, run_id: str) -> None:
    """Start the failed tasks of a run again, as Retry in Kubeflow's UI does."""
    import kfp_server_api

    with translated():
        kfp_server_api.RunServiceApi(api_of(client)).run_service_retry_run(run_id)


def terminate(client: Any, run_id: str) -> None:
    """End a run. Its committed rounds stay in its store."""
    with translated():
        client.terminate_run(run_id)


def print_logs(client: Any, run_id: str, report: Report) -> bool:
    """Report the logs of a run's pods. Returns False if no log is available."""
    found = False
    for log in logs(client, _asked(client, run_id)):
        report(f"==> {log.task or 'task'} ({log.pod}) <==")
        report(log.text.rstrip("\n"))
        found = True
    return found
