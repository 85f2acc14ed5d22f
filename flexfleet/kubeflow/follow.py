"""Follows a pipeline run to its end: reads its rounds from its ledger or MLflow, and the states of its tasks.

It asks the server every few seconds; to stop following changes nothing there. It waits while the server, or the network
to it, is down.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from fl_engine.core.errors import EnvironmentFailure, Unreachable, printable
from flexfleet.kubeflow.progress import NAMED, Look, name_of, rounds_of, whole
from flexfleet.kubeflow.server import connected, link, parameters_of, quiet_retries, run_of

EVERY_S = 5.0
SLOWEST_S = 60.0
"""Rounds that take long to read are read less often, but at least this often (seconds)."""
FIRST_WAIT_S = 1.0
PATIENCE_S = 600.0
"""Seconds for which a server that does not answer is asked again."""
EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "SKIPPED": 1, "CANCELED": 3}
"""Exit codes by the state in which a run ends; 3: it was stopped and can be resumed."""
TOLD = {"CANCELED": "terminated"}
INNER = re.compile(r"root|.*-driver|(executor|iteration|for-loop|condition)\b.*")
"""Steps that Kubeflow adds to the workflow of a pipeline; they are no tasks of the pipeline."""
WORKFLOW = re.compile(r".+-[a-z0-9]{5}")

Tell = Callable[[str], None]
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
    """By the task's name: how many tasks are in which state. The tasks of a loop share a name."""
    rounds: dict[str, dict[str, float]]
    """By the run's name (empty: the pipeline is one run): the measurements of its last round, and `round`, that round's
    number, counted from 1."""
    error: str
    """What Kubeflow says of a run that failed."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def follow(run_id: str, *, host: str | None = None, tell: Tell = print) -> Followed:
    """Reports what happens until the run has ended. `host`: as in `submit`. Raises EnvironmentFailure for a run that
    the server does not know, and if the server does not answer for PATIENCE_S."""
    with quiet_retries():
        return _follow(run_id, host, tell)


def _follow(run_id: str, host: str | None, tell: Tell) -> Followed:
    with connected(host) as client:
        run = run_of(client, run_id)
        url = link(client, "runs", run_id)
        parameters = parameters_of(client, run)
    name = printable(str(run.display_name or run_id))
    tell(f"following {name}" + (f": {url}" if url else f" ({run_id})"))
    look = rounds_of(parameters, run_id, tell)
    tasks: Tasks = {}
    last: dict[str, dict[str, float]] = {}
    while True:
        began = time.monotonic()
        now = tasks_of(run)
        for task, states in now.items():
            if states != tasks.get(task):
                tell(f"{task}: {_said(states)}")
        tasks = now
        last |= _rounds(look, parameters.get("rounds"), tell)
        if run.state in EXIT_CODES:
            break
        time.sleep(max(EVERY_S, min(10 * (time.monotonic() - began), SLOWEST_S)))
        run = _asked(client, run_id, tell)
    followed = Followed(run_id, url, run.state, tasks, last, _error(run))
    tell(f"{name}: {TOLD.get(followed.state, followed.state.lower())}{_after(run)}" + (f": {url}" if url else ""))
    if followed.exit_code:
        if followed.error:
            tell(followed.error)
        if way := _go_on(parameters, run_id):
            tell(way)
    return followed


def _asked(client: Any, run_id: str, tell: Tell) -> Any:
    """The run; asks again while the server does not answer, for PATIENCE_S."""
    began, wait = time.monotonic(), FIRST_WAIT_S
    while True:
        try:
            run = run_of(client, run_id)
        except Unreachable as error:
            if time.monotonic() - began > PATIENCE_S:
                raise
            if wait == FIRST_WAIT_S:
                tell(f"{error}. It is asked again, for {PATIENCE_S / 60:.0f} minutes; the run goes on")
            time.sleep(wait)
            wait = min(2 * wait, 30)
            continue
        if wait > FIRST_WAIT_S:
            tell(f"Kubeflow Pipelines answers again, after {time.monotonic() - began:.0f} s")
        return run


def _rounds(look: Look | None, total: Any, tell: Tell) -> dict[str, dict[str, float]]:
    """Reports the new rounds; gives the last round of each run."""
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
        tell(f"{printable(each.run) + '  ' if each.run else ''}round {each.number}{of}  {brief(each.metrics)}")
        last[each.run] = {"round": each.number, **each.metrics}
    return last


def tasks_of(run: Any) -> Tasks:
    """The states of a run's tasks, by name, in the order in which they began."""
    details = (run.run_details and run.run_details.task_details) or []
    tasks: dict[str, Counter[str]] = {}
    for task in sorted(details, key=lambda task: str(task.create_time or "")):
        name = printable(str(task.display_name or ""))
        whole = task.task_id == name and WORKFLOW.fullmatch(name)
        if name and not whole and not INNER.fullmatch(name):
            tasks.setdefault(name, Counter())[str(task.state or "PENDING")] += 1
    return {name: dict(sorted(states.items())) for name, states in tasks.items()}


def _said(states: Mapping[str, int]) -> str:
    words = {state: TOLD.get(state, state.lower()) for state in states}
    if sum(states.values()) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{count} {words[state]}" for state, count in states.items())


def _error(run: Any) -> str:
    """What Kubeflow says of the run and its failed tasks, each once."""
    details = (run.run_details and run.run_details.task_details) or []
    said = [(run.display_name, run.error), *((task.display_name, task.error) for task in details)]
    lines = [f"{who}: {error.message}" for who, error in said if error is not None and error.message]
    return printable("; ".join(dict.fromkeys(lines)))


def _after(run: Any) -> str:
    if run.created_at is None or run.finished_at is None or run.finished_at < run.created_at:
        return ""
    minutes, seconds = divmod(round((run.finished_at - run.created_at).total_seconds()), 60)
    return f" after {minutes} min {seconds} s" if minutes else f" after {seconds} s"


def _go_on(parameters: Mapping[str, Any], run_id: str) -> str:
    key, name = name_of(parameters, run_id)
    if not key:
        return ""
    store = str(parameters.get("store_uri") or "")
    if "://" not in store and not PurePosixPath(store).is_absolute():
        return (
            f"what is done is lost with the tasks' pods, which have the folder store_uri = {store!r} to themselves: "
            "with s3://bucket/prefix, or a folder of a volume, another run could go on with it"
        )
    again = "settings and the same image" if key == "night_id" else "settings"  # one commit makes a whole night
    return f"what is done is kept: flexfleet submit {NAMED[key]} --param {key}={name}, with the same {again}, goes on"
