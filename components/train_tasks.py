"""Define the tasks of the pipeline `train`: partition, pretrain, model pool, federate, evaluate, report."""

from typing import Any

from kfp import dsl

from components.task import task

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.
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
    from flexfleet.config.dotted import SHORT
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import check
    from flexfleet.pipeline.partition import partition as step
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.pipeline.resume import store_of
    from flexfleet.tracking import dvc_remote
    from flexfleet.tracking import record as track

    given = locals()

    def checked(store_uri: str) -> tuple[Resolved, str]:
        asked = {name: given[name] for name in SHORT} | {"store_uri": store_uri}
        resolved = Resolved.of(form.config_from(asked, advanced))
        name = form.run_name(run_id, job_id, resolved.config)
        check.check(resolved)
        return resolved, name

    with ending("run_id", given):
        resolved, name = check.check_form(given, checked)
        asked = resolved.config
        folder = Path(asked.run.store) / name
        form.write_config(asked, Path(config.path))
        Path(links.path).write_text(track.card(asked, name, store_of(asked, name, folder).uri()), encoding="utf-8")
        step(resolved, Path(parts.path))
        dvc_remote.hand_on(Path(parts.path), "partition", asked.publish.dvc, Path(dvc_pointer.path))
        return {"run": name}


@task
def pretrain(config: dsl.Input[Artifact], parts: dsl.Input[Artifact], apoz: dsl.Output[Artifact]) -> None:
    from pathlib import Path

    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.pipeline.pretrain import pretrain as step

    with ending("run_id"):
        step(Resolved.load(config.path), Path(parts.path), Path(apoz.path))


@task
def model_pool(
    config: dsl.Input[Artifact],
    apoz: dsl.Input[Artifact],
    pool: dsl.Output[dsl.Model],
    dvc_pointer: dsl.Output[Artifact],
) -> None:
    from pathlib import Path

    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline.model_pool import model_pool as step
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.tracking import dvc_remote

    with ending("run_id"):
        resolved = Resolved.load(config.path)
        step(resolved, Path(apoz.path), Path(pool.path))
        dvc_remote.hand_on(Path(pool.path), "pool", resolved.config.publish.dvc, Path(dvc_pointer.path))


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

    from flexfleet.kubeflow.task_end import ending, metadata_of, patiently
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.pipeline.resume import store_of
    from flexfleet.pipeline.retry import federate_in
    from flexfleet.tracking import record as track

    with ending("run_id"):
        resolved = Resolved.load(config.path)
        folder = Path(resolved.config.run.store) / names["run"]  # this folder may be deleted with the pod
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
        run.metadata.update(metadata_of(Path(run.path)))


@task
def evaluate(
    config: dsl.Input[Artifact],
    run: dsl.Input[Artifact],
    parts: dsl.Input[Artifact],
    pool: dsl.Input[Artifact],
    evaluation: dsl.Output[dsl.Metrics],
    matrix: dsl.Output[dsl.ClassificationMetrics],
) -> None:
    from pathlib import Path

    from flexfleet.files.artifacts import ConfusionFile, EvaluationFile
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline.evaluate import evaluate as step
    from flexfleet.pipeline.prepare import Resolved

    with ending("run_id"):
        paths = (Path(each.path) for each in (run, parts, pool, evaluation))
        step(Resolved.load(config.path), *paths)
        scores = EvaluationFile.read(Path(evaluation.path) / "evaluation.json")
        evaluation.log_metric("avg", scores.avg)
        evaluation.log_metric("full", scores.full)
        for name, score in scores.levels.items():
            for metric, value in score.metrics.items():
                evaluation.log_metric(f"{metric}/{name}", value)
        for name, found in scores.local.items():
            evaluation.log_metric(f"local/{name}", found.mean)
        for rows in list(ConfusionFile.read(Path(evaluation.path) / "confusion.json").levels.values())[-1:]:
            # The last level is the full model. Only tasks with classes have a confusion matrix.
            matrix.log_confusion_matrix([str(c) for c in range(len(rows))], [list(row) for row in rows])


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

    from flexfleet.kubeflow.task_end import ending, metadata_of, patiently
    from flexfleet.pipeline.prepare import Resolved
    from flexfleet.pipeline.run import finish
    from flexfleet.tracking.dvc_remote import POINTERS

    with ending("run_id"):
        folders = [Path(given.path) for given in (run, parts, apoz, pool, evaluation, run_folder)]
        result = patiently(lambda: finish(Resolved.load(config.path), *folders))
        run_folder.metadata.update(metadata_of(folders[0], folders[4]))
        shutil.copyfile(result.report, page.path)
        Path(dvc_pointers.path).mkdir()
        for pointer in Path(run_folder.path).glob(f"{POINTERS}/*.dvc"):
            shutil.copyfile(pointer, Path(dvc_pointers.path) / pointer.name)
