"""Train the full network on all training samples (`flexfleet central`), as the reference for federated runs.

Central training uses the trainer, data, initial weights and metrics of a federated run, but has epochs instead of
rounds. The files are stored in the folder `<run.store>/<run id>`, even if `run.remote` is set.

    `central.json` contains the settings of the training, and is written when the training starts.
    `rounds/` and `metrics/` contain the checkpoints (`fl_engine.storage.checkpoints`).
    `history.json` contains the metrics of every epoch. `model.safetensors` contains the weights after the last epoch.
    `evaluation.json` and `confusion.json` contain the metrics of the last model on the test samples.
    `central.svg` shows the learning curve.
    `result.json` contains the result that `--json` prints.
    `manifest.json` contains the sizes and sha256 of these files, and is written last.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ConfigError, IntegrityError, Stopped
from fl_engine.core.fields import Moves
from fl_engine.core.slicing import initial_params
from fl_engine.core.task import class_names
from fl_engine.core.types import FULL, SGD, Adam, LocalTask, Params
from fl_engine.data.local_data import LOCAL
from fl_engine.data.transforms import fingerprint
from fl_engine.models.build import build_model
from fl_engine.rounds.loop import AUTO_COMMIT_S, resume_hint
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore, encode, sha256
from fl_engine.training.central import train_centrally, weights_in
from fl_engine.training.evaluation import evaluate
from fl_engine.training.numerics import Numerics, choose_precision, describe, differing
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.config.read import network_options
from flexfleet.config.run_names import check_name
from flexfleet.files.artifacts import Artifact, ConfusionFile, EvaluationFile, RunResult, history_of
from flexfleet.files.measure import Measure
from flexfleet.files.run_folder import MANIFEST, UNFINISHED, check_free, check_same, folder_lock, manifest_of
from flexfleet.files.signals import stop_on_signals, stopping_at_once
from flexfleet.pipeline import warm_start
from flexfleet.pipeline.evaluate import level_score
from flexfleet.pipeline.prepare import Resolved, check_fits
from flexfleet.pipeline.resume import Attempt, check_numerics
from flexfleet.pipeline.run import need_packages, result
from flexfleet.reports import plots
from flexfleet.tracking import record as track
from flexfleet.tracking.trackers import TOKEN, MLflow, ending, log_confusion, log_outcome

LEVEL = "full"
"""Name of the full network in metrics, as in federated runs."""
DECIDING = ("seed", "dataset.", "model.", "central.")
"""Prefixes of the parameters that determine the weights after the training."""


class CentralFile(Artifact):
    """Contents of central.json."""

    run_id: str
    token: str
    """Unique ID by which a resumed training finds its MLflow run."""
    config: dict[str, Any]
    """Values, by dotted name, of the parameters that determine the weights after the training."""
    data_sha256: str
    """Fingerprint of the data set."""
    numerics: dict[str, Any]
    mlflow_run_id: str | None = None


def central(resolved: Resolved, run_id: str, attempt: Attempt = Attempt()) -> RunResult:
    """Train the full network, or resume a training. The result counts epochs as rounds.

    Raises:
        ConfigError: The folder exists and `attempt.resume` is False, or the folder contains a different training.
        EnvironmentFailure: This machine cannot produce bit-identical results.
        ModelError: The training diverges.
        Stopped: The process received SIGTERM. The training was stopped after the current epoch.
    """
    config = resolved.config
    if config.partition.rule == LOCAL:
        raise ConfigError.at(
            "partition.rule must not be local for central training, because no machine has all training samples"
        )
    need_packages(resolved)
    out = Path(config.run.store) / check_name(run_id, "run_id")
    has_epochs = bool(Checkpoints(FolderStore(out.resolve())).commits())
    check_free(out, attempt.resume, unfinished=() if has_epochs else UNFINISHED)
    if (out / "run.json").exists():
        raise ConfigError(f"{out} contains a federated run. Choose another --run-id")
    data, device = resolved.data, config.run.devices[0]
    family = build_model(config.model, data.input_shape, data.task.outputs, submodels=False)
    check_fits(data, family)
    check_device(device)
    with folder_lock(out), stopping_at_once("the same command with --resume continues"):
        known = CentralFile.read(out / "central.json") if (out / "central.json").exists() else None
        if known and not has_epochs and known.config != deciding(config):
            known = None  # start again with this configuration
        numerics = Numerics(
            precision=choose_precision(config.run.precision, (device,), known.numerics if known else None)
        )
        prepare_process((device,))
        start = warm_start.start(config, family) or initial_params(family, seeds.derive(config.seed, "init"))
        file = CentralFile(
            run_id=run_id,
            token=known.token if known else uuid.uuid4().hex,
            config=deciding(config),
            data_sha256=fingerprint(data),
            numerics=describe(numerics, (device,)),
            mlflow_run_id=known.mlflow_run_id if known else None,
        )
        if known:
            check_same(out, known.config, file.config)
            if known.data_sha256 != file.data_sha256:
                raise IntegrityError(f"{out}: the data have changed. Restore the data, or choose another --run-id")
            check_numerics(differing(known.numerics, file.numerics), attempt.accept_numerics)
        FolderStore(out).delete(MANIFEST)
        file.write(out / "central.json")
        note = f"Trains {config.model['name']} on all training samples of {data.name} with the seed {config.seed}."
        own = {"algorithm": "central", "flexfleet.kind": "central", track.NOTE: note, TOKEN: file.token}
        about = {**track.tags(config, run_id, str(out.resolve())), **own, **attempt.tags}
        mlflow = track.tracker(config, track.name(run_id, attempt.tags), about, file.mlflow_run_id)
        with ending(mlflow), resume_hint():
            if mlflow is not None:
                file = file.model_copy(update={"mlflow_run_id": mlflow.run_id})
                file.write(out / "central.json")
                mlflow.dataset(config.dataset.name, file.data_sha256, config.dataset.name, "training and test data")
                mlflow.client.log_dict(mlflow.run_id, track.environment(), "environment.json")
                values = configs.shown(config) | network_options(config)
                mlflow.params({key: value for key, value in values.items() if key.startswith(DECIDING)})
                mlflow.settings({key: value for key, value in values.items() if key.startswith(("run.", "tracking."))})
            checkpoints = Checkpoints(FolderStore(out.resolve()))
            if attempt.discard_damaged:
                checkpoints.discard_after(checkpoints.last_good())
            params = _train(resolved, family, start, numerics, device, checkpoints, mlflow)
            return _finish(file, resolved, family, params, checkpoints.rows(), mlflow, out)


def task_of(config: Config) -> LocalTask:
    """Return the task that trains the full network on all training samples."""
    c = config.central
    return LocalTask(
        FULL,
        Adam(c.lr) if c.optimizer == "adam" else SGD(c.lr, c.momentum, c.weight_decay),
        epochs=c.epochs,
        batch_size=c.batch_size,
        drop_last=False,
        seed=seeds.derive(config.seed, "central"),
        augment=c.augment,
        schedule=c.schedule,
    )


def deciding(config: Config) -> dict[str, Any]:
    """Return the parameters that are stored in `CentralFile.config`."""
    values = {k: v for k, v in configs.flatten(config).items() if k.startswith(DECIDING)}
    return {k: v for k, v in values.items() if configs.moves(k) is not Moves.PLACE or k.startswith("central.")}


def _train(
    resolved: Resolved,
    family: ModelFamily,
    start: Params,
    numerics: Numerics,
    device: str,
    checkpoints: Checkpoints,
    mlflow: MLflow | None,
) -> Params:
    """Train the remaining epochs, and return the final weights. Checkpoints are at least two seconds apart."""
    commits = checkpoints.commits()
    snapshot = checkpoints.read(commits[-1])[0] if commits else None
    if mlflow is not None:
        mlflow.metrics([(row.round + 1, row.metrics) for row in checkpoints.rows()])
    checkpoints.tidy()
    task = task_of(resolved.config)
    pending: list[Row] = []
    began = last = time.monotonic()
    with stop_on_signals() as should_stop:
        for epoch in train_centrally(family, resolved.data, task, start, numerics, device, snapshot):
            now, snapshot = time.monotonic(), epoch.snapshot
            score = epoch.score
            metrics = {"avg": score.value, LEVEL: score.value, "train_loss": epoch.loss, "seconds_round": now - began}
            metrics |= {f"{name}/{LEVEL}": value for name, value in score.metrics.items()}
            metrics[f"loss/{LEVEL}"] = score.loss
            pending.append(Row(round=epoch.number - 1, metrics=metrics, clients=()))
            stopped = should_stop()
            if stopped or epoch.number == task.epochs or now - last >= AUTO_COMMIT_S:
                checkpoints.commit(epoch.number - 1, snapshot, {}, pending)
                if mlflow is not None:
                    mlflow.metrics([(row.round + 1, row.metrics) for row in pending])
                pending, last = [], time.monotonic()
            if stopped and epoch.number < task.epochs:
                raise Stopped(f"stopped after epoch {epoch.number} of {task.epochs}. Continue with --resume")
            began = time.monotonic()
    assert snapshot is not None, "there is at least one epoch"
    return weights_in(snapshot)


def _finish(
    file: CentralFile,
    resolved: Resolved,
    family: ModelFamily,
    params: Params,
    rows: list[Row],
    mlflow: MLflow | None,
    out: Path,
) -> RunResult:
    data, store = resolved.data, FolderStore(out)
    score = evaluate(family, params, FULL, data, data.test_x, data.test_y, resolved.config.run.devices[0])
    value = encode(params)
    store.sweep("")
    store.put("model.safetensors", value)
    store.put("history.json", history_of(rows, sha256(value)))
    matrices = {LEVEL: tuple(map(tuple, score.confusion.tolist()))} if score.confusion.numel() else {}
    ConfusionFile(names=class_names(data.task), levels=matrices).write(out / "confusion.json")
    evaluation = EvaluationFile(
        rounds=len(rows),
        test_samples=len(data.test_y),
        avg=score.value,
        full=score.value,
        levels={LEVEL: level_score(LEVEL, score, count_params(family))},
    )
    evaluation.write(out / "evaluation.json")
    curve = plots.of_levels(rows, [LEVEL], "central", Measure(evaluation.metric), "epoch")
    store.put("central.svg", curve.encode())
    uri = FolderStore(out.resolve()).uri()
    found = result(out, file.run_id, file.mlflow_run_id, out / "central.svg", uri)
    written = found.write(out / "result.json")
    if mlflow is not None:
        metrics = {"final/avg": evaluation.avg, "final/full": evaluation.full}
        files = [str(written), str(out / "central.svg")]
        log_outcome(mlflow.client, mlflow.run_id, metrics, {"model_sha256": found.model_sha256}, files)
        log_confusion(mlflow.client, mlflow.run_id, out / "confusion.json")
        mlflow.finish("FINISHED")
    manifest_of(out).write(out / MANIFEST)  # write the manifest last, because it marks the training as finished
    return found
