"""The first task of `train`: checks the whole form and the places that it names, and cuts the partition."""

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

    from flexfleet.config import form
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import check, reachable
    from flexfleet.pipeline.partition import partition as step
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.pipeline.resume import check_begun, store_of
    from flexfleet.tracking import dvc_remote
    from flexfleet.tracking import record as track

    given = locals()

    def checked(store_uri: str) -> tuple[Resolved, str]:
        asked = {name: given[name] for name in form.PARAMETERS} | {"store_uri": store_uri}
        resolved = Resolved.of(form.config_from(asked, advanced))
        name = form.run_name(run_id, job_id, resolved.config)
        check.check(resolved)
        return resolved, name

    with ending("run_id", given):
        resolved, name = reachable.check_form(given, checked)
        asked = resolved.config
        folder = form.run_folder(asked, name)
        store = store_of(asked, name, folder)
        check_begun(asked, store, folder)
        form.write_config(asked, Path(config.path))
        config.metadata["preparations"] = ", ".join(resolved.algorithm.preparations) or "none"
        Path(links.path).write_text(track.card(asked, name, store.uri()), encoding="utf-8")
        step(resolved, Path(parts.path))
        parts.metadata.update(metadata.of_partition(Path(parts.path)))
        dvc_remote.hand_on(Path(parts.path), "partition", asked.publish.dvc, Path(dvc_pointer.path))
        return {"run": name}
