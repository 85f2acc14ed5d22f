"""Let Kubeflow start a pipeline at fixed times, by a recurring run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from fl_engine.core.errors import ConfigError
from flexfleet.kubeflow.client import NotFound, connected, link, pages, translated, without_links
from flexfleet.kubeflow.follow import EXIT_CODES, state_of
from flexfleet.kubeflow.submit import checked, digest, listed, upload

ONCE = {"night_id", "run_id", "comparison_id", "study_id"}
"""Parameters that name what a pipeline creates."""


@dataclass(frozen=True)
class Scheduled:
    recurring_run_id: str
    url: str
    name: str
    cron: str
    version: str
    made: bool
    """False: a recurring run with these settings existed."""
    replaced: int
    """Number of other recurring runs of that name that were deleted."""
    active_runs: list[str]
    """Ids of the runs in progress of other recurring runs of that name. These recurring runs are disabled, and the next
    call deletes them if their runs have ended."""


def schedule(
    pipeline: str,
    parameters: Mapping[str, Any],
    name: str,
    cron: str,
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
    service_account: str | None = None,
) -> Scheduled:
    """Let Kubeflow start the pipeline at fixed times: one run at a time, without repeating missed times.

    A recurring run cannot be changed, so this creates a new one and then disables those of the same name. A disabled
    one is deleted as soon as none of its runs is in progress, because Kubernetes deletes the Workflows of a recurring
    run with it. One that is enabled and has the same settings stays, so a second call completes an interrupted one.

    Args:
        pipeline: As `name` in `submit`, which also describes the other arguments.
        parameters: Values of the form.
        name: Name of the recurring run.
        cron: Six fields, seconds first; UTC.

    Raises: as `submit`.
    """
    if len(cron.split()) != 6:
        raise ConfigError(
            f"cron must have six fields, seconds first: '0 0 2 * * *' is two o'clock every night (UTC); got {cron!r}"
        )
    if named := sorted(parameters.keys() & ONCE):
        raise ConfigError(f"{', '.join(named)}: every run would continue the same finished one; leave it out")
    text, version = checked(pipeline, parameters)
    parameters = listed(pipeline, parameters)
    settings = digest([pipeline, version, dict(parameters), cron, service_account])
    description = f"flexfleet nightly, settings {settings}"
    with connected(host) as client, without_links():
        pipeline_id, version_id, _ = upload(client, pipeline, version, text, namespace)
        where = client.create_experiment(experiment, namespace=namespace).experiment_id
        existing = pages(client.list_recurring_runs, "recurring_runs", experiment_id=where)
        known = [each for each in existing if each.display_name == name]
        same = next((each for each in known if each.description == description and _is_enabled(each)), None)
        new = same or client.create_recurring_run(
            where, name, description, cron_expression=cron, no_catchup=True, max_concurrency=1,
            params=dict(parameters), pipeline_id=pipeline_id, version_id=version_id, service_account=service_account,
        )  # fmt: skip
        others = [each for each in known if each.recurring_run_id != new.recurring_run_id]
        for each in filter(_is_enabled, others):
            client.disable_recurring_run(each.recurring_run_id)
        deleted, active = _delete(client, where, {each.recurring_run_id for each in others})
    url = link(host, "recurringrun", new.recurring_run_id)
    return Scheduled(new.recurring_run_id, url, name, cron, version, same is None, deleted, active)


def _is_enabled(recurring_run: Any) -> bool:
    return "DISABLE" not in f"{recurring_run.mode} {recurring_run.status}"


def _delete(client: Any, experiment_id: str, recurring_runs: Set[str]) -> tuple[int, list[str]]:
    """Delete those of the recurring runs that have no run in progress. Return their number, and the ids of the runs in
    progress of the others."""
    runs = pages(client.list_runs, "runs", experiment_id=experiment_id) if recurring_runs else ()
    active = [run for run in runs if run.recurring_run_id in recurring_runs and state_of(run) not in EXIT_CODES]
    idle = recurring_runs - {run.recurring_run_id for run in active}
    for id in idle:
        with contextlib.suppress(NotFound), translated():
            client.delete_recurring_run(id)
    return len(idle), [run.run_id for run in active]
