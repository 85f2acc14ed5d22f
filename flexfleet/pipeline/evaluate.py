"""Step 5: evaluate the final model and its sub-models on the whole test set, and on each client's share of it. What
clients measured themselves (`evaluate.on: clients`) is taken from the last round."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from fl_engine.backends.in_process import check_devices, prepare_process
from fl_engine.core.errors import Diverged, IntegrityError
from fl_engine.core.task import class_count
from fl_engine.data import partition_files
from fl_engine.data.partition import Partition, labels_of, statistics
from fl_engine.rounds.at_clients import gathered
from fl_engine.storage.store import FolderStore, decode, sha256
from fl_engine.training.evaluation import Score, average, by_owner, evaluate_pool
from fl_engine.training.local_accuracy import LocalAccuracy
from flexfleet.files import terminal
from flexfleet.files.artifacts import (
    BareHistory,
    ConfusionFile,
    EvaluationFile,
    LevelScore,
    LocalScore,
    OnClients,
    PoolFile,
    rows_of,
)
from flexfleet.pipeline.partition import most_of
from flexfleet.pipeline.prepare import Resolved, unchanged

SMALLER = "Lower the learning rate: training.lr, or lr of algorithm.server"
"""What to do if a model has diverged."""


def evaluate(resolved: Resolved, run: Path, partition_dir: Path, pool_dir: Path, out: Path) -> Path:
    """Write confusion.json and evaluation.json into `out`.

    Raises:
        IntegrityError: The model is not the one in history.json.
        PartitionError: The partition is missing, or of other data.
        Diverged: A metric is not finite.
    """
    data, family, devices = resolved.data, resolved.family, resolved.config.run.devices
    pool = PoolFile.read(pool_dir / "pool.json").pool()
    history = BareHistory.read(run / "history.json")
    value = FolderStore(run).get("model.safetensors")
    if sha256(value) != history.model_sha256:
        raise IntegrityError(f"{run / 'model.safetensors'} is damaged: its sha256 is not the one in history.json")
    params = decode(value, str(run / "model.safetensors"))
    check_devices(devices)
    prepare_process(devices)
    local = _local(resolved, partition_files.load(partition_dir, data))
    watch = None if local is None else local.watch
    scores = evaluate_pool(family, params, pool, data, devices, watch=watch)
    of_clients = {} if local is None else {name: found for name in scores if (found := local.of(name))}
    scores = {name: by_owner(score, resolved.config.partition.server_classes) for name, score in scores.items()}
    sizes = {m.name: m.params for m in pool}
    tiers = [tier.name for tier in resolved.config.fleet.tiers]
    at_clients = gathered(rows_of(history)[-1].metrics, list(sizes), tiers)
    matrices = {n: tuple(map(tuple, s.confusion.tolist())) for n, s in scores.items() if s.confusion.numel()}
    ConfusionFile(levels=matrices).write(out / "confusion.json")
    return EvaluationFile(
        rounds=len(history.rounds),
        test_samples=len(data.test_y),
        avg=average(scores),
        full=scores[pool[-1].name].value,
        levels={n: told(n, s, sizes[n]) for n, s in scores.items()},
        local={n: LocalScore(mean=f.mean, sd=f.sd, clients=f.clients) for n, f in of_clients.items()},
        local_histogram={name: found.histogram for name, found in of_clients.items()},
        on_clients=None if at_clients is None else OnClients.model_validate(at_clients),
    ).write(out / "evaluation.json")


def _local(resolved: Resolved, parts: Partition) -> LocalAccuracy | None:
    """None if the task has no classes, or the server does not know those of its clients' samples."""
    data = resolved.data
    if not (classes := class_count(data.task)) or most_of(resolved.config) is not None:
        return None
    held = statistics(parts.clients, labels_of(data), classes)
    return LocalAccuracy(data.task.labels(data.test_y), held, resolved.config.seed)


def told(level: str, score: Score, params: int) -> LevelScore:
    """The entry of a level in evaluation.json. A loss that is not finite becomes null. Raises Diverged for any other
    metric that is not finite."""
    for name, value in score.metrics.items():
        if not isfinite(value):
            raise Diverged(
                f"the model has diverged: {name} of level {level} on the test samples is {value}, expected a finite "
                f"number. {SMALLER}; of a central training central.lr"
            )
    return LevelScore(metrics=dict(score.metrics), loss=score.loss if isfinite(score.loss) else None, params=params)


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "", run="federate", partition="partition", pool="model_pool")
    args = terminal.parsed(p, argv)
    with unchanged(args) as resolved:
        written = evaluate(resolved, args.run, args.partition, args.pool, args.out)
    terminal.show(str(written))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
