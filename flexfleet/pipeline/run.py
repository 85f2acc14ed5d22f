"""Run all steps in one process and one folder (`flexfleet run`). Pipelines call the same step functions."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fl_engine.aggregation import privacy
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.system import of_posix
from fl_engine.data import partition as partitions
from fl_engine.remote.kubernetes.objects import reach
from fl_engine.rounds import timing
from fl_engine.rounds.loop import resume_hint
from fl_engine.rounds.options import SCORE
from fl_engine.storage.store import Store
from flexfleet.config import PRIVATE, parse_with_algorithm, public
from flexfleet.config.run_names import check_name
from flexfleet.files.artifacts import EvaluationFile, Forecast, History, RunFile, RunResult
from flexfleet.files.measure import SHARES, highest
from flexfleet.files.run_folder import MANIFEST, UNFINISHED, check_free, check_inputs, folder_lock, manifest_of
from flexfleet.files.run_status import Tally, tally_in
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import missing
from flexfleet.pipeline import keys, own_code
from flexfleet.pipeline.check import check, check_folders, check_loadable
from flexfleet.pipeline.evaluate import evaluate
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import adopt, pretrain
from flexfleet.pipeline.publish import publish
from flexfleet.pipeline.resume import Attempt, check_recorded, known_run, store_of
from flexfleet.reports import precisions
from flexfleet.reports.finished_run import load
from flexfleet.reports.precisions import EXPORT
from flexfleet.reports.report import report
from flexfleet.tracking import dvc_remote
from flexfleet.tracking import record as track
from flexfleet.tracking.prometheus import serving
from flexfleet.tracking.server import Client
from flexfleet.tracking.trackers import log_confusion, log_outcome

log = logging.getLogger("flexfleet")

MEANS = (*(name for name in timing.UNIFORMITY if name != timing.MEASURED), *timing.REPEATED)
"""Round metrics whose means a result contains. None of these metrics depends on a real clock."""


def run(resolved: Resolved, run_id: str, attempt: Attempt = Attempt(), shared: Path | None = None) -> RunResult:
    """Run all steps, from the partition to the report, in the folder `<run.store>/<run_id>`.

    The model is published only if the result's `status` is `finished` (`files.run_status`).

    Args:
        shared: Output folder of a `share` step, from which the partition and the results of preparations are copied.
    """
    config = resolved.config
    need_packages(resolved)
    check_loadable(config)  # unlike `check`, this check also runs for a resumed run
    out = Path(config.run.store) / check_name(run_id, "run_id")
    check_free(out, attempt.resume, unfinished=UNFINISHED)
    if (out / "central.json").exists():
        raise ConfigError(f"{out} contains a central training run. Choose another --run-id")
    if known_run(config, out, attempt.resume) is None:  # run all checks before creating the folder
        if config.run.remote is None:
            check_recorded(store_of(config, run_id, out), out)
        check_folders(config)
        check(resolved)
        _reach(resolved, run_id, out)
    how = "the same command with --resume continues"
    with serving(config, run_id) as metrics, folder_lock(out), stopping_at_once(how):
        attempt = replace(attempt, metrics=metrics)
        if (known := known_run(config, out, attempt.resume)) is not None:
            check_inputs(out, known)
        else:  # the steps before the rounds can be repeated after a kill
            if shared is not None:
                adopt(resolved, shared, out)
            else:
                partition(resolved, out / "partition")
                pretrain(resolved, out / "partition", out / "pretrain")
            model_pool(resolved, out / "pretrain", out / "pool")
        federate(resolved, out / "partition", out / "pool", out, attempt, run_id=run_id, locked=True)
        with resume_hint():
            evaluate(resolved, out, out / "partition", out / "pool", out)
            return conclude(resolved, out, store_of(config, run_id, out))


def _reach(resolved: Resolved, run_id: str, out: Path) -> None:
    """Raise an error if MLflow, the store, the cluster, or the location of the run's key cannot be used. Without this
    check, the error would only be raised after pre-training, which can take minutes."""
    config = resolved.config
    track.prepare(config)
    store = store_of(config, run_id, out)
    if config.run.remote is not None:
        store.list(track.RUN_KEY)
    if config.run.backend == "kubernetes":
        reach(config.kubernetes, run_id, store)
    if privacy.is_private(resolved.algorithm) or config.run.apart:
        keys.place(config, run_id, store, out).read()


def need_packages(resolved: Resolved) -> None:
    """Raise EnvironmentFailure if a package for the run is missing, or if the system is Windows."""
    of_posix("fcntl")
    config, wanted = resolved.config, {"matplotlib": "", "jinja2": ""}
    if config.tracking.mlflow:
        wanted["mlflow"] = ", or --set tracking.mlflow=null"
    if config.publish.models and config.publish.onnx:
        wanted |= dict.fromkeys(("onnx", "onnxruntime"), ", or --set publish.onnx=false")
    if privacy.is_private(resolved.algorithm):
        wanted["dp_accounting"] = ""
    if config.run.metrics_port:
        wanted["prometheus_client"] = ", or --set run.metrics_port=null"
    if config.publish.dvc:
        wanted["dvc"] = ", or --set publish.dvc=null"
    for package, hint in wanted.items():
        if find_spec(package) is None:
            raise EnvironmentFailure(missing(package) + hint)


def conclude(resolved: Resolved, out: Path, store: Store) -> RunResult:
    """Write the report and result.json of a run, and log the report to MLflow. All steps of the run must be finished.
    Both files are also written to `store` if the ledger is not in `out`, for example in a pod."""
    config, tally, run = resolved.config, tally_in(out), RunFile.read(out / "run.json")
    if not (useful := tally.status == "finished"):
        log.warning("%s", tally.problem())
    if useful and config.publish.models:  # export levels first, because the report lists them
        publish(resolved, out, run.mlflow_run_id, out / EXPORT)
    page = report([load(out)], out / "report.html")
    outcome = result(out, run.run_id, run.mlflow_run_id, page, store.uri(), tally)
    tags = {"model_sha256": outcome.model_sha256}
    if useful and config.publish.dvc is not None:
        tags |= dvc_remote.push_run(out, config.publish.dvc)
    written = outcome.write(out / "result.json")
    if config.tracking.mlflow is not None and run.mlflow_run_id is not None:
        found = outcome.metrics
        metrics = {f"final/{name}": found[name] for name in ("avg", "full", *MEANS) if name in found}
        metrics |= {name: found[name] for name in ("label_noise",) if name in found}
        metrics |= {f"final/local/{name}": of["mean"] for name, of in found.get("local", {}).items()}
        at_clients = found.get("on_clients", {}).get("all", {})
        metrics |= {f"final/on_clients/{name}": float(value) for name, value in at_clients.items()}
        metrics = metrics if useful else {}  # a search in MLflow by final/avg must not find this run
        files = [str(page), str(out / "pool" / "pool.json"), str(written)]
        pointers = out / dvc_remote.POINTERS if useful and config.publish.dvc else None
        client = Client(config.tracking.mlflow, config.run.patience_s)
        log_outcome(client, run.mlflow_run_id, metrics, tags, files, pointers)
        log_confusion(client, run.mlflow_run_id, out / "confusion.json")
    manifest = manifest_of(out)
    if config.run.remote is not None:
        store.put("report.html", page.read_bytes())
        store.put("result.json", written.read_bytes())
        store.put(MANIFEST, manifest.to_bytes())
    manifest.write(out / MANIFEST)  # write the manifest last, because it marks the run as ended
    return outcome


def result(
    out: Path, run_id: str, mlflow_run_id: str | None, page: Path, store_uri: str, tally: Tally | None = None
) -> RunResult:
    """Return the result of a run that has ended. If `tally` is None, `out` contains a central training."""
    history, evaluation = History.read(out / "history.json"), EvaluationFile.read(out / "evaluation.json")
    measured = [row.metrics | {"round": row.round + 1} for row in history.rounds]
    sent = [metrics for metrics in measured if "bytes_down" in metrics]  # central training does not send any data
    best = max((m for m in measured if "avg" in m), key=lambda m: m["avg"])
    avg, full = highest(measured, "avg"), highest(measured, "full")
    metrics = {
        "avg": evaluation.avg,
        "full": evaluation.full,
        "levels": {name: score.value for name, score in evaluation.levels.items()},
        **({"local": {k: v.model_dump() for k, v in evaluation.local.items()}} if evaluation.local else {}),
        **({"on_clients": evaluation.on_clients.model_dump()} if evaluation.on_clients is not None else {}),
        **({"kept_by_clients": list(evaluation.kept_by_clients)} if evaluation.kept_by_clients else {}),
        **({"by_owner": evaluation.by_owner} if evaluation.by_owner else {}),
        **({"further": evaluation.further} if evaluation.further else {}),
        "best": {k: best[k] for k in ("round", "avg", "full")},
        "highest": {str(share): {"avg": avg[share], "full": full[share]} for share in SHARES},
        **timing.means(measured, MEANS),
    }
    scored = [m for m in measured if SCORE in m]
    if scored:
        chosen = max(scored, key=lambda m: m[SCORE])  # the first of equal scores, as `Course` chooses
        metrics["best_model"] = {name: chosen[name] for name in ("round", "avg", "full", SCORE)}
    if tally is not None:
        noise = partitions.read_manifest(out / "partition" / partitions.MANIFEST).reached
        precise = precisions.of_run(out, list(evaluation.levels), history.model_sha256)
        metrics |= {} if noise is None else {"label_noise": noise}
        metrics |= {"precision": precisions.to_json(precise)} if precise else {}
        metrics |= {name: measured[-1][name] for name in ("backdoor_success",) if name in measured[-1]}
        metrics["updates"] = {"merged": tally.merged, "failed": tally.failed, "reasons": dict(tally.failures)}
    return RunResult(
        run_id=run_id,
        status="finished" if tally is None else tally.status,
        metrics=metrics,
        bytes={way: int(sum(m[f"bytes_{way}"] for m in sent)) for way in ("down", "up")},
        waste=timing.waste(sent),
        seconds=history.seconds,
        model_sha256=history.model_sha256,
        store_uri=store_uri,
        mlflow_run_id=mlflow_run_id,
        report=str(page),
        forecast=Forecast.read(out / "forecast.json").figures if (out / "forecast.json").exists() else {},
    )


def finish(
    resolved: Resolved, run: Path, partition: Path, pretrain: Path, pool: Path, evaluation: Path, out: Path
) -> RunResult:
    """Combine the output folders of all steps into a complete run folder `out`. `run` is the output folder of the
    `federate` step. `resolved` contains the publish options, and passwords that run.json does not contain."""
    given = resolved.config
    shutil.copytree(run, out, dirs_exist_ok=True)
    for name, folder in (("partition", partition), ("pretrain", pretrain), ("pool", pool)):
        shutil.copytree(folder, out / name, dirs_exist_ok=True)
    for name in ("evaluation.json", "confusion.json"):
        shutil.copyfile(evaluation / name, out / name)
    file = RunFile.read(out / "run.json")
    own_code.enable(file, out)
    recorded, algorithm = parse_with_algorithm(own_code.stored(file), stored=True)
    shown = public(given)
    same = {name: getattr(given, name) for name in PRIVATE if getattr(shown, name) == getattr(recorded, name)}
    config = recorded.model_copy(update={**same, "publish": given.publish})
    folder = Path(config.run.store) / file.run_id
    return conclude(Resolved(config, algorithm), out, store_of(config, file.run_id, folder if folder.is_dir() else out))
