"""The training pipeline: partition -> pretrain -> model_pool -> federate -> evaluate -> report.

The graph alone: each body unpacks paths and calls the function of `components` that the command line and DVC call.
The first task resolves and checks the whole configuration; every other task reads its outcome.

Retries: what a server does not answer is tried again inside the task. A pod that fails is made again by Kubeflow up to
2.16, one that is deleted by Kubeflow 2.17 (docs/guides/kubernetes.md); for what is made again by neither there is the
UI's Retry, or the same `run_id` in another run. `federate` owns all rounds and goes on with what it finds in
`<store_uri>/<run_id>`, so that has to outlive a pod: s3://bucket/prefix, or a folder of a volume. Nothing rests on a
graceful end.

With `publish.dvc`, what partition, model_pool and report make is pushed to a DVC remote; each hands on the pointers.

Caching is off for every task. Kubeflow's key is a task's parameters and the ids of its input artifacts: it does not
see the data set, which every task reads, and it hits only where every task before has hit. Resuming is the run
store's work, and on a laptop `dvc repro` skips what is unchanged.
"""

from typing import Any

from kfp import dsl

from components.evaluate import evaluate
from components.federate import federate
from components.model_pool import model_pool
from components.partition import partition
from components.pretrain import pretrain
from components.report import report
from pipelines.form import Field, form
from pipelines.shared import COORDINATOR_KEYS, described, on_cluster, pipeline

# No `from __future__ import annotations` here: kfp reads the annotations themselves.


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
    run_id=Field("", "Name of the run's folder; the same name goes on with the run. Empty: algorithm, seed and job."),
    advanced=Field({}, 'Any other parameter of params.yaml by its dotted name, e.g. {"algorithm.kd_weight": 5}.'),
)
def train(**given: Any) -> None:
    """The defaults are `flexfleet run`'s, but for MLflow."""
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = partition(**given, job_id=job_id)
    config, parts = start.outputs["config"], start.outputs["parts"]
    scores = pretrain(config=config, parts=parts)
    built = model_pool(config=config, apoz=scores.outputs["apoz"])
    pool = built.outputs["pool"]
    rounds_done = federate(config=config, parts=parts, pool=pool, names=start.outputs["Output"], job_id=job_id)
    run = rounds_done.outputs["run"]
    scored = evaluate(config=config, run=run, pool=pool)
    told = report(
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
        (told, "6 Report"),
    ):
        each.set_display_name(name)
    on_cluster(start, retries=0)
    on_cluster(built, told)
    on_cluster(scores, scored, trains=True)
    on_cluster(rounds_done, keys=COORDINATOR_KEYS, trains=True)
