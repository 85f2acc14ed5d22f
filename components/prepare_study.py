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

    from flexfleet.config import overrides
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.studies.study import prepare as step

    with ending("study_id", locals()):
        given = locals()
        names = overrides.PARAMETERS | overrides.STUDY
        resolved = overrides.config_from({name: given[name] for name in names if name in given}, advanced)
        name = overrides.run_name(study_id, f"tune-{job_id}", resolved)
        return step(resolved, name, Path(prepared.path), job_id)
