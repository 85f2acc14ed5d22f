"""Step 4: run the rounds or resume a killed run. A replay repeats the training of one client in one round."""

from __future__ import annotations

import logging
import uuid
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.backends import BACKENDS, Surroundings, WorkerBackend
from fl_engine.core.clients import kept_parameters
from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import Replaced
from fl_engine.data.local_data import FORM, Form
from fl_engine.exchange.client import Site
from fl_engine.exchange.manifest import key_of
from fl_engine.remote.messages import site_files
from fl_engine.rounds import loop
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage import run_lock
from fl_engine.storage.code import store_key
from fl_engine.storage.run_files import sum_of
from fl_engine.storage.store import FolderStore, laid_out, sha256
from fl_engine.training.evaluation import published
from fl_engine.training.numerics import describe, describe_noise, differing
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.config.read import split, used_options
from flexfleet.config.run_names import check_name
from flexfleet.config.sources import sources
from flexfleet.files.artifacts import RunFile, history_of
from flexfleet.files.progress import counted_warnings
from flexfleet.files.run_folder import BEST_MODEL, MANIFEST, folder_lock
from flexfleet.files.run_status import tally_of
from flexfleet.files.signals import stop_on_signals
from flexfleet.pipeline import enrollment, forecast, keys, own_code, partition, resume
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.profile import peaks_of
from flexfleet.pipeline.resume import Attempt, devices_decide
from flexfleet.tracking import record as track
from flexfleet.tracking.console import Console
from flexfleet.tracking.prometheus import serving
from flexfleet.tracking.trackers import MLflow, Several, ending

log = logging.getLogger("flexfleet")


def federate(
    resolved: Resolved,
    partition_dir: Path,
    pool_dir: Path,
    out: Path,
    attempt: Attempt = Attempt(),
    *,
    run_id: str | None = None,
    locked: bool = False,
) -> Path:
    """Write run.json, rounds/, model.safetensors and history.json into `out`.

    Args:
        locked: True if the caller already holds the lock of `out` (`folder_lock`).

    Raises:
        ConfigError: `out` contains a run that cannot be resumed: `attempt.resume` is False, the configuration differs,
            or another process on this machine executes the run.
        InUse: A coordinator on another machine is executing the run.
        EnvironmentFailure: This machine cannot produce bit-identical results.
        Stopped: The process received SIGTERM or Ctrl-C.
    """
    config, algorithm = resolved.config, resolved.algorithm
    run_id = check_name(out.absolute().name if run_id is None else run_id, "run_id")
    store = resume.store_of(config, run_id, out)
    lock = nullcontext() if locked else folder_lock(out)
    served = serving(config, run_id) if attempt.metrics is None else nullcontext(attempt.metrics)
    with served as metrics, lock, nullcontext() if config.run.remote is None else run_lock.hold(store) as held:
        if config.run.remote is not None:
            resume.fetch_run(store, out)  # download run.json, because the run may have started on another machine
        known = resume.known_run(config, out, attempt.resume)
        if known:
            resume.same_place(known, config, run_id, out)
        else:
            resume.check_recorded(store, out)
            if (out / "run.json").exists():
                log.info("%s has no committed round, so the run starts again with this configuration", out)
            store.delete(*store.list("rounds/"))
        config = config.settled(configs.parse_schema(known.config) if known else None)
        partition.log_unused_gpu(config)
        site = partition.site_of(resolved, partition_dir, pool_dir, known.numerics if known else None)
        if kept := kept_parameters(algorithm, site.family, site.pool):
            log.info(
                "Each client keeps its own %s. The metrics avg and full use the global model, which has the initial "
                "values of these parameters. Set evaluate.on=clients to score the clients' own models",
                ", ".join(kept[:4]) + (f" and {len(kept) - 4} more" if len(kept) > 4 else ""),
            )
        private, apart = privacy.is_private(algorithm), config.run.apart
        if known and private:
            resume.warn_of_copies(known, keys.address(store))
        token = known.token if known else uuid.uuid4().hex if config.tracking.mlflow or private else ""
        place = keys.place(config, run_id, store, out)
        key = keys.key_of_run(place, known, private)
        run = partition.run_of(config, algorithm, site, privacy.noise_key(key, token) if private else None)
        of_clients = partition.simulated(resolved, site)
        folders = (
            partition.folders_sum(of_clients) if of_clients is not site else known.folders_sha256 if known else None
        )
        wheel = own_code.wheel_of(config)
        rules = replace(site.rules, algorithm=algorithm, seed=None if devices_decide(config) else config.seed)
        signs = key_of(key) if apart else None
        forked = known.forked if known else None
        pinned = forked.round - 1 if forked else None
        ledger = Ledger(store, config.rounds.keep_every, rules, signs, held, config.run.kept_rounds, pinned)

        record = RunFile(
            run_id=run_id,
            token=token,
            config=configs.public(config).model_dump(mode="json"),
            numerics=describe(site.numerics, config.run.devices),
            pool_sha256=sha256(FolderStore(pool_dir).get("pool.json")),
            partition_sha256=sha256(FolderStore(partition_dir).get("partition.json")),
            trace_sha256=partition.trace_sum(config),
            folders_sha256=folders,
            sources=sources(config),
            code_sha256=None if wheel is None else sha256(wheel),
            forked=forked,
            mlflow_run_id=(known.mlflow_run_id if known else None) or attempt.mlflow_run_id,
            key_at=str(place),
            key_sha256=sha256(key),
            ledger_at=keys.address(store) if private else None,
            noise_stream=privacy.STREAM if private else None,
            noise_numerics=describe_noise() if private else None,
        )
        if known:
            resume.same(known, record, out, attempt.accept_numerics)
            others = (known.numerics,) if differing(known.numerics, record.numerics) else ()
            record = record.model_copy(update={"earlier_numerics": known.earlier_numerics + others})
        loop.check_end(ledger, config.rounds, attempt.discard_damaged)  # check before writing run.json
        FolderStore(out).delete(MANIFEST)  # delete the manifest, which describes outdated results
        store.delete(MANIFEST)
        if wheel is not None:  # store the wheel before run.json refers to it
            FolderStore(out).put(store_key(sha256(wheel)), wheel)
        record.write(out / "run.json")

        done = max((round + 1 for round in ledger.checkpoints.commits()), default=0)
        console = Console(config.rounds.stop, done)
        with loop.resume_hint():  # run.json exists
            mlflow = track.start(config, record, out, attempt.tags, ledger.checkpoints.check_lock)
        watcher = attempt.watcher
        if metrics is not None:
            metrics.begin(site.fleet, attempt.watcher)
            watcher = metrics
        tracker = Several([console, *(each for each in (metrics, mlflow, attempt.observer) if each is not None)])
        with ending(tracker, Replaced):  # after `Replaced`, another coordinator continues the MLflow run
            with loop.resume_hint():
                if mlflow is not None:
                    track.inputs(mlflow, config, site.partition.data, record.partition_sha256, record.trace_sha256)
                    record.model_copy(update={"mlflow_run_id": mlflow.run_id}).write(out / "run.json")
                results, settings = split(used_options(config, algorithm, site.pool))
                tracker.params(results)
                if mlflow is not None:
                    mlflow.settings(settings)
            site_sums = _put_site(ledger, out, partition_dir, pool_dir, wheel, site)
            first = [partition.initial_state(resolved, site, pool_dir)]
            if not known:
                forecast.of_started(replace(run, site=of_clients), first[0], config.run.kept_rounds, out)
            with counted_warnings(), stop_on_signals() as should_stop:
                surroundings = Surroundings(
                    of_clients,
                    ledger.mailbox,
                    config.run.devices,
                    run_id,
                    config.kubernetes,
                    memory=peaks_of(run, first[0]) if devices_decide(config) else None,
                    should_stop=should_stop,
                    code=None if wheel is None else (out / store_key(sha256(wheel)), sha256(wheel)),
                    agents=config.agents,
                    mailboxes=enrollment.mailboxes_of(config) if config.run.backend == "agents" else None,
                    registry=enrollment.registry_of(config) if config.run.backend == "agents" else None,
                    site_sums=site_sums,
                    patience_s=config.run.patience_s,
                )
                with BACKENDS[config.run.backend](surroundings) as backend:
                    final = loop.federate(
                        run,
                        first.pop(),  # use `pop` to free the initial model after the first round
                        backend,
                        ledger,
                        tracker,
                        should_stop=should_stop,
                        discard_damaged=attempt.discard_damaged,
                        watcher=watcher,
                        on_result=console.heard,
                    )
                    if isinstance(backend, WorkerBackend) and backend.workers.numerics:
                        file = RunFile.read(out / "run.json")
                        seen = sorted({*file.worker_numerics, *backend.workers.numerics})
                        file.model_copy(update={"worker_numerics": tuple(seen)}).write(out / "run.json")
            if isinstance(place, keys.InSecret) and not private:
                place.delete()
            with loop.resume_hint(ledger):
                return _finish(out, ledger, final, tracker, mlflow, key)


def _put_site(
    ledger: Ledger, out: Path, partition_dir: Path, pool_dir: Path, wheel: bytes | None, site: Site
) -> dict[str, str]:
    """Write the files that clients on other machines need, such as the partition, into the store. Return {file name:
    checksum}."""
    if ledger.checkpoints.lock is None and ledger.mailbox.key is None:
        return {}
    run = RunFile.read(out / "run.json")
    unseen = {
        section: value for section, value in Config().model_dump(mode="json").items() if section in configs.PRIVATE
    }
    if wheel is not None:
        ledger.store.put(store_key(sha256(wheel)), wheel)
    public = run.model_copy(update={"config": run.config | unseen})
    form = Form.of(site.data) if site.most is not None else None
    found = {}
    for name in site_files(form is not None):
        if name == "run.json":
            value = (public.model_dump_json(indent=1) + "\n").encode()
        elif name == FORM and form is not None:
            value = form.model_dump_json().encode()
        else:
            value = FolderStore(pool_dir if name == "pool.json" else partition_dir).get(name)
        ledger.store.put(f"site/{name}", value)
        found[name] = sum_of(value)
    return found


def _finish(out: Path, ledger: Ledger, final: Any, tracker: Tracker, mlflow: MLflow | None, secret: bytes) -> Path:
    ledger.checkpoints.check_lock()
    value, folder = laid_out(published(final)), FolderStore(out)
    best, which = None, ledger.checkpoints.best
    if which is not None:
        best = laid_out(published(loop.load_progress(final, ledger, which)[0].state))
    for store in (folder, ledger.store) if ledger.checkpoints.lock is not None else (folder,):
        store.sweep("")  # delete temporary files of killed processes
        store.put("model.safetensors", value)
        if best is not None:
            store.put(BEST_MODEL, best)
    each_row = ledger.checkpoints.each_row  # read one round at a time, because a round can have 10,000 clients
    tally = tally_of(row.metrics for row in ledger.checkpoints.each_row(lines=False))
    if mlflow is not None:
        mlflow.tags({"flexfleet.status": tally.status, "flexfleet.failures": str(tally)})
        names = dict.fromkeys(name for row in each_row() for line in row.clients for name in line if name != "details")
        lines = ({"round": row.round + 1, **line} for row in each_row() for line in row.clients)
        mlflow.table(["round", *names], lines, "clients.json")
    tracker.finish("FINISHED" if tally.status == "finished" else "FAILED")
    forecast.settle(out, ledger)
    # Write history.json last, because a study assumes that a run with this file has tracked all rounds.
    folder.put("history.json", history_of(each_row(), sha256(value), secret))
    return out / "history.json"
