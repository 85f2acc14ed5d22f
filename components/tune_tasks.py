"""Define the tasks of the pipeline `tune`: prepare, search, report."""

from typing import Any, List  # noqa: UP035 - kfp accepts lists of artifacts only as typing.List

from kfp import dsl

from components.task import task

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.
Artifact = dsl.Artifact


@task
def prepare(
    dataset: str,
    model: str,
    algorithm: str,
    clients: int,
    partition_rule: str,
    dirichlet_alpha: float,
    rounds: int,
    client_fraction: float,
    local_epochs: int,
    learning_rate: float,
    mlflow_uri: str,
    store_uri: str,
    study_id: str,
    job_id: str,
    trials: int,
    advanced: dict[str, Any],
    prepared: dsl.Output[Artifact],
) -> list[dict[str, str]]:
    from pathlib import Path

    from flexfleet.config import Config, form
    from flexfleet.config.dotted import SHORT, STUDY
    from flexfleet.experiments.tune import prepare as step
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import check

    given = locals()

    def checked(store_uri: str) -> Config:
        names = SHORT | STUDY
        asked = {name: given[name] for name in names if name in given} | {"store_uri": store_uri}
        return form.config_from(asked, advanced)

    with ending("study_id", given):
        config = check.check_form(given, checked)
        name = form.run_name(study_id, f"tune-{job_id}", config)
        return step(config, name, Path(prepared.path), job_id)


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


@task
def report(
    workers: list[dict[str, str]],
    prepared: dsl.Input[Artifact],
    searched: dsl.Input[List[Artifact]],  # noqa: UP006
    study: dsl.Output[Artifact],
    best_settings: dsl.Output[dsl.Markdown],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    from pathlib import Path

    from flexfleet.experiments.tune import report as step
    from flexfleet.kubeflow.task_end import ending, patiently

    with ending("study_id"):
        ended, start = [Path(worker.path) for worker in searched], Path(prepared.path)
        id, out = workers[0]["study"], Path(study.path)
        tuned = patiently(lambda: step(start, id, ended, out, Path(best_settings.path), Path(page.path)))
        metrics.log_metric(f"best/{tuned.metric}", tuned.best_value)
        if tuned.gain is not None:
            metrics.log_metric("held_out/gain", tuned.gain)
