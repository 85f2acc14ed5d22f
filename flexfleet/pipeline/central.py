"""`flexfleet central`: train the full network on all training samples, as the reference for federated runs.

Trainer, data, initial weights and metrics are those of a federated run, and an epoch takes the place of a round. The
files are in `<run.store>/<run id>`, whatever `run.remote` is:

    central.json                        the training's settings, fixed when it starts
    rounds/, metrics/                   commits (`fl_engine.storage.checkpoints`) from which it resumes after a kill
    history.json, model.safetensors     the figures of every epoch, and the weights after the last one
    evaluation.json, confusion.json     the last model on the test samples
    central.svg                         the curve
    result.json                         the figures as `--json` prints them
    manifest.json                       last, the sizes and sha256 of these files
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError, Stopped
from fl_engine.core.fields import Moves
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, Adam, LocalTask, Params
from fl_engine.data.local_data import LOCAL
from fl_engine.data.transforms import fingerprint
from fl_engine.models.build import build_model
from fl_engine.rounds.loop import AUTO_COMMIT_S, told_how_to_go_on
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore, encode, sha256
from fl_engine.training.central import Epoch, train_centrally, weights_in
from fl_engine.training.evaluation import evaluate
from fl_engine.training.numerics import Numerics, describe, differing, settled
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.config.run_names import plain
from flexfleet.config.sources import sources
from flexfleet.files.artifacts import Artifact, ConfusionFile, EvaluationFile, History, Result
from flexfleet.files.manifest import MANIFEST, manifest_of
from flexfleet.files.measure import Measure
from flexfleet.files.run_folder import check_free, check_same, folder_lock
from flexfleet.files.signals import stop_on_signals, stopping_at_once
from flexfleet.pipeline import own_code, warm_start
from flexfleet.pipeline.evaluate import told
from flexfleet.pipeline.prepare import Resolved, check_fits
from flexfleet.pipeline.run import highest_of, need_packages
from flexfleet.reports import plots
from flexfleet.tracking import record as track
from flexfleet.tracking.trackers import TOKEN, MLflow, ending, log_outcome

LEVEL = "full"
"""The full network's name in metrics, as in a federated run."""
SECTIONS = ("dataset", "model", "central")
DECIDING = ("seed", *(f"{section}." for section in SECTIONS))
"""The parameters that the training depends on. `run.precision` and the device are part of its numerics."""
TOLD = (*DECIDING, "run.precision", "run.devices")


class CentralFile(Artifact):
    """central.json."""

    run_id: str
    token: str
    """Unique. A resumed training finds its MLflow run by it."""
    config: dict[str, Any]
    """The parameters that the training depends on, by dotted name."""
    data_sha256: str
    """Fingerprint of the data set."""
    weights_sha256: str | None = None
    """The sha256 of the weights that `model.init` names or the network comes with; null for fresh weights."""
    sources: Mapping[str, str] = {}
    """Map names of the user's own code to the sha256 of its source (`config.sources`)."""
    code_sha256: str | None = None
    """The sha256 of the wheel of `run.code`."""
    numerics: dict[str, Any]
    earlier_numerics: tuple[dict[str, Any], ...] = ()
    """The numerics before each resume with --accept-numerics."""
    mlflow_run_id: str | None = None


def central(
    resolved: Resolved,
    run_id: str,
    *,
    resume: bool = False,
    discard_damaged: bool = False,
    accept_numerics: bool = False,
    tags: Mapping[str, str] | None = None,
) -> Result:
    """Train, or resume. In the result an epoch counts as a round, and no bytes are sent.

    Raises:
        ConfigError: The folder exists and `resume` is False, or it holds another training.
        EnvironmentFailure: This machine would compute other bits.
        ModelError: The training diverges.
        Stopped: SIGTERM; during the training after the epoch.
    """
    config = resolved.config
    if config.partition.rule == LOCAL:
        raise ConfigError(
            "partition.rule must not be local for central training, because nobody has all training samples"
        )
    need_packages(resolved)
    out = Path(config.run.store) / plain(run_id, "run_id")
    check_free(out, resume)
    if (out / "run.json").exists():
        raise ConfigError(f"{out} holds a federated run: choose another --run-id")
    data, family = resolved.data, _network(resolved)
    device = config.run.devices[0]
    check_device(device)
    with folder_lock(out), stopping_at_once("the same command with --resume goes on"):
        before = CentralFile.read(out / "central.json").numerics if (out / "central.json").exists() else None
        precision = settled(config.run.precision, (device,), before)
        numerics = Numerics(precision=precision)
        prepare_process((device,))
        start, weights_sha256 = warm_start.start(config, family), None
        if start is None:
            start = initial_params(family, seeds.derive(config.seed, "init"))
        else:
            weights_sha256 = sha256(encode(start))
        described = describe(numerics, (device,))
        file = _file(config, run_id, fingerprint(data), weights_sha256, described, out, accept_numerics)
        FolderStore(out).delete(MANIFEST)
        file.write(out / "central.json")
        mlflow = _tracker(config, file, out, tags or {})
        with ending(mlflow), told_how_to_go_on():
            if mlflow is not None:
                file = file.model_copy(update={"mlflow_run_id": mlflow.run_id})
                file.write(out / "central.json")
                mlflow.dataset(config.dataset.name, file.data_sha256, config.dataset.name, "training and test data")
                mlflow.file(track.environment(), "environment.json")
                mlflow.params({k: v for k, v in configs.shown(config).items() if k.startswith(TOLD)})
            checkpoints = Checkpoints(FolderStore(out.resolve()))
            params = _train(config, resolved, family, start, numerics, device, checkpoints, mlflow, discard_damaged)
            return _finish(file, resolved, family, params, device, checkpoints, mlflow, out)


def task_of(config: Config) -> LocalTask:
    """The task of the one client that holds all samples."""
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
    """The parameters that the training depends on, as `CentralFile.config` holds them."""
    values = {k: v for k, v in configs.flatten(config).items() if k.startswith(DECIDING)}
    return {k: v for k, v in values.items() if configs.moves(k) is not Moves.PLACE or k.startswith("central.")}


def _network(resolved: Resolved) -> ModelFamily:
    """The configured network, without an algorithm's changes."""
    data = resolved.data
    family = build_model(resolved.config.model, data.input_shape, data.task.outputs, submodels=False)
    check_fits(data, family)
    return family


def _file(
    config: Config,
    run_id: str,
    data_sha256: str,
    weights_sha256: str | None,
    numerics: dict[str, Any],
    out: Path,
    accept_numerics: bool,
) -> CentralFile:
    """Return central.json, new or as written when the training started. Raises an error if `out` has another one."""
    values, path, named = deciding(config), out / "central.json", sources(config, SECTIONS)
    if not path.exists():
        token = uuid.uuid4().hex
        return CentralFile(
            run_id=run_id,
            token=token,
            config=values,
            data_sha256=data_sha256,
            weights_sha256=weights_sha256,
            sources=named,
            code_sha256=own_code.sha256_of(config),
            numerics=numerics,
        )
    known = CentralFile.read(path)
    check_same(out, known.config, values)
    if known.data_sha256 != data_sha256:
        raise IntegrityError(f"{out} was started with other data. Restore them, or choose another --run-id")
    warm_start.check_same(known.weights_sha256, weights_sha256, config, out)
    own_code.check_same(known.code_sha256, config, out)
    own_code.check_sources(known.sources, named, out)
    others = differing(known.numerics, numerics)
    if not others:
        return known
    if not accept_numerics:
        raise EnvironmentFailure(
            f"this machine would not compute the same bits as the one where the training was started ({others}). "
            "Resume there, or give --accept-numerics"
        )
    earlier = (*known.earlier_numerics, known.numerics)
    return known.model_copy(update={"numerics": numerics, "earlier_numerics": earlier})


def _tracker(config: Config, file: CentralFile, out: Path, given: Mapping[str, str]) -> MLflow | None:
    about = {**track.tags(config, file.run_id, str(out.resolve())), "algorithm": "central", TOKEN: file.token, **given}
    return track.tracker(config, f"central-s{config.seed}", about, file.mlflow_run_id)


def _train(
    config: Config,
    resolved: Resolved,
    family: ModelFamily,
    start: Params,
    numerics: Numerics,
    device: str,
    checkpoints: Checkpoints,
    mlflow: MLflow | None,
    discard_damaged: bool,
) -> Params:
    """Train, and return the weights after the last epoch. Commits at most every two seconds."""
    if discard_damaged:
        checkpoints.discard_after(checkpoints.last_good())
    commits = checkpoints.commits()
    since = checkpoints.read(commits[-1])[0] if commits else None
    _log(mlflow, checkpoints.rows())
    checkpoints.tidy()
    task = task_of(config)
    pending: list[Row] = []
    began = last = time.monotonic()
    with stop_on_signals() as should_stop:
        for epoch in train_centrally(family, resolved.data, task, start, numerics, device, since):
            now, since = time.monotonic(), epoch.snapshot
            pending.append(Row(round=epoch.number - 1, metrics=_figures(epoch, now - began), clients=()))
            stopped = should_stop()
            if stopped or epoch.number == task.epochs or now - last >= AUTO_COMMIT_S:
                checkpoints.commit(epoch.number - 1, since, {}, pending)
                _log(mlflow, pending)
                pending, last = [], time.monotonic()
            if stopped and epoch.number < task.epochs:
                raise Stopped(f"stopped after epoch {epoch.number} of {task.epochs}: go on with --resume")
            began = time.monotonic()
    assert since is not None, "there is at least one epoch"
    return weights_in(since)


def _figures(epoch: Epoch, seconds: float) -> dict[str, float]:
    """The figures of an epoch, under the names that they have in a round of a federated run."""
    score = epoch.score
    found = {"avg": score.value, LEVEL: score.value, "train_loss": epoch.loss, "seconds_round": seconds}
    return found | {f"{name}/{LEVEL}": value for name, value in score.metrics.items()} | {f"loss/{LEVEL}": score.loss}


def _log(mlflow: MLflow | None, rows: list[Row]) -> None:
    if mlflow is not None:
        mlflow.metrics([(row.round + 1, row.metrics) for row in rows])


def _finish(
    file: CentralFile,
    resolved: Resolved,
    family: ModelFamily,
    params: Params,
    device: str,
    checkpoints: Checkpoints,
    mlflow: MLflow | None,
    out: Path,
) -> Result:
    data, rows, store = resolved.data, checkpoints.rows(), FolderStore(out)
    score = evaluate(family, params, FULL, data, data.test_x, data.test_y, device)
    value = encode(params)
    store.sweep("")
    store.put("model.safetensors", value)
    history = History(
        rounds=tuple(row.model_dump(mode="json") for row in rows),
        model_sha256=sha256(value),
        seconds=round(sum(row.metrics["seconds_round"] for row in rows), 3),
    )
    history.write(out / "history.json")
    matrices = {LEVEL: tuple(map(tuple, score.confusion.tolist()))} if score.confusion.numel() else {}
    ConfusionFile(levels=matrices).write(out / "confusion.json")
    evaluation = EvaluationFile(
        rounds=len(rows),
        test_samples=len(data.test_y),
        avg=score.value,
        full=score.value,
        levels={LEVEL: told(LEVEL, score, count_params(family))},
    )
    evaluation.write(out / "evaluation.json")
    curve = plots.of_levels(rows, [LEVEL], "central", Measure(evaluation.metric), "epoch")
    store.put("central.svg", curve.encode())
    best = max((row for row in rows if LEVEL in row.metrics), key=lambda row: row.metrics[LEVEL])
    found = Result(
        run_id=file.run_id,
        status="finished",
        metrics={
            "avg": evaluation.avg,
            "full": evaluation.full,
            "levels": {LEVEL: evaluation.full},
            **({} if not (further := evaluation.further) else {"further": further}),
            "best": {"round": best.round + 1, "avg": best.metrics["avg"], "full": best.metrics[LEVEL]},
            "highest": highest_of([row.metrics for row in rows]),
        },
        bytes={"down": 0, "up": 0},
        waste=0.0,
        seconds=history.seconds,
        model_sha256=history.model_sha256,
        store_uri=FolderStore(out.resolve()).uri(),
        mlflow_run_id=file.mlflow_run_id,
        report=str(out / "central.svg"),
    )
    if mlflow is not None:
        figures = {"final/avg": evaluation.avg, "final/full": evaluation.full}
        with tempfile.TemporaryDirectory() as scratch:
            files = [str(found.write(Path(scratch) / "result.json")), str(out / "central.svg")]
            log_outcome(mlflow.client, mlflow.run_id, figures, {"model_sha256": history.model_sha256}, files)
        mlflow.finish("FINISHED")
    found.write(out / "result.json")
    manifest_of(out).write(out / MANIFEST)  # last: a training with this file is finished
    return found
