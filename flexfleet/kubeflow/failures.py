"""Why a run of a pipeline failed. Kubeflow 2.17 gives no cause, so this reads the logs of the failed tasks' pods."""

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
"""Names of nodes that Kubeflow adds to the workflow. Kubeflow 2.17 wraps each template in a retry node, so that a task
`federate` has a child `federate(0)`."""
WORKFLOW = re.compile(r".+-[a-z0-9]{5}")
"""The name of the whole workflow."""
TEMPLATES = ("retry-system-container-impl", "system-container-impl")
"""Kubeflow's templates of a task's pod. The node `<workflow>-<number>` is the pod `<workflow>-<template>-<number>`."""
NODE = re.compile(r"(.+)-([0-9]+)")

ERROR = re.compile(r"^error, exit code ([0-9]+) \([^)]*\): .*(?:\n  .*)*", re.MULTILINE)
"""The last lines of a failed task of flexfleet (`task_end.ending`)."""
ENDED = re.compile(r"exit status ([0-9]+)|signal: (killed|terminated)")
"""What Kubeflow's launcher logs about a process that failed."""
END_LINES = 5
"""Lines at the end of a log among which the launcher's line is."""
SIGNALS = {"killed": 137, "terminated": 143}
MOST_LOGS = 100
"""Longest list of logs that is read, because each takes a request."""
GONE = (404, 500)
"""Statuses with which Kubeflow answers if the pod and its log are gone."""

CURABLE = (Stopped.exit_code, 137, 143)
"""Exit codes of a task whose retry may succeed: it was asked to stop, or killed."""


@dataclass(frozen=True)
class Cause:
    """Why one task failed."""

    task: str
    message: str
    code: int | None = None
    """Exit code of the task's process; None if no log has it."""
    is_curable: bool = False
    """True if a retry may succeed."""


def tasks_in(run: Any) -> list[Any]:
    """Return the details of a run's tasks, without the nodes that Kubeflow adds, in the order of their creation."""
    details = sorted(_details(run), key=lambda detail: str(detail.create_time or ""))
    return [each for each in details if _is_task(each)]


def _details(run: Any) -> list[Any]:
    return list((run.run_details and run.run_details.task_details) or [])


def _is_task(detail: Any) -> bool:
    name = str(detail.display_name or "")
    is_workflow = detail.task_id == name and WORKFLOW.fullmatch(name)
    return bool(name) and not is_workflow and not INNER.fullmatch(name)


def causes(client: Any, run: Any) -> list[Cause]:
    """Return the causes of a failed run. Raises Unreachable if Kubeflow does not answer."""
    failed = [printable(task.display_name) for task in tasks_in(run) if task.state in FAILED]
    names = ", ".join(dict.fromkeys(failed)) or "a task"
    # The server's own text, if it has one (not in 2.17).
    told = [(each.display_name, each.error.message) for each in _details(run) if each.error and each.error.message]
    found = [Cause(printable(name), printable(message)) for name, message in dict.fromkeys(told)]
    try:
        for log in logs(client, run, only_failed=True):
            cause = cause_in(log.text, log.task or names)
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
    """Return the cause that a pod's log names."""
    *_, last = [None, *ERROR.finditer(log)]
    if last is not None:
        message, code = " ".join(part.strip() for part in last[0].splitlines()), int(last[1])
        return Cause(task, printable(message), code, code in CURABLE)
    *_, ended = [None, *ENDED.finditer("\n".join(log.splitlines()[-END_LINES:]))]
    if ended is None:
        return None
    code = SIGNALS[ended[2]] if ended[2] else int(ended[1])
    lines = [line for line in log.splitlines() if line.strip() and not ENDED.search(line)]
    said = printable(lines[-1].strip())[:300] if lines and code not in SIGNALS.values() else "the process was killed"
    return Cause(task, f"exit code {code}: {said}", code, code in CURABLE)


@dataclass(frozen=True)
class Log:
    task: str
    """The task that the pod executed; empty if it is unknown."""
    pod: str
    text: str


class NoLogs(EnvironmentFailure):
    """Kubeflow does not let this client read logs."""


def logs(client: Any, run: Any, only_failed: bool = False) -> Iterator[Log]:
    """Yield the logs of the pods of a run's tasks, as far as Kubeflow still has them. Raises NoLogs, and Unreachable if
    Kubeflow does not answer."""
    query = {"runid": run.run_id, "createdat": f"{run.created_at:%Y-%m-%d}" if run.created_at else ""}
    query |= {"podnamespace": _namespace(client, run)}
    seen = set[str]()
    for task, node in _nodes(run, only_failed):
        if node in seen or len(seen) == MOST_LOGS:
            continue
        seen.add(node)
        for pod in _pods(node):
            text = _log_of(client, pod, {name: value for name, value in query.items() if value})
            if text:
                yield Log(task, pod, text)
                break


def _namespace(client: Any, run: Any) -> str:
    """Return the namespace of the run's pods; empty if Kubeflow has a single user."""
    with translated():
        experiment = client.get_experiment(experiment_id=run.experiment_id) if run.experiment_id else None
    return str(experiment.namespace or "") if experiment else ""


def _nodes(run: Any, only_failed: bool) -> Iterator[tuple[str, str]]:
    """Yield task and id of each node that may be a task's pod."""
    details = [each for each in _details(run) if not DRIVER.fullmatch(str(each.display_name or ""))]
    parents = {child.pod_name: each for each in details for child in each.child_tasks or [] if child.pod_name}
    for each in details:
        if not only_failed or each.state in FAILED:
            own = [id for id in (each.pod_name, each.task_id) if id and NODE.fullmatch(id)]
            for node in [*own, *(child.pod_name for child in each.child_tasks or [] if child.pod_name)]:
                yield _task_of(each, parents), node


def _task_of(detail: Any, parents: dict[str, Any]) -> str:
    """Return the name of the task that a node belongs to; empty if it is unknown."""
    while detail is not None and not _is_task(detail):
        detail = next((parents[id] for id in (detail.pod_name, detail.task_id) if id in parents), None)
    return printable(detail.display_name) if detail is not None else ""


def _pods(node: str) -> list[str]:
    """Return the names that the pod of a node may have."""
    parts = NODE.fullmatch(node)
    if parts is None or any(template in node for template in TEMPLATES):
        return [node]
    return [*(f"{parts[1]}-{template}-{parts[2]}" for template in TEMPLATES), node]


def _log_of(client: Any, pod: str, query: dict[str, str]) -> str:
    """Return the log of a pod, which the UI's server has; empty if there is no such log."""
    from kfp_server_api import ApiException

    try:
        with translated(ApiException):
            answer = api_of(client).call_api(
                "/k8s/pod/logs", "GET", query_params=[("podname", pod), *query.items()], auth_settings=["Bearer"],
                _return_http_data_only=True, _preload_content=False,
            )  # fmt: skip
            text: str = answer.data.decode(errors="replace")
    except ApiException as error:
        if error.status in GONE and "page not found" not in str(error.body):
            return ""
        raise NoLogs(f"{error.status} {error.reason}. --host must be the address of Kubeflow's UI") from error
    if text.lstrip().startswith("<"):  # a page
        raise NoLogs("the server answers with a page. --host must be the address of Kubeflow's UI")
    return text
