"""Checks the parameters of a search, and computes what all its workers start from."""

from typing import Any

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
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
    from flexfleet.config.form_fields import SHORT, STUDY
    from flexfleet.experiments.tune import prepare as step
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import reachable

    given = locals()

    def checked(store_uri: str) -> Config:
        names = SHORT | STUDY
        asked = {name: given[name] for name in names if name in given} | {"store_uri": store_uri}
        return form.config_from(asked, advanced)

    with ending("study_id", given):
        config = reachable.check_form(given, checked)
        name = form.run_name(study_id, f"tune-{job_id}", config)
        return step(config, name, Path(prepared.path), job_id)
