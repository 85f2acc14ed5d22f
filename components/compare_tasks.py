"""Define the tasks `prepare`, `run` and `compare` of the pipeline `compare`. The pipeline `nightly` also uses `run`."""

from typing import Any, List  # noqa: UP035 - kfp accepts lists of artifacts only as typing.List

from kfp import dsl

from components.task import task

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.
Artifact = dsl.Artifact


@task
def prepare(
    dataset: str,
    model: str,
    algorithms: str,
    seeds: str,
    clients: int,
    partition_rule: str,
    dirichlet_alpha: float,
    rounds: int,
    client_fraction: float,
    local_epochs: int,
    learning_rate: float,
    mlflow_uri: str,
    store_uri: str,
    comparison_id: str,
    job_id: str,
    advanced: dict[str, Any],
    shared: dsl.Output[Artifact],
    pairs: dsl.Output[Artifact],
) -> list[str]:
    from pathlib import Path

    from flexfleet.config import form
    from flexfleet.config.comparison_runs import PlannedRun
    from flexfleet.config.dotted import SHORT
    from flexfleet.experiments.compare import prepare as step
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import check

    given = locals()
    name = comparison_id or f"compare-{job_id}"

    def checked(store_uri: str) -> list[PlannedRun]:
        parameters = {each: given[each] for each in SHORT if each in given} | {"store_uri": store_uri}
        return form.comparison_from(parameters, advanced, algorithms, seeds, name)

    with ending("comparison_id", given):
        runs = check.check_form(given, checked)
        return step(runs, name, Path(shared.path), Path(pairs.path), job_id)


@task
def run(
    number: str,
    pairs: dsl.Input[Artifact],
    shared: dsl.Input[Artifact],
    job_id: str,
    case: dsl.Output[dsl.Markdown],
    run_folder: dsl.Output[dsl.Model],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    import shutil
    from pathlib import Path

    from flexfleet.experiments.compare import PairsFile, run_pair
    from flexfleet.kubeflow.task_end import ending, metadata_of_finished, patiently

    form = {"job_id": job_id}
    with ending("comparison_id", form):
        file = PairsFile.read(Path(pairs.path))
    with ending("comparison_id" if file.commit is None else "night_id", form):
        pair = file.pairs[int(number)]
        Path(case.path).write_text(f"# {pair.label}\n\nalgorithm and seed: {pair.entry.name}\n", encoding="utf-8")
        paths = (Path(shared.path), Path(run_folder.path))
        result = patiently(lambda: run_pair(file, number, *paths, job_id))
        run_folder.metadata.update(metadata_of_finished(paths[1]))
        shutil.copyfile(paths[1] / "report.html", page.path)
        for name, value in (("avg", result.metrics["avg"]), ("full", result.metrics["full"]), ("waste", result.waste)):
            metrics.log_metric(name, value)


@task
def compare(
    pairs: dsl.Input[Artifact],
    run_folders: dsl.Input[List[Artifact]],  # noqa: UP006
    comparison: dsl.Output[Artifact],
    page: dsl.Output[dsl.HTML],
    table: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    import shutil
    from pathlib import Path

    from flexfleet.experiments.compare import PairsFile, collect
    from flexfleet.experiments.comparison_report import figures
    from flexfleet.kubeflow.task_end import ending, patiently

    with ending("comparison_id"):
        file, out = PairsFile.read(Path(pairs.path)), Path(comparison.path)
        result = patiently(lambda: collect(file, [Path(run.path) for run in run_folders], out))
        shutil.copyfile(out / "comparison.html", page.path)
        shutil.copyfile(out / "comparison.md", table.path)
        for label, values in figures(result).items():
            for name, value in values.items():
                metrics.log_metric(f"{name}/{label}", value)
