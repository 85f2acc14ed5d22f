"""Evaluates the final model and its sub-models on the test set."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


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
            # The last level is the full model. Without classes there is no confusion matrix.
            matrix.log_confusion_matrix([str(c) for c in range(len(rows))], [list(row) for row in rows])
