"""Step 5: evaluate the final model and its sub-models on the test set, and estimate the local accuracy of each client.
If clients measured metrics (`evaluate.on: clients`), these metrics are copied from the last round."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from fl_engine.backends.in_process import check_devices, prepare_process
from fl_engine.core.clients import kept_parameters
from fl_engine.core.errors import Diverged
from fl_engine.core.task import class_count, class_names
from fl_engine.data.partition import Partition
from fl_engine.data.partitioning import labels_of, statistics
from fl_engine.rounds.at_clients import gathered
from fl_engine.training.evaluation import Score, average, by_owner, evaluate_pool
from fl_engine.training.local_accuracy import LocalAccuracy
from flexfleet.files.artifacts import (
    ConfusionFile,
    EvaluationFile,
    History,
    LevelScore,
    LocalScore,
    OnClients,
    PoolFile,
    read_params,
)
from flexfleet.pipeline.partition import most_of
from flexfleet.pipeline.prepare import Resolved


def evaluate(resolved: Resolved, run: Path, partition_dir: Path, pool_dir: Path, out: Path) -> Path:
    """Write confusion.json and evaluation.json into `out`.

    Raises:
        IntegrityError: The model's sha256 differs from the sha256 in history.json.
        PartitionError: The partition is missing, or was created for different data.
        Diverged: A metric of the model is NaN or infinite.
    """
    data, family, devices = resolved.data, resolved.family, resolved.config.run.devices
    pool = PoolFile.read(pool_dir / "pool.json").pool()
    history = History.read(run / "history.json")
    params = read_params(run / "model.safetensors", history.model_sha256)
    check_devices(devices)
    prepare_process(devices)
    local = _local(resolved, Partition.load(partition_dir, data))
    watch = None if local is None else local.watch
    scores = evaluate_pool(family, params, pool, data, devices, watch=watch)
    of_clients = {} if local is None else {name: found for name in scores if (found := local.of(name))}
    scores = {name: by_owner(score, resolved.config.partition.server_classes) for name, score in scores.items()}
    sizes = {m.name: m.params for m in pool}
    tiers = [tier.name for tier in resolved.config.fleet.tiers]
    at_clients = gathered(history.rounds[-1].metrics, list(sizes), tiers)
    matrices = {n: tuple(map(tuple, s.confusion.tolist())) for n, s in scores.items() if s.confusion.numel()}
    ConfusionFile(names=class_names(data.task), levels=matrices).write(out / "confusion.json")
    return EvaluationFile(
        rounds=len(history.rounds),
        test_samples=len(data.test_y),
        avg=average(scores),
        full=scores[pool[-1].name].value,
        levels={n: level_score(n, s, sizes[n]) for n, s in scores.items()},
        local={n: LocalScore(mean=f.mean, sd=f.sd, clients=f.clients) for n, f in of_clients.items()},
        local_histogram={name: found.histogram for name, found in of_clients.items()},
        on_clients=None if at_clients is None else OnClients.model_validate(at_clients),
        kept_by_clients=tuple(kept_parameters(resolved.algorithm, family, pool)),
    ).write(out / "evaluation.json")


def _local(resolved: Resolved, parts: Partition) -> LocalAccuracy | None:
    """Return an estimator of the local accuracy; None if the task has no classes or the server does not have the
    clients' labels."""
    data = resolved.data
    if not (classes := class_count(data.task)) or most_of(resolved.config) is not None:
        return None
    held = statistics(parts.clients, labels_of(data), classes)
    return LocalAccuracy(data.task.labels(data.test_y), held, resolved.config.seed)


def level_score(level: str, score: Score, params: int) -> LevelScore:
    """Return the entry of a level in evaluation.json. If the loss is not finite, it is stored as null. Raises Diverged
    if another metric is not finite."""
    for name, value in score.metrics.items():
        if not isfinite(value):
            raise Diverged(
                f"the model has diverged: {name} of level {level} on the test samples is {value}, expected a finite "
                "number. Lower the learning rate: training.lr, or lr of algorithm.server; for central training, "
                "central.lr"
            )
    return LevelScore(metrics=dict(score.metrics), loss=score.loss if isfinite(score.loss) else None, params=params)
