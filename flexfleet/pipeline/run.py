"""`flexfleet run`: all steps in one process and one folder, with the same functions that the pipelines use."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.core.contracts import Tracker, Watcher
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.system import of_posix
from fl_engine.data import partition_files
from fl_engine.data.partition_files import read_manifest
from fl_engine.fleet import uniformity
from fl_engine.rounds import phases
from fl_engine.rounds.loop import told_how_to_go_on
from fl_engine.storage.store import Store
from flexfleet.config.run_names import plain
from flexfleet.files.artifacts import BareHistory, EvaluationFile, Result, RunFile
from flexfleet.files.manifest import MANIFEST, check_inputs, manifest_of
from flexfleet.files.measure import SHARES, highest
from flexfleet.files.run_folder import check_free, folder_lock
from flexfleet.files.run_status import Tally, tally_in
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import missing
from flexfleet.pipeline import keys
from flexfleet.pipeline.check import check, check_loadable
from flexfleet.pipeline.evaluate import evaluate
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from flexfleet.pipeline.publish import publish
from flexfleet.pipeline.resume import check_recorded, known_run, store_of
from flexfleet.pipeline.share import adopt
from flexfleet.reports import precisions
from flexfleet.reports.precisions import EXPORT
from flexfleet.reports.report import report
from flexfleet.tracking import dvc_runs
from flexfleet.tracking import record as track

log = logging.getLogger("flexfleet")

MEANS = (*(name for name in uniformity.NAMES if name != uniformity.MEASURED), *phases.REPEATED)
"""Metrics of rounds whose means a result has. They are equal in a repeated run."""


def run(
    resolved: Resolved,
    run_id: str,
    *,
    resume: bool = False,
    discard_damaged: bool = False,
    accept_numerics: bool = False,
    shared: Path | None = None,
    tags: dict[str, str] | None = None,
    observer: Tracker | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Partition, pre-train, pool, federate, evaluate and report, in the folder `<run.store>/<run_id>`.

    A run that merged no update has a result too, with that `status` (`files.run_status`); nothing of it is published.

    Args:
        shared: The folder of a `share` step, whose files are used instead of computed again.
        tags: Tags of the MLflow run.
        observer: Gets all measurements (`federate`).
        watcher: Gets each round before it is committed.
    """
    config = resolved.config
    need_packages(resolved)
    check_loadable(config)  # also where a run goes on, which is not checked again
    out = Path(config.run.store) / plain(run_id, "run_id")
    check_free(out, resume)
    if (out / "central.json").exists():
        raise ConfigError(f"{out} holds a central training: choose another --run-id")
    if not (out / "run.json").exists():  # before there is a folder: what is refused leaves none
        if config.run.remote is None:
            check_recorded(store_of(config, run_id, out), out)
        check(resolved)
        _reach(resolved, run_id, out)
    with folder_lock(out), stopping_at_once("the same command with --resume goes on"):
        if (out / "run.json").exists():
            if (known := known_run(config, out, resume)) is not None:
                check_inputs(out, known)
        else:  # the steps before the rounds are pure, so they are repeated after a kill
            if shared is not None:
                adopt(resolved, shared, out)
            else:
                partition(resolved, out / "partition")
                pretrain(resolved, out / "partition", out / "pretrain")
            model_pool(resolved, out / "pretrain", out / "pool")
        federate(
            resolved,
            out / "partition",
            out / "pool",
            out,
            run_id=run_id,
            resume=resume,
            discard_damaged=discard_damaged,
            accept_numerics=accept_numerics,
            tags=tags,
            observer=observer,
            watcher=watcher,
            locked=True,
        )
        with told_how_to_go_on():
            evaluate(resolved, out, out / "partition", out / "pool", out)
            return conclude(resolved, out, store_of(config, run_id, out))


def _reach(resolved: Resolved, run_id: str, out: Path) -> None:
    """Raise an error before minutes of pre-training if MLflow, the store, the place of the run's key or the cluster
    cannot be used."""
    config = resolved.config
    track.prepare(config)
    store = store_of(config, run_id, out)
    if config.run.remote is not None:
        store.list(track.RUN_KEY)
    if config.run.backend == "kubernetes":
        from fl_engine.remote.kubernetes.provisioner import reach

        reach(config.kubernetes, run_id, store)
    if privacy.is_private(resolved.algorithm) or config.run.apart:
        keys.place(config, run_id, store, out).read()


def need_packages(resolved: Resolved) -> None:
    """Raise EnvironmentFailure for a missing package before training, and on Windows."""
    of_posix("fcntl")
    config, wanted = resolved.config, {"matplotlib": "", "jinja2": ""}
    if config.tracking.mlflow:
        wanted["mlflow"] = ", or --set tracking.mlflow=null"
    if config.publish.models and config.publish.onnx:
        wanted |= dict.fromkeys(("onnx", "onnxruntime"), ", or --set publish.onnx=false")
    if privacy.is_private(resolved.algorithm):
        wanted["dp_accounting"] = ""
    if config.publish.dvc:
        wanted["dvc"] = ", or --set publish.dvc=null"
    for package, hint in wanted.items():
        if find_spec(package) is None:
            raise EnvironmentFailure(missing(package) + hint)


def conclude(resolved: Resolved, out: Path, store: Store) -> Result:
    """Write the report and result.json of a run whose steps are finished, and log the report to MLflow. If the run's
    ledger is not in `out`, both are also written to its `store`, because a pod's folder is deleted with the pod."""
    config, tally = resolved.config, tally_in(out)
    if not (useful := tally.status == "finished"):
        log.warning("%s", tally.problem())
    if useful and config.publish.models:  # before the report, which tells what was measured of the exported levels
        publish(resolved, out, RunFile.read(out / "run.json").mlflow_run_id, out / EXPORT)
    page = report([out], out / "report.html")
    outcome = result(out, page, store.uri(), tally)
    tags = {"model_sha256": outcome.model_sha256}
    if useful and config.publish.dvc is not None:
        tags |= dvc_runs.push_run(out, config.publish.dvc)
    with tempfile.TemporaryDirectory() as scratch:
        written = outcome.write(Path(scratch) / "result.json")
        if config.tracking.mlflow is not None and outcome.mlflow_run_id is not None:
            from flexfleet.tracking.server import Patient
            from flexfleet.tracking.trackers import log_outcome

            metrics = {"final/avg": outcome.metrics["avg"], "final/full": outcome.metrics["full"]}
            metrics |= {name: outcome.metrics[name] for name in ("label_noise",) if name in outcome.metrics}
            metrics |= {f"final/{name}": outcome.metrics[name] for name in MEANS if name in outcome.metrics}
            metrics |= {f"final/local/{name}": of["mean"] for name, of in outcome.metrics.get("local", {}).items()}
            metrics |= of_clients(outcome.metrics)
            files = [str(page), str(out / "pool" / "pool.json"), str(written)]
            pointers = out / dvc_runs.POINTERS if useful and config.publish.dvc else None
            metrics = metrics if useful else {}  # else a search by final/avg would find the run
            client = Patient(config.tracking.mlflow, config.run.patience_s)
            log_outcome(client, outcome.mlflow_run_id, metrics, tags, files, pointers)
    if config.run.remote is not None:
        store.put("report.html", page.read_bytes())
    outcome.write(out / "result.json")
    manifest = manifest_of(out)
    if config.run.remote is not None:
        store.put("result.json", (out / "result.json").read_bytes())
        store.put(MANIFEST, manifest.to_bytes())
    manifest.write(out / MANIFEST)  # last: a run with this file has ended
    return outcome


def result(out: Path, page: Path, store_uri: str, tally: Tally) -> Result:
    """The result of a run that has ended."""
    run, history = RunFile.read(out / "run.json"), BareHistory.read(out / "history.json")
    evaluation = EvaluationFile.read(out / "evaluation.json")
    measured = [row["metrics"] | {"round": row["round"] + 1} for row in history.rounds]
    noise = read_manifest(out / "partition" / partition_files.MANIFEST).reached
    best = max((m for m in measured if "avg" in m), key=lambda m: m["avg"])
    precise = precisions.of_run(out, list(evaluation.levels), history.model_sha256)
    down, up = (sum(m[k] for m in measured) for k in ("bytes_down", "bytes_up"))
    return Result(
        run_id=run.run_id,
        status=tally.status,
        metrics={
            "avg": evaluation.avg,
            "full": evaluation.full,
            "levels": {name: score.value for name, score in evaluation.levels.items()},
            **({"local": local} if (local := {k: v.model_dump() for k, v in evaluation.local.items()}) else {}),
            **({} if (told := evaluation.on_clients) is None else {"on_clients": told.model_dump()}),
            **({} if not (owned := evaluation.by_owner) else {"by_owner": owned}),
            **({} if not (further := evaluation.further) else {"further": further}),
            "best": {k: best[k] for k in ("round", "avg", "full")},
            "highest": highest_of(measured),
            **phases.means(measured, MEANS),
            **({} if noise is None else {"label_noise": noise}),
            **({"precision": precisions.to_json(precise)} if precise else {}),
            "updates": {"merged": tally.merged, "failed": tally.failed, "reasons": dict(tally.failures)},
        },
        bytes={"down": int(down), "up": int(up)},
        waste=phases.waste(measured),
        seconds=history.seconds,
        model_sha256=history.model_sha256,
        store_uri=store_uri,
        mlflow_run_id=run.mlflow_run_id,
        report=str(page),
    )


def of_clients(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The final metrics of the evaluation at the clients; empty without one."""
    found = metrics.get("on_clients", {}).get("all", {})
    return {f"final/on_clients/{name}": float(value) for name, value in found.items()}


def highest_of(measured: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """`highest` of result.json, from the measurements of all rounds."""
    avg, full = highest(measured, "avg"), highest(measured, "full")
    return {str(share): {"avg": avg[share], "full": full[share]} for share in SHARES}
