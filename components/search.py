"""A worker of a study, which runs one trial after the other."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def search(
    worker: dict[str, str],
    prepared: dsl.Input[Artifact],
    job_id: str,
    searched: dsl.Output[Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    from pathlib import Path

    from flexfleet.experiments.tune import work_in_graph
    from flexfleet.kubeflow.task_end import ending, patiently

    with ending("study_id"):
        start, out = Path(prepared.path), Path(searched.path)
        mine = patiently(lambda: work_in_graph(start, worker["study"], int(worker["worker"]), out, job_id))
        metrics.log_metric("trials", len(mine))
