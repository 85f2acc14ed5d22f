"""Runs the federated rounds; a new attempt resumes the run."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def federate(
    config: dsl.Input[Artifact],
    parts: dsl.Input[Artifact],
    pool: dsl.Input[Artifact],
    names: dict[str, str],
    job_id: str,
    run: dsl.Output[dsl.Model],
) -> None:
    import logging
    from pathlib import Path

    from flexfleet.config.form import run_folder
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.task_end import ending, patiently
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.pipeline.resume import store_of
    from flexfleet.pipeline.retry import federate_in
    from flexfleet.tracking import record as track

    with ending("run_id"):
        resolved = Resolved.load(config.path)
        folder = run_folder(resolved.config, names["run"])
        tags = track.of_job(resolved.config, job_id)
        paths = (Path(parts.path), Path(pool.path), Path(run.path))
        store = store_of(resolved.config, names["run"], folder)

        def rounds() -> Path:
            mlflow_run = track.begin(resolved.config, names["run"], store, tags)
            if mlflow_run and (link := track.link(resolved.config, mlflow_run)):
                run.metadata["mlflow"] = link
                logging.getLogger("flexfleet").info("MLflow run: %s", link)
            return federate_in(folder, resolved, *paths, tags, mlflow_run or None)

        patiently(rounds)
        run.metadata.update(metadata.of_model(Path(run.path)))
