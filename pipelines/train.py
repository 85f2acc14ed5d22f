"""The training pipeline: partition -> pretrain -> model_pool -> federate -> evaluate -> report.

This file has only the graph: each task unpacks paths and calls the function that the command line and DVC call too.
The first task resolves and checks the whole configuration; every other task reads its outcome.

Retries: if a server does not answer, the task itself tries again. Kubeflow up to 2.16 starts a failed task again,
Kubeflow 2.17 only one whose pod vanished (docs/guides/kubeflow.md). Otherwise `flexfleet submit --wait` retries the
run; or use the UI's Retry, or start another run with the same `run_id`. `federate` owns all rounds and resumes from
`<store_uri>/<run_id>`, which therefore has to outlive a pod: s3://bucket/prefix, or a folder of a volume. Nothing
depends on a graceful end.

With `publish.dvc`, the tasks partition, model_pool and report push their outputs to a DVC remote, and each passes its
pointers on.

Caching is off for every task. Kubeflow's cache key is a task's parameters and the ids of its input artifacts: it does
not include the data set, which every task reads, and it hits only if every task before has hit. The run store makes
resuming possible, and on a laptop `dvc repro` skips what is unchanged.
"""

from typing import Any

from kfp import dsl

from components.train_tasks import evaluate, federate, model_pool, partition, pretrain, report
from pipelines.form import Field, form
from pipelines.shared import COORDINATOR_KEYS, described, on_cluster, pipeline

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.


@pipeline(
    name="train",
    display_name="Train",
    description=described(
        "Model-heterogeneous federated learning, from the partition to the report.",
        "algorithm, dataset, rounds, store_uri (where the run is kept) and mlflow_uri (where its curves go)",
    ),
)
@form(
    without=["trials"],
    run_id=Field("", "Name of the run's folder; the same name resumes the run. Empty: algorithm, seed and run id."),
    advanced=Field({}, 'Any other parameter of params.yaml by its dotted name, e.g. {"algorithm.kd_weight": 5}.'),
)
def train(**given: Any) -> None:
    """The defaults are those of `flexfleet run`, except for MLflow."""
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = partition(**given, job_id=job_id)
    config, parts = start.outputs["config"], start.outputs["parts"]
    scores = pretrain(config=config, parts=parts)
    built = model_pool(config=config, apoz=scores.outputs["apoz"])
    pool = built.outputs["pool"]
    rounds_done = federate(config=config, parts=parts, pool=pool, names=start.outputs["Output"], job_id=job_id)
    run = rounds_done.outputs["run"]
    scored = evaluate(config=config, run=run, parts=parts, pool=pool)
    reported = report(
        config=config,
        run=run,
        parts=parts,
        apoz=scores.outputs["apoz"],
        pool=pool,
        evaluation=scored.outputs["evaluation"],
    )
    for each, name in (
        (start, "1 Partition the data"),
        (scores, "2 Pre-train, APoZ"),
        (built, "3 Generate the model pool"),
        (rounds_done, "4 Federated rounds"),
        (scored, "5 Evaluate"),
        (reported, "6 Report"),
    ):
        each.set_display_name(name)
    on_cluster(start, retries=0)
    on_cluster(built, reported)
    on_cluster(scores, scored, trains=True)
    on_cluster(rounds_done, keys=COORDINATOR_KEYS, trains=True)
