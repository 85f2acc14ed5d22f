"""The comparison pipeline: prepare -> (for each algorithm and seed) run -> compare.

The first task resolves and checks every run, cuts each seed's partition and pre-trains on its proxy once; then the
runs are made side by side, as many as the cluster has room for, each as `flexfleet run` makes it in the folder
`<store_uri>/<comparison_id>/<label>-s<seed>`; the last task puts them in one table and one page.

The loop is flat, over pairs of algorithm and seed: two nested ones would start a seed only when all runs of the one
before are over, and `kfp.local` cannot run them.

Retries: a run goes on with what it finds in its folder, so that has to outlive a pod. Give `comparison_id` to go on
with a comparison of an earlier job. Caching is off, for the reasons given in pipelines/train.py.
"""

from typing import Any

from kfp import dsl

from components.compare import compare
from components.prepare_comparison import prepare
from components.run_pair import run
from pipelines.shared import COORDINATOR_KEYS, described, on_cluster, pipeline

# No `from __future__ import annotations` here: kfp reads the annotations themselves.


@pipeline(
    name="compare",
    display_name="Compare",
    description=described(
        "Several federated algorithms on one task, with several seeds, in one table.",
        "algorithms, seeds, rounds, store_uri (where the runs are kept) and mlflow_uri (where their curves go)",
        '{"training.momentum": 0.9, "flexfl:algorithm.kd_weight": 5}',
    ),
)
def comparison(
    dataset: str = "digits",
    model: str = "small_cnn",
    algorithms: str = "flexfl,all_large",
    seeds: str = "0,1,2",
    clients: int = 20,
    partition_rule: str = "dirichlet",
    dirichlet_alpha: float = 0.6,
    rounds: int = 40,
    client_fraction: float = 0.3,
    local_epochs: int = 5,
    learning_rate: float = 0.05,
    mlflow_uri: str = "",
    store_uri: str = "runs",
    comparison_id: str = "",
    advanced: dict[str, Any] = {},  # noqa: B006 - kfp writes it into the specification, nobody holds it
) -> None:
    """The defaults are `flexfleet compare`'s, but for MLflow.

    Args:
        dataset: digits, fashion_mnist, cifar10, or package.module:NAME.
        model: small_cnn, vgg16, resnet18, resnet34, preresnet18, mobilenetv2, or package.module:NAME.
        algorithms: Names of algorithms, separated by commas; a variant of one is label=name, e.g. flexfl,no_kd=flexfl.
        seeds: Whole numbers, separated by commas; every algorithm runs with each.
        clients: Number of devices.
        partition_rule: iid, dirichlet, quantity, disjoint_labels or natural.
        dirichlet_alpha: Concentration of dirichlet and quantity; smaller is more heterogeneous.
        rounds: Rounds in all.
        client_fraction: Share of all clients selected per round, above 0, at most 1.
        local_epochs: Epochs that a client trains per round.
        learning_rate: Of the clients' SGD, in the first round.
        mlflow_uri: Tracking URI of an MLflow server; empty: the one that Kubeflow gives tasks, else no tracking.
        store_uri: s3://bucket/prefix of all runs, or a folder that outlives a pod.
        comparison_id: Name of the comparison's folder; the same name goes on with it. Empty: the job's.
        advanced: Any other parameter of params.yaml by its dotted name, for all runs, e.g. {"training.momentum": 0.9};
            for one algorithm alone with its label, e.g. {"no_kd:algorithm.kd_weight": 0}.
    """
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = prepare(
        dataset=dataset,
        model=model,
        algorithms=algorithms,
        seeds=seeds,
        clients=clients,
        partition_rule=partition_rule,
        dirichlet_alpha=dirichlet_alpha,
        rounds=rounds,
        client_fraction=client_fraction,
        local_epochs=local_epochs,
        learning_rate=learning_rate,
        mlflow_uri=mlflow_uri,
        store_uri=store_uri,
        comparison_id=comparison_id,
        job_id=job_id,
        advanced=advanced,
    )
    pairs = start.outputs["Output"]
    with dsl.ParallelFor(pairs, name="runs") as pair:
        one = run(pair=pair, shared=start.outputs["shared"], job_id=job_id)
    told = compare(pairs=pairs, finished=dsl.Collected(one.outputs["finished"]))
    for each, name in ((start, "1 Prepare"), (one, "2 Run"), (told, "3 Compare")):
        each.set_display_name(name)
    on_cluster(start, retries=0, trains=True)
    on_cluster(one, keys=COORDINATOR_KEYS, trains=True)
    on_cluster(told)
