"""Puts the runs of a comparison into one table and one page."""

from typing import List  # noqa: UP035 - kfp accepts lists of artifacts only as typing.List

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


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

    from flexfleet.experiments.comparison_report import metrics as figures
    from flexfleet.experiments.comparison_tasks import PairsFile, collect
    from flexfleet.kubeflow.task_end import ending, patiently

    with ending("comparison_id"):
        file, out = PairsFile.read(Path(pairs.path)), Path(comparison.path)
        result = patiently(lambda: collect(file, [Path(run.path) for run in run_folders], out))
        shutil.copyfile(out / "comparison.html", page.path)
        shutil.copyfile(out / "comparison.md", table.path)
        for name, value in figures(result).items():
            metrics.log_metric(name, value)
