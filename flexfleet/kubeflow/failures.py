"""Find the cause of a failed pipeline run in the logs of its pods, because Kubeflow 2.17 does not report the cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fl_engine.core.errors import EnvironmentFailure, Stopped, printable
from flexfleet.kubeflow.client import api_of, translated

FAILED = ("FAILED", "ERROR", "SYSTEM_ERROR")
DRIVER = re.compile(r".*-driver(\([0-9]+\))?")
INNER = re.compile(rf"root|{DRIVER.pattern}|(executor|iteration|for-loop|condition)\b.*|.*\([0-9]+\)")
"""Pattern that matches the names of workflow nodes that are not tasks. Kubeflow 2.17 adds retry nodes, so a task
`federate` has a child node `federate(0)`."""
WORKFLOW = re.compile(r".+-[a-z0-9]{5}")
"""Pattern that matches the name of the node for the whole workflow."""
TEMPLATES = ("retry-system-container-impl", "system-container-impl")
"""Names of Kubeflow's templates for the pods of tasks. The pod of the node `<workflow>-<number>` is named
`<workflow>-<template>-<number>`."""
NODE = re.compile(r"(.+)-([0-9]+)")

ERROR = re.compile(r"^error, exit code ([0-9]+) \([^)]*\): .*(?:\n  .*)*", re.MULTILINE)
"""Pattern that matches the last log lines of a failed flexfleet task, which `task_end.ending` writes."""
ENDED = re.compile(r"exit status ([0-9]+)|signal: (killed|terminated)")
"""Pattern of the launcher's log line about a failed process."""
END_LINES = 5
"""Number of lines at the end of a log that are searched for ENDED."""
SIGNALS = {"killed": 137, "terminated": 143}
MOST_LOGS = 100
"""Maximum number of logs to read, because each log requires a separate request to the server."""
GONE = (404, 500)
"""HTTP status codes with which the server responds if the pod and its log no longer exist."""

CURABLE = (Stopped.exit_code, 137, 143)
"""Exit codes of tasks that were stopped or killed. A retry of such a task may succeed."""


@dataclass(frozen=True)
class Cause:
    """Cause of one task's failure."""

    task: str
    message: str
    code: int | None = None
    """Exit code of the process that the task executed; None if the logs do not contain an exit code."""
    is_curable: bool = False
    """True if a retry may succeed."""


def tasks_in(run: Any) -> list[Any]:
    """Return the details of a run's tasks in order of creation. Nodes that Kubeflow adds are excluded."""
    details = sorted(_details(run), key=lambda detail: str(detail.create_time or ""))
    return [each for each in details if _is_task(each)]


def _details(run: Any) -> list[Any]:
    return list((run.run_details and run.run_details.task_details) or [])


def _is_task(detail: Any) -> bool:
    name = str(detail.display_name or "")
    is_workflow = detail.task_id == name and WORKFLOW.fullmatch(name)
    return bool(name) and not is_workflow and not INNER.fullmatch(name)


def causes(client: Any, run: Any) -> list[Cause]:
    """Return the causes of a run's failure. Raises Unreachable if Kubeflow does not respond."""
    failed = [printable(task.display_name) for task in tasks_in(run) if task.state in FAILED]
    names = ", ".join(dict.fromkeys(failed)) or "a task"
    with_error = [each for each in _details(run) if each.error and each.error.message]  # none in Kubeflow 2.17
    found = [Cause(printable(each.display_name), printable(each.error.message)) for each in with_error]
    try:
        for task, _, log in logs(client, run, only_failed=True):
            cause = cause_in(log, task or names)
            if cause is not None:
                found.append(cause)
    except NoLogs as error:
        found.append(Cause(names, f"its log cannot be read: {error}"))
    unique = list(dict.fromkeys(found))
    if unique:
        return [cause for cause in unique if cause.code is not None] or unique
    if not failed:
        return [Cause(names, "Kubeflow could not start a task. See the failed node on the run's page")]
    return [Cause(names, "its pod and log are gone: the pod was deleted or evicted, or its node lost", is_curable=True)]


def cause_in(log: str, task: str) -> Cause | None:
    """Find the cause of a failure in the log of a pod. Return None if the log does not contain a cause."""
    *_, last = [None, *ERROR.finditer(log)]
    if last is not None:
        message, code = " ".join(part.strip() for part in last[0].splitlines()), int(last[1])
        return Cause(task, printable(message), code, code in CURABLE)
    *_, ended = [None, *ENDED.finditer("\n".join(log.splitlines()[-END_LINES:]))]
    if ended is None:
        return None
    code = SIGNALS[ended[2]] if ended[2] else int(ended[1])
    lines = [line for line in log.splitlines() if line.strip() and not ENDED.search(line)]
    reason = printable(lines[-1].strip())[:300] if lines and not ended[2] else "the process was killed"
    return Cause(task, f"exit code {code}: {reason}", code, code in CURABLE)


class NoLogs(EnvironmentFailure):
    """Raised if Kubeflow does not permit this client to read logs."""


def logs(client: Any, run: Any, only_failed: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield a tuple (task name, pod name, log) for each pod whose log still exists. The task name is empty if unknown.
    Raises NoLogs if the logs cannot be read, and Unreachable if Kubeflow does not respond."""
    with translated():
        experiment = client.get_experiment(experiment_id=run.experiment_id) if run.experiment_id else None
    query = {"runid": run.run_id, "createdat": f"{run.created_at:%Y-%m-%d}" if run.created_at else ""}
    query |= {"podnamespace": (experiment and experiment.namespace) or ""}  # a single-user Kubeflow has no namespace
    query = {name: value for name, value in query.items() if value}
    seen = set[str]()
    for task, node in _nodes(run, only_failed):
        if node in seen or len(seen) == MOST_LOGS:
            continue
        seen.add(node)
        for pod in _pods(node):
            text = _log_of(client, pod, query)
            if text:
                yield task, pod, text
                break


def _nodes(run: Any, only_failed: bool) -> Iterator[tuple[str, str]]:
    """Yield a tuple (task, node ID) for each node that may belong to a task's pod."""
    details = [each for each in _details(run) if not DRIVER.fullmatch(str(each.display_name or ""))]
    parents = {child.pod_name: each for each in details for child in each.child_tasks or [] if child.pod_name}
    for each in details:
        if not only_failed or each.state in FAILED:
            own = [id for id in (each.pod_name, each.task_id) if id and NODE.fullmatch(id)]
            for node in [*own, *(child.pod_name for child in each.child_tasks or [] if child.pod_name)]:
                yield _task_of(each, parents), node


def _task_of(detail: Any, parents: dict[str, Any]) -> str:
    """Return the name of the task to which a node belongs. The name is empty if the task is unknown."""
    while detail is not None and not _is_task(detail):
        detail = next((parents[id] for id in (detail.pod_name, detail.task_id) if id in parents), None)
    return printable(detail.display_name) if detail is not None else ""


def _pods(node: str) -> list[str]:
    """Return all names that the pod of a node can have."""
    parts = NODE.fullmatch(node)
    if parts is None or any(template in node for template in TEMPLATES):
        return [node]
    return [*(f"{parts[1]}-{template}-{parts[2]}" for template in TEMPLATES), node]


def _log_of(client: Any, pod: str, query: dict[str, str]) -> str:
    """Request the log of a pod from the server of Kubeflow's UI. The log is empty if the pod does not exist."""
    from kfp_server_api import ApiException

    try:
        with translated(ApiException):
            response = api_of(client).call_api(
                "/k8s/pod/logs", "GET", query_params=[("podname", pod), *query.items()], auth_settings=["Bearer"],
                _return_http_data_only=True, _preload_content=False,
            )  # fmt: skip
            text: str = response.data.decode(errors="replace")
    except ApiException as error:
        if error.status in GONE and "page not found" not in str(error.body):
            return ""
        raise NoLogs(f"{error.status} {error.reason}. --host must be the address of Kubeflow's UI") from error
    if text.lstrip().startswith("<"):  # the response is HTML instead of a log
        raise NoLogs("the server returns a web page. --host must be the address of Kubeflow's UI")
    return text
