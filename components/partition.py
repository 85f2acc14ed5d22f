"""The first task of `train`: checks the whole form, begins the MLflow run and cuts the partition."""

from typing import Any

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def partition(
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
    seed: int,
    mlflow_uri: str,
    store_uri: str,
    run_id: str,
    job_id: str,
    advanced: dict[str, Any],
    config: dsl.Output[Artifact],
    parts: dsl.Output[dsl.Dataset],
    dvc_pointer: dsl.Output[Artifact],
    links: dsl.Output[dsl.Markdown],
) -> dict[str, str]:
    from pathlib import Path

    from flexfleet.config import overrides
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.runs import check
    from flexfleet.steps.partition import partition as step
    from flexfleet.steps.prepare import Resolved
    from flexfleet.steps.resumed import check_begun, store_of
    from flexfleet.tracking import record as track
    from flexfleet.tracking import versioned

    with ending("run_id", locals()):
        given = locals()
        asked = overrides.config_from({name: given[name] for name in overrides.PARAMETERS}, advanced)
        name = overrides.run_name(run_id, job_id, asked)
        folder = overrides.run_folder(asked, name)
        store = store_of(asked, name, folder)
        resolved = Resolved.of(asked)
        check.check(resolved)
        check_begun(asked, store, folder)
        overrides.write_config(asked, Path(config.path))
        mlflow_run = track.begin(asked, name, store, track.of_job(asked, job_id))
        Path(links.path).write_text(track.card(asked, name, store.uri(), mlflow_run), encoding="utf-8")
        step(resolved, Path(parts.path))
        parts.metadata.update(metadata.of_partition(Path(parts.path)))
        versioned.hand_on(Path(parts.path), "partition", asked.publish.dvc, Path(dvc_pointer.path))
        return {"run": name, "mlflow": mlflow_run}
