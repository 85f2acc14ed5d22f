"""Makes one run of a comparison or of a night."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


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

    from flexfleet.experiments.comparison_tasks import PairsFile, run_pair
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.task_end import ending, patiently

    form = {"job_id": job_id}
    with ending("comparison_id", form):
        file = PairsFile.read(Path(pairs.path))
    with ending("comparison_id" if file.commit is None else "night_id", form):
        pair = file.pair(number)
        Path(case.path).write_text(f"# {pair.label}\n\nalgorithm and seed: {pair.entry.name}\n", encoding="utf-8")
        paths = (Path(shared.path), Path(run_folder.path))
        result = patiently(lambda: run_pair(file, number, *paths, job_id))
        run_folder.metadata.update(metadata.of_finished(paths[1]))
        shutil.copyfile(paths[1] / "report.html", page.path)
        for name, value in (("avg", result.metrics["avg"]), ("full", result.metrics["full"]), ("waste", result.waste)):
            metrics.log_metric(name, value)
