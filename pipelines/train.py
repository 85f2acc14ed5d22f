"""Define the training pipeline: partition -> pretrain -> model_pool -> federate -> evaluate -> report.

This file contains only the graph. Each task unpacks paths, and calls the same function as the command line and DVC. The
first task checks the whole configuration, and all other tasks read the configuration from its output.

For retries, see docs/guides/kubeflow.md. `federate` runs all rounds and resumes from `<store_uri>/<run_id>`. This
folder or prefix must still exist after a pod has ended, so `store_uri` must be s3://bucket/prefix or a folder of a
volume.

Caching is off for every task. Kubeflow's cache key consists of a task's parameters and the IDs of its input artifacts.
The key does not include the data set, which every task reads.
"""

from typing import Any

from kfp import dsl

from components.train_tasks import evaluate, federate, model_pool, partition, pretrain, report
from pipelines.form import Field, form
from pipelines.shared import COORDINATOR_KEYS, described, on_cluster, pipeline

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.


@pipeline(
    name="train",
    display_name="Train",
    description=described(
        "Model-heterogeneous federated learning, from the partition to the report.",
        "algorithm, dataset, rounds, store_uri (storage for the run) and mlflow_uri (MLflow for its curves)",
    ),
)
@form(
    without=["trials"],
    run_id=Field("", "Name of the run's folder; the same name resumes the run. Empty: algorithm, seed and run id."),
    advanced=Field({}, 'Any other parameter of params.yaml by its dotted name, e.g. {"algorithm.kd_weight": 5}.'),
)
def train(**given: Any) -> None:
    """The defaults are the same as in `flexfleet run`, except for MLflow."""
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
