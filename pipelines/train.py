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
def train(
    dataset: str = "digits",
    model: str = "small_cnn",
    algorithm: str = "flexfl",
    clients: int = 20,
    partition_rule: str = "dirichlet",
    dirichlet_alpha: float = 0.6,
    rounds: int = 40,
    client_fraction: float = 0.3,
    local_epochs: int = 5,
    learning_rate: float = 0.05,
    seed: int = 0,
    mlflow_uri: str = "",
    store_uri: str = "runs",
    run_id: str = "",
    advanced: dict[str, Any] = {},  # noqa: B006 - kfp writes it into the specification, nobody holds it
) -> None:
    """The defaults are `flexfleet run`'s, but for MLflow.

    Args:
        dataset: digits, fashion_mnist, cifar10, or package.module:NAME.
        model: small_cnn, vgg16, resnet18, resnet34, preresnet18, mobilenetv2, or package.module:NAME.
        algorithm: flexfl, adaptivefl, heterofl, ... (fl_engine/algorithms), or package.module:NAME.
        clients: Number of devices.
        partition_rule: iid, dirichlet, quantity, disjoint_labels or natural.
        dirichlet_alpha: Concentration of dirichlet and quantity; smaller is more heterogeneous.
        rounds: Rounds in all.
        client_fraction: Share of all clients selected per round, above 0, at most 1.
        local_epochs: Epochs that a client trains per round.
        learning_rate: Of the clients' SGD, in the first round.
        seed: Everything random follows from it.
        mlflow_uri: Tracking URI of an MLflow server; empty: the one that Kubeflow gives tasks, else no tracking.
        store_uri: s3://bucket/prefix of all runs, or a folder that outlives a pod.
        run_id: Name of the run's folder; the same name goes on with the run. Empty: algorithm, seed and job.
        advanced: Any other parameter of params.yaml by its dotted name, e.g. {"algorithm.kd_weight": 5}.
    """
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = partition(
        dataset=dataset,
        model=model,
        algorithm=algorithm,
        clients=clients,
        partition_rule=partition_rule,
        dirichlet_alpha=dirichlet_alpha,
        rounds=rounds,
        client_fraction=client_fraction,
        local_epochs=local_epochs,
        learning_rate=learning_rate,
        seed=seed,
        mlflow_uri=mlflow_uri,
        store_uri=store_uri,
        run_id=run_id,
        job_id=job_id,
        advanced=advanced,
    )
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
