"""Generates the model pool."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def model_pool(
    config: dsl.Input[Artifact],
    apoz: dsl.Input[Artifact],
    pool: dsl.Output[dsl.Model],
    dvc_pointer: dsl.Output[Artifact],
) -> None:
    from pathlib import Path

    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline.model_pool import model_pool as step
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.tracking import dvc_remote

    with ending("run_id"):
        resolved = Resolved.load(config.path)
        step(resolved, Path(apoz.path), Path(pool.path))
        pool.metadata.update(metadata.of_pool(Path(pool.path)))
        dvc_remote.hand_on(Path(pool.path), "pool", resolved.config.publish.dvc, Path(dvc_pointer.path))
