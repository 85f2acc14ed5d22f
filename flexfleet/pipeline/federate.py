"""Step 4: the rounds. After a kill at any instant, start it again with --resume."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.backends import BACKENDS, Remote, Surroundings
from fl_engine.core.contracts import Backend, Tracker, Watcher
from fl_engine.core.errors import Replaced
from fl_engine.data.local_data import FORM, Form
from fl_engine.exchange.client import Site
from fl_engine.exchange.manifest import key_of
from fl_engine.remote.kubernetes.provisioner import check_reach
from fl_engine.remote.messages import site_files
from fl_engine.rounds import at_clients, loop
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.run import Run
from fl_engine.storage import lease
from fl_engine.storage.code import Wheel, store_key
from fl_engine.storage.run_files import sum_of
from fl_engine.storage.serialization import laid_out
from fl_engine.storage.store import FolderStore, Store, sha256
from fl_engine.training.evaluation import published
from fl_engine.training.numerics import describe, describe_noise, differing
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.config.run_names import plain
from flexfleet.config.sources import sources
from flexfleet.files import terminal
from flexfleet.files.artifacts import RunFile, history_of
from flexfleet.files.manifest import MANIFEST
from flexfleet.files.progress import counted_warnings
from flexfleet.files.run_folder import folder_lock
from flexfleet.files.run_status import tally_in, tally_of
from flexfleet.files.signals import stop_on_signals
from flexfleet.pipeline import enrollment, keys, own_code
from flexfleet.pipeline.level_memory import peaks_of
from flexfleet.pipeline.partition import folders_sum, simulated
from flexfleet.pipeline.prepare import Resolved, resolved_of
from flexfleet.pipeline.resume import (
    began_with,
    check_recorded,
    devices_decide,
    fetch_run,
    known_run,
    same,
    same_place,
    same_start,
    store_of,
    tell_of_copies,
)
from flexfleet.pipeline.site import given_weights, initial_state, site_of, tell_unused, trace_of
from flexfleet.tracking import record as track
from flexfleet.tracking.console import Console
from flexfleet.tracking.trackers import MLflow, Several, ending


def federate(
    resolved: Resolved,
    partition_dir: Path,
    pool_dir: Path,
    out: Path,
    *,
    run_id: str | None = None,
    resume: bool = False,
    discard_damaged: bool = False,
    accept_numerics: bool = False,
    tags: dict[str, str] | None = None,
    mlflow_run_id: str | None = None,
    observer: Tracker | None = None,
    watcher: Watcher | None = None,
    locked: bool = False,
) -> Path:
    """Write run.json, rounds/, model.safetensors and history.json into `out`.

    Args:
        tags: Tags of the MLflow run.
        mlflow_run_id: An MLflow run that was begun for this run.
        observer: Gets all measurements.
        watcher: Gets each round before it is committed.
        locked: The caller holds the lock of `out` (`folder_lock`).

    Raises:
        ConfigError: `out` holds a run and `resume` is False, the run has another configuration, or another process of
            this machine runs it.
        InUse: A coordinator elsewhere runs it.
        EnvironmentFailure: This machine would compute other bits.
        Stopped: SIGTERM or Ctrl-C.
    """
    config, algorithm = resolved.config, resolved.algorithm
    run_id = plain(out.absolute().name if run_id is None else run_id, "run_id")
    store = store_of(config, run_id, out)
    if config.run.backend == "kubernetes":
        check_reach(store.uri())
    lock = nullcontext() if locked else folder_lock(out)
    with lock, nullcontext() if config.run.remote is None else lease.held(store) as held:
        known = _known(config, store, out, run_id, resume)
        config = config.settled(began_with(known, out / "run.json") if known else None)
        tell_unused(config)
        site = site_of(resolved, partition_dir, pool_dir, known.numerics if known else None)
        if config.evaluate.on == "clients":
            at_clients.check(algorithm, site.family, site.pool)
        private, apart = privacy.is_private(algorithm), config.run.apart
        if known:
            same_start(resolved, pool_dir, out)
            if private:
                tell_of_copies(known, keys.address(store))
        token = known.token if known else uuid.uuid4().hex if config.tracking.mlflow or private else ""
        key, key_at, place = None, known.key_at if known else None, None
        if private or apart:
            place = keys.place(config, run_id, store, out)
            key, key_at = keys.key_of_run(place, known, private), str(place)
        trace, trace_sha256 = trace_of(config, site)
        of_clients = simulated(resolved, site)
        folders = folders_sum(of_clients) if of_clients is not site else known.folders_sha256 if known else None
        wheel = own_code.wheel_of(config)
        rules = replace(site.rules, algorithm=algorithm, seed=None if devices_decide(config) else config.seed)
        signs = key_of(key) if apart and key is not None else None
        ledger = ledger_in(store, config.rounds.keep_every, rules, signs, held)

        record = RunFile(
            run_id=run_id,
            token=token,
            config=configs.public(config).model_dump(mode="json"),
            numerics=describe(site.numerics, config.run.devices),
            pool_sha256=sha256(FolderStore(pool_dir).get("pool.json")),
            partition_sha256=sha256(FolderStore(partition_dir).get("partition.json")),
            trace_sha256=trace_sha256,
            folders_sha256=folders,
            sources=sources(config),
            code_sha256=None if wheel is None else wheel.sha256,
            mlflow_run_id=(known.mlflow_run_id if known else None) or mlflow_run_id,
            key_at=key_at,
            key_sha256=sha256(key) if key is not None else known.key_sha256 if known else None,
            ledger_at=keys.address(store) if private else None,
            noise_stream=privacy.STREAM if private else None,
            noise_numerics=describe_noise() if private else None,
        )
        if known:
            record = _going_on(known, record, out, accept_numerics)
        loop.check_end(ledger, config.rounds, discard_damaged)  # before the new end is written
        FolderStore(out).delete(MANIFEST)  # the results may be of fewer rounds than the ledger from now on
        store.delete(MANIFEST)
        if wheel is not None:  # before the record that names it
            FolderStore(out).put(store_key(wheel.sha256), wheel.value)
        record.write(out / "run.json")

        done = max((round + 1 for round in ledger.checkpoints.commits()), default=0)
        console = Console(config.rounds.stop, done, stop_simulated_s=config.rounds.stop_simulated_s)
        with loop.told_how_to_go_on():  # run.json is there
            mlflow = track.start(config, record, out, tags or {}, ledger.checkpoints.check_lease)
        tracker = Several([console, *(each for each in (mlflow, observer) if each is not None)])
        with ending(tracker, Replaced):  # the other coordinator continues the MLflow run
            with loop.told_how_to_go_on():
                if mlflow is not None:
                    track.inputs(mlflow, config, site.partition.data, record.partition_sha256, record.trace_sha256)
                    record.model_copy(update={"mlflow_run_id": mlflow.run_id}).write(out / "run.json")
                tracker.params(configs.shown(config))
            site_sums = _put_site(ledger, out, partition_dir, pool_dir, wheel, site)
            first = [initial_state(resolved, site, given_weights(pool_dir, site.family))]
            run = Run(
                algorithm,
                site,
                config.rounds,
                config.run.devices,
                noise_key=privacy.noise_key(key, token) if private and key is not None else None,
                codecs=configs.codecs(config),
                trace=trace,
                wait_s=config.fleet.wait_s,
                evaluation=config.evaluate if config.evaluate.on == "clients" else None,
            )
            with counted_warnings(), stop_on_signals() as should_stop:
                surroundings = Surroundings(
                    of_clients,
                    ledger.mailbox,
                    config.run.devices,
                    run_id,
                    config.kubernetes,
                    memory=peaks_of(run, first[0]) if _needs_peaks(config) else None,
                    should_stop=should_stop,
                    code=None if wheel is None else (out / store_key(wheel.sha256), wheel.sha256),
                    agents=config.agents,
                    mailboxes=enrollment.mailboxes_of(config) if config.run.backend == "agents" else None,
                    registry=enrollment.registry_of(config) if config.run.backend == "agents" else None,
                    site_sums=site_sums,
                    patience_s=config.run.patience_s,
                )
                with BACKENDS[config.run.backend](surroundings) as backend:
                    final = loop.federate(
                        run,
                        first.pop(),  # so that the first model is freed after the first round
                        backend,
                        ledger,
                        tracker,
                        should_stop=should_stop,
                        discard_damaged=discard_damaged,
                        watcher=watcher,
                        heard=console.heard,
                    )
                    _record_numerics(backend, out)
            if isinstance(place, keys.InSecret) and not private:
                place.delete()
            with loop.told_how_to_go_on(ledger):
                return _finish(out, ledger, final, tracker, mlflow)


def _record_numerics(backend: Backend, out: Path) -> None:
    """Record in what workers' arithmetic differs from the coordinator's, if it does."""
    if isinstance(backend, Remote) and backend.workers.numerics:
        run = RunFile.read(out / "run.json")
        others = sorted({*run.worker_numerics, *backend.workers.numerics})
        run.model_copy(update={"worker_numerics": tuple(others)}).write(out / "run.json")


def _known(config: Config, store: Store, out: Path, run_id: str, resume: bool) -> RunFile | None:
    """The record of the run that is resumed here, wherever it began; None for a new run."""
    if config.run.remote is not None:
        fetch_run(store, out)
    known = known_run(config, out, resume)
    if known:
        same_place(known, config, run_id, out)
    else:
        check_recorded(store, out)
    return known


def _going_on(known: RunFile, record: RunFile, out: Path, accept_numerics: bool) -> RunFile:
    """The record of a resumed run, with the numerics of its earlier rounds. Raises what `same` raises."""
    same(known, record, out, accept_numerics)
    others = (known.numerics,) if differing(known.numerics, record.numerics) else ()
    return record.model_copy(update={"earlier_numerics": known.earlier_numerics + others})


def _needs_peaks(config: Config) -> bool:
    """Whether the memory of training is measured before the rounds, for devices or for the requests of pods."""
    pools = config.kubernetes.pools.values()
    return devices_decide(config) or (config.run.backend == "kubernetes" and any(p.memory == "auto" for p in pools))


def _put_site(
    ledger: Ledger, out: Path, partition_dir: Path, pool_dir: Path, wheel: Wheel | None, site: Site
) -> dict[str, str]:
    """Write into the store what clients on other machines need: who holds which samples, or the form of samples that
    clients have themselves. Map the names of the files to their sums."""
    if ledger.checkpoints.lease is None and ledger.mailbox.key is None:
        return {}
    run = RunFile.read(out / "run.json")
    unseen = {
        section: value for section, value in Config().model_dump(mode="json").items() if section in configs.PRIVATE
    }
    if wheel is not None:
        ledger.store.put(store_key(wheel.sha256), wheel.value)
    told = run.model_copy(update={"config": run.config | unseen})
    form = Form.of(site.data) if site.most is not None else None
    found = {}
    for name in site_files(form is not None):
        if name == "run.json":
            value = (told.model_dump_json(indent=1) + "\n").encode()
        elif name == FORM and form is not None:
            value = form.model_dump_json().encode()
        else:
            value = FolderStore(pool_dir if name == "pool.json" else partition_dir).get(name)
        ledger.store.put(f"site/{name}", value)
        found[name] = sum_of(value)
    return found


def _finish(out: Path, ledger: Ledger, final: Any, tracker: Tracker, mlflow: MLflow | None) -> Path:
    ledger.checkpoints.check_lease()
    value, folder = laid_out(published(final)), FolderStore(out)
    for store in (folder, ledger.store) if ledger.checkpoints.lease is not None else (folder,):
        store.sweep("")  # deletes what killed writers left
        store.put("model.safetensors", value)
    each_row = ledger.checkpoints.each_row  # one round at a time, because a round can have ten thousand lines
    tally = tally_of(row.metrics for row in ledger.checkpoints.each_row(lines=False))
    if mlflow is not None:
        mlflow.tags({"flexfleet.status": tally.status, "flexfleet.failures": str(tally)})
        names = dict.fromkeys(name for row in each_row() for line in row.clients for name in line)
        lines = ({"round": row.round + 1, **line} for row in each_row() for line in row.clients)
        mlflow.table(["round", *names], lines, "clients.json")
    tracker.finish("FINISHED" if tally.status == "finished" else "FAILED")
    # Last, because a study takes rounds with this file as tracked.
    folder.put("history.json", history_of(each_row(), sha256(value)))
    return out / "history.json"


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "", partition="partition", pool="model_pool")
    terminal.add_resume(p)
    terminal.add_faults(p)
    args = terminal.parsed(p, argv)
    out = federate(
        resolved_of(args),
        args.partition,
        args.pool,
        args.out,
        resume=args.resume,
        discard_damaged=args.discard_damaged,
        accept_numerics=args.accept_numerics,
    )
    tally_in(args.out).check()
    terminal.show(str(out))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
