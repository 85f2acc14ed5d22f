"""Gathers the outputs of all tasks into one run folder, and writes its report."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def report(
    config: dsl.Input[Artifact],
    run: dsl.Input[Artifact],
    parts: dsl.Input[Artifact],
    apoz: dsl.Input[Artifact],
    pool: dsl.Input[Artifact],
    evaluation: dsl.Input[Artifact],
    run_folder: dsl.Output[dsl.Model],
    dvc_pointers: dsl.Output[Artifact],
    page: dsl.Output[dsl.HTML],
) -> None:
    import shutil
    from pathlib import Path

    from flexfleet.config import load_config
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.task_end import ending, patiently
    from flexfleet.pipeline.report import finish
    from flexfleet.tracking.dvc_runs import POINTERS

    with ending("run_id"):
        folders = [Path(given.path) for given in (run, parts, apoz, pool, evaluation, run_folder)]
        result = patiently(lambda: finish(load_config(config.path), *folders))
        run_folder.metadata.update(metadata.of_model(folders[0], folders[4]))
        shutil.copyfile(result.report, page.path)
        Path(dvc_pointers.path).mkdir()
        for pointer in Path(run_folder.path).glob(f"{POINTERS}/*.dvc"):
            shutil.copyfile(pointer, Path(dvc_pointers.path) / pointer.name)
