"""Checks all runs of a comparison, and computes once what the runs of one seed share."""

from typing import Any

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def prepare(
    dataset: str,
    model: str,
    algorithms: str,
    seeds: str,
    clients: int,
    partition_rule: str,
    dirichlet_alpha: float,
    rounds: int,
    client_fraction: float,
    local_epochs: int,
    learning_rate: float,
    mlflow_uri: str,
    store_uri: str,
    comparison_id: str,
    job_id: str,
    advanced: dict[str, Any],
    shared: dsl.Output[Artifact],
    pairs: dsl.Output[Artifact],
) -> list[str]:
    from pathlib import Path

    from flexfleet.config import form
    from flexfleet.config.comparison_runs import Entry
    from flexfleet.experiments.comparison_tasks import prepare as step
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import reachable

    given = locals()
    name = comparison_id or f"compare-{job_id}"

    def checked(store_uri: str) -> list[Entry]:
        parameters = {each: given[each] for each in form.PARAMETERS if each in given} | {"store_uri": store_uri}
        return form.comparison_from(parameters, advanced, algorithms, seeds, name)

    with ending("comparison_id", given):
        runs = reachable.check_form(given, checked)
        return step(runs, name, Path(shared.path), Path(pairs.path), job_id)
