"""Checks a suite, and computes once what the runs of one seed share."""

from typing import Any

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def prepare(
    suite: str,
    mlflow_uri: str,
    store_uri: str,
    night_id: str,
    job_id: str,
    advanced: dict[str, Any],
    shared: dsl.Output[Artifact],
    pairs: dsl.Output[Artifact],
) -> list[str]:
    from pathlib import Path

    from flexfleet.config.form import sets_of
    from flexfleet.experiments import nightly
    from flexfleet.experiments.nightly_run import Night
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import reachable

    given = locals()

    def checked(store_uri: str) -> Night:
        return nightly.prepare(suite, night_id or f"night-{job_id}", sets_of(mlflow_uri, store_uri, advanced))

    with ending("night_id", given):
        night = reachable.check_form(given, checked)
        return nightly.hand_over(night, Path(shared.path), Path(pairs.path), job_id)
