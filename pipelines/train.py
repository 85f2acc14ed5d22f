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

from pipelines.task import COORDINATOR_KEYS, described, on_cluster, pipeline, task

# No `from __future__ import annotations` here: kfp reads the annotations themselves.
Artifact = dsl.Artifact


@task
def partition(
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
    seed: int,
    mlflow_uri: str,
    store_uri: str,
    run_id: str,
    job_id: str,
    advanced: dict[str, Any],
    config: dsl.Output[Artifact],
    parts: dsl.Output[dsl.Dataset],
    pointer: dsl.Output[Artifact],
    started: dsl.Output[dsl.Markdown],
) -> dict[str, str]:
    from pathlib import Path

    from flexfleet.config import overrides
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.run import check
    from flexfleet.steps.federate import store_of
    from flexfleet.steps.partition import partition as step
    from flexfleet.tracking import record as track
    from flexfleet.tracking import versioned

    with ending("run_id"):
        given = locals()
        resolved = overrides.config_from({name: given[name] for name in overrides.PARAMETERS}, advanced)
        name = overrides.run_name(run_id, job_id, resolved)
        store = store_of(resolved, name, overrides.run_folder(resolved, name))
        check.check(resolved)
        overrides.write_config(resolved, Path(config.path))
        mlflow_run = track.begin(resolved, name, store, track.of_job(resolved, job_id))
        Path(started.path).write_text(track.card(resolved, name, store.uri(), mlflow_run))
        step(resolved, Path(parts.path))
        parts.metadata.update(metadata.of_partition(Path(parts.path)))
        versioned.hand_on(Path(parts.path), "partition", resolved.publish.dvc, Path(pointer.path))
        return {"run": name, "mlflow": mlflow_run}


@task
def pretrain(config: dsl.Input[Artifact], parts: dsl.Input[Artifact], apoz: dsl.Output[Artifact]) -> None:
    from pathlib import Path

    from flexfleet.config import load_config
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.steps.pretrain import pretrain as step

    with ending("run_id"):
        step(load_config(config.path), Path(parts.path), Path(apoz.path))


@task
def model_pool(
    config: dsl.Input[Artifact],
    apoz: dsl.Input[Artifact],
    pool: dsl.Output[Artifact],
    pointer: dsl.Output[Artifact],
) -> None:
    from pathlib import Path

    from flexfleet.config import load_config
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.steps.model_pool import model_pool as step
    from flexfleet.tracking import versioned

    with ending("run_id"):
        resolved = load_config(config.path)
        step(resolved, Path(apoz.path), Path(pool.path))
        pool.metadata.update(metadata.of_pool(Path(pool.path)))
        versioned.hand_on(Path(pool.path), "pool", resolved.publish.dvc, Path(pointer.path))


@task
def federate(
    config: dsl.Input[Artifact],
    parts: dsl.Input[Artifact],
    pool: dsl.Input[Artifact],
    names: dict[str, str],
    job_id: str,
    run: dsl.Output[dsl.Model],
) -> None:
    from pathlib import Path

    from flexfleet.config import load_config
    from flexfleet.config.overrides import run_folder
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.in_pod import ending, patiently
    from flexfleet.run.resumable import federate_in
    from flexfleet.tracking import record as track

    with ending("run_id"):
        resolved = load_config(config.path)
        folder = run_folder(resolved, names["run"])
        tags = track.of_job(resolved, job_id)
        paths = (Path(parts.path), Path(pool.path), Path(run.path))
        patiently(lambda: federate_in(folder, resolved, *paths, tags, names["mlflow"] or None))
        run.metadata.update(metadata.of_model(Path(run.path)))


@task
def evaluate(
    config: dsl.Input[Artifact],
    run: dsl.Input[Artifact],
    pool: dsl.Input[Artifact],
    evaluation: dsl.Output[Artifact],
    metrics: dsl.Output[dsl.Metrics],
    matrix: dsl.Output[dsl.ClassificationMetrics],
) -> None:
    from pathlib import Path

    from flexfleet.config import load_config
    from flexfleet.files.artifacts import ConfusionFile, EvaluationFile
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.steps.evaluate import evaluate as step

    with ending("run_id"):
        step(load_config(config.path), Path(run.path), Path(pool.path), Path(evaluation.path))
        found = EvaluationFile.read(Path(evaluation.path) / "evaluation.json")
        metrics.log_metric("avg", found.avg)
        metrics.log_metric("full", found.full)
        for name, score in found.levels.items():
            metrics.log_metric(f"accuracy/{name}", score.accuracy)
        *_, rows = ConfusionFile.read(Path(evaluation.path) / "confusion.json").levels.values()  # of the full model
        matrix.log_confusion_matrix([str(c) for c in range(len(rows))], [list(row) for row in rows])


@task
def report(
    config: dsl.Input[Artifact],
    run: dsl.Input[Artifact],
    parts: dsl.Input[Artifact],
    apoz: dsl.Input[Artifact],
    pool: dsl.Input[Artifact],
    evaluation: dsl.Input[Artifact],
    finished: dsl.Output[dsl.Model],
    pointers: dsl.Output[Artifact],
    page: dsl.Output[dsl.HTML],
) -> None:
    import shutil
    from pathlib import Path

    from flexfleet.config import load_config
    from flexfleet.kubeflow import metadata
    from flexfleet.kubeflow.in_pod import ending, patiently
    from flexfleet.run.gather import finish
    from flexfleet.tracking.versioned import POINTERS

    with ending("run_id"):
        folders = [Path(given.path) for given in (run, parts, apoz, pool, evaluation, finished)]
        result = patiently(lambda: finish(load_config(config.path), *folders))
        finished.metadata.update(metadata.of_model(folders[0], folders[4]))
        shutil.copyfile(result.report, page.path)
        Path(pointers.path).mkdir()
        for pointer in Path(finished.path).glob(f"{POINTERS}/*.dvc"):
            shutil.copyfile(pointer, Path(pointers.path) / pointer.name)


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
    rounds_done = federate(
        config=config, parts=parts, pool=pool, names=start.outputs["Output"], job_id=job_id
    )
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
