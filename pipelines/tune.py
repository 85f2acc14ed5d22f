"""The tuning pipeline: prepare -> tune.

The first task resolves and checks the configuration; the second is the whole study, trial after trial in its pod, as
`flexfleet tune` makes it in the folder `<store_uri>/<study_id>`. What a killed pod leaves is gone on with where that
folder outlives it (a volume), or, trial by trial, where `tune.storage` or a Secret names a data base; with `store_uri`
in S3 and no data base the study begins again. Caching is off, for the reasons given in pipelines/train.py.
"""

from typing import Any

from kfp import dsl, kubernetes

from pipelines.task import COORDINATOR_KEYS, TUNE_KEY, TUNE_SECRET, described, on_cluster, pipeline, task

# No `from __future__ import annotations` here: kfp reads the annotations themselves.
Artifact = dsl.Artifact


@task
def prepare(
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
    mlflow_uri: str,
    store_uri: str,
    study_id: str,
    job_id: str,
    trials: int,
    advanced: dict[str, Any],
    config: dsl.Output[Artifact],
) -> str:
    from pathlib import Path

    from components import check, overrides

    given = locals()
    names = overrides.PARAMETERS | overrides.STUDY
    resolved = overrides.config_from({name: given[name] for name in names if name in given}, advanced)
    name = overrides.run_name(study_id, f"tune-{job_id}", resolved)
    check.check(resolved)
    overrides.write_config(resolved, Path(config.path))
    return name


@task
def tune(
    config: dsl.Input[Artifact],
    study_name: str,
    job_id: str,
    study: dsl.Output[Artifact],
    told: dsl.Output[dsl.Markdown],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    from pathlib import Path

    from components.tune import in_graph
    from fl_engine.config import load_config

    out, text, drawn = (Path(each.path) for each in (study, told, page))
    found = in_graph(load_config(config.path), study_name, out, text, drawn, job_id)
    metrics.log_metric(f"best/{found.metric}", found.best_value)
    metrics.log_metric("held_out/gain", found.gain)


@pipeline(
    name="tune",
    display_name="Tune",
    description=described(
        "A search for hyper-parameters, checked on seeds that no trial has seen.",
        "algorithm, trials, rounds, store_uri (where the study is kept) and mlflow_uri (where the curves go)",
        '{"tune.space": {"training.lr": {"low": 0.01, "high": 0.1, "log": true}}}',
    ),
)
def tuning(
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
    mlflow_uri: str = "",
    store_uri: str = "runs",
    study_id: str = "",
    trials: int = 30,
    advanced: dict[str, Any] = {},  # noqa: B006 - kfp writes it into the specification, nobody holds it
) -> None:
    """The defaults are `flexfleet tune`'s, without MLflow.

    Args:
        dataset: digits, fashion_mnist, cifar10, or package.module:NAME.
        model: small_cnn, vgg16, resnet18, resnet34, preresnet18, mobilenetv2, or package.module:NAME.
        algorithm: flexfl, adaptivefl, heterofl, ... (fl_engine/algorithms), or package.module:NAME.
        clients: Number of devices.
        partition_rule: iid, dirichlet, quantity, disjoint_labels or natural.
        dirichlet_alpha: Concentration of dirichlet and quantity; smaller is more heterogeneous.
        rounds: Rounds of each trial.
        client_fraction: Share of all clients selected per round, above 0, at most 1.
        local_epochs: Epochs that a client trains per round.
        learning_rate: Of the clients' SGD, in the first round.
        mlflow_uri: Tracking URI of an MLflow server; empty: the one that Kubeflow gives tasks, else no tracking.
        store_uri: Folder of all studies, of a volume that outlives a pod; or s3://bucket/prefix for the trials' rounds.
        study_id: Name of the study's folder; the same name goes on with the study. Empty: algorithm, seed and job.
        trials: Complete and pruned ones together.
        advanced: Any other parameter of params.yaml by its dotted name, e.g. {"tune.metric": "full"}; the space as
            {"tune.space": {"training.lr": {"low": 0.01, "high": 0.1, "log": true}}}.
    """
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = prepare(
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
        mlflow_uri=mlflow_uri,
        store_uri=store_uri,
        study_id=study_id,
        job_id=job_id,
        trials=trials,
        advanced=advanced,
    )
    searched = tune(config=start.outputs["config"], study_name=start.outputs["Output"], job_id=job_id)
    on_cluster(start, retries=0)
    on_cluster(searched, keys=COORDINATOR_KEYS)
    kubernetes.use_secret_as_env(searched, TUNE_SECRET, {TUNE_KEY: TUNE_KEY}, optional=True)
