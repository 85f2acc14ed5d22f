"""Compares the best setting of a study with the default, on new seeds."""

from typing import List  # noqa: UP035 - kfp accepts lists of artifacts only as typing.List

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


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
