"""Step 4: the rounds. After a kill at any instant, start it again with --resume."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch

from fl_engine.aggregation import privacy
from fl_engine.algorithms.pooled import Training
from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.backends.in_process import prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, ModelFamily, Tracker, Watcher
from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    FlexfleetError,
    IntegrityError,
    ModelError,
    Replaced,
    Stopped,
)
from fl_engine.core.fields import Moves
from fl_engine.core.samples import Task
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import Params
from fl_engine.data import partitioning as partition
from fl_engine.data.local import FORM, Form
from fl_engine.exchange.assignment import site_files
from fl_engine.exchange.client import Site
from fl_engine.exchange.code import Wheel, store_key
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.server import ServerSite
from fl_engine.exchange.updates import KeyOf
from fl_engine.exchange.updates import key_of as signing_key
from fl_engine.fleet import devices, faults, traces
from fl_engine.fleet.trace import Trace
from fl_engine.preparation.weights import fitting
from fl_engine.rounds import at_clients, loop
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.run import Run
from fl_engine.selection.capacity import round_size
from fl_engine.storage import lease
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.lease import Lease
from fl_engine.storage.pieces import laid_out
from fl_engine.storage.places import open_store
from fl_engine.storage.store import FolderStore, Store, sha256
from fl_engine.training import strategy
from fl_engine.training.evaluation import published
from fl_engine.training.numerics import Numerics, describe, describe_noise, differing, flushes, settled
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.config.names import plain
from flexfleet.config.sources import sources
from flexfleet.files import terminal as common
from flexfleet.files.alone import alone
from flexfleet.files.artifacts import WEIGHTS, PoolFile, RunFile, history_of
from flexfleet.files.live import counted_warnings
from flexfleet.steps import invitations, keys, own_code, warm_start
from flexfleet.steps.partition import folders_sum, held_out, most_of, simulated
from flexfleet.steps.peaks import peaks_of
from flexfleet.steps.prepare import Resolved, resolved_of
from flexfleet.tracking import record as track
from flexfleet.tracking.console import Console
from flexfleet.tracking.trackers import MLflow, Several

log = logging.getLogger("flexfleet")


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
    """Writes run.json, rounds/, model.safetensors and history.json into `out`. `tags`: of the MLflow run;
    `mlflow_run_id`: an MLflow run that was begun for this run. `observer` gets all measurements, `watcher` each round
    before it is committed. `locked`: the caller holds the lock of `out` (`alone`).

    Raises ConfigError if `out` holds a run and `resume` is not given, if that run has another configuration, or if it
    is running; EnvironmentFailure if this machine would compute other bits; Stopped on SIGTERM or Ctrl-C.
    """
    run_id = plain(out.absolute().name if run_id is None else run_id, "run_id")
    store = store_of(resolved.config, run_id, out)
    lock = nullcontext() if locked else alone(out)
    with lock, nullcontext() if resolved.config.run.remote is None else lease.held(store) as held:
        return _federate(
            resolved,
            store,
            held,
            partition_dir,
            pool_dir,
            out,
            run_id,
            resume,
            discard_damaged,
            accept_numerics,
            tags or {},
            mlflow_run_id,
            observer,
            watcher,
        )


def _federate(
    resolved: Resolved,
    store: Store,
    held: Lease | None,
    partition_dir: Path,
    pool_dir: Path,
    out: Path,
    run_id: str,
    resume: bool,
    discard_damaged: bool,
    accept_numerics: bool,
    tags: dict[str, str],
    mlflow_run_id: str | None,
    observer: Tracker | None,
    watcher: Watcher | None,
) -> Path:
    config, algorithm = resolved.config, resolved.algorithm
    if config.run.remote is not None:
        _fetch_run(store, out)
    known = known_run(config, out, resume)
    if known:
        _same_place(known, config, run_id, out)
    tell_unused(config)
    site = site_of(resolved, partition_dir, pool_dir, known.numerics if known else None)
    if config.evaluate.on == "clients":
        at_clients.check(algorithm, site.family, site.pool)
    if known:
        warm_start.check_unchanged(resolved, pool_dir, out)
    rules = replace(site.rules, algorithm=algorithm, seed=None if devices_decide(config) else config.seed)
    private, apart = privacy.is_private(algorithm), config.run.apart
    if known and private:
        _same_noise(known, out)
    token = known.token if known else uuid.uuid4().hex if config.tracking.mlflow or private else ""
    key, key_at = None, known.key_at if known else None
    if private or apart:
        place = keys.place(config, run_id, store, out)
        key, key_at = keys.key_of_run(place, store, known), str(place)
    trace, trace_sha256 = trace_of(config, site)
    of_clients = simulated(resolved, site)
    wheel = own_code.wheel_of(config)
    ledger = ledger_in(store, config.rounds.keep_every, rules, *_signing(key if apart else None), held)

    run = RunFile(
        run_id=run_id,
        token=token,
        config=configs.public(config).model_dump(mode="json"),
        numerics=describe(site.numerics, config.run.devices),
        pool_sha256=sha256((pool_dir / "pool.json").read_bytes()),
        partition_sha256=sha256((partition_dir / "partition.json").read_bytes()),
        trace_sha256=trace_sha256,
        folders_sha256=folders_sum(of_clients) if of_clients is not site else known.folders_sha256 if known else None,
        sources=sources(config),
        code_sha256=None if wheel is None else wheel.sha256,
        mlflow_run_id=(known.mlflow_run_id if known else None) or mlflow_run_id,
        key_at=key_at,
        key_sha256=sha256(key) if key is not None else known.key_sha256 if known else None,
        noise_stream=privacy.STREAM if private else None,
        noise_numerics=describe_noise() if private else None,
    )
    if known:
        _same(known, run, out, accept_numerics)
        others = (known.numerics,) if differing(known.numerics, run.numerics) else ()
        before = known.earlier_numerics + others
        run = run.model_copy(update={"earlier_numerics": before})
    if wheel is not None:  # before the record that names it
        FolderStore(out).put(store_key(wheel.sha256), wheel.value)
    run.write(out / "run.json")
    mlflow = track.start(config, run, out, tags)
    if mlflow is not None:
        track.inputs(mlflow, config, site.partition.data, run.partition_sha256, run.trace_sha256)
        run = run.model_copy(update={"mlflow_run_id": mlflow.run_id})
        run.write(out / "run.json")
    form = Form.of(site.data) if site.most is not None else None
    _put_site(ledger, out, partition_dir, pool_dir, wheel, form)

    done = max((round + 1 for round in ledger.checkpoints.commits()), default=0)
    console = Console(config.rounds.stop, done, stop_simulated_s=config.rounds.stop_simulated_s)
    tracker = Several([console, *(t for t in (mlflow, observer) if t is not None)])
    tracker.params(configs.shown(config))
    first = [initial_state(resolved, site, given_weights(pool_dir, site.family))]
    noise_key = privacy.noise_key(key, token) if private and key is not None else None
    described = Run(
        algorithm,
        site,
        config.rounds,
        config.run.devices,
        noise_key,
        configs.codecs(config),
        trace,
        config.fleet.wait_s,
        config.evaluate if config.evaluate.on == "clients" else None,
    )
    try:
        with (
            counted_warnings(),
            stop_on_signals() as should_stop,
            BACKENDS[config.run.backend](
                _surroundings(config, described, of_clients, first[0], ledger.mailbox, run_id, should_stop, out, wheel)
            ) as backend,
        ):
            final = loop.federate(
                described,
                first.pop(),  # nobody else holds the first model, so that it goes with the first round
                backend,
                ledger,
                tracker,
                should_stop=should_stop,
                discard_damaged=discard_damaged,
                watcher=watcher,
                heard=console.heard,
            )
    except Replaced:
        raise  # MLflow shows the other coordinator's run now
    except BaseException as error:
        with suppress(EnvironmentFailure):  # of the tracker: the first error is the one to report
            tracker.finish("KILLED" if isinstance(error, Stopped | KeyboardInterrupt) else "FAILED")
        raise
    return _finish(out, ledger, final, tracker, mlflow)


def site_of(resolved: Resolved, partition_dir: Path, pool_dir: Path, before: Mapping[str, Any] | None = None) -> Site:
    """All that clients on this machine need to know. Prepares the process for training. `before`: the numerics of the
    run that is resumed, whose precision a run with `run.precision=auto` keeps (and see `flushes`)."""
    config, family = resolved.config, resolved.family
    parts = partition.load(partition_dir, resolved.data)
    data = partition.as_told(resolved.data, parts)
    parts, held = held_out(config, parts)
    pool = PoolFile.read(pool_dir / "pool.json").pool()
    fleet = devices.fleet(config.fleet.tiers, config.partition.clients, config.seed, family)
    prepare_process(config.run.devices, flush_denormal=flushes(before))
    struck = faults.parse(config.rounds.faults)
    numerics = numerics_of(config, training_of(resolved.algorithm), family, data.task, before)
    sealed = config.run.backend == "kubernetes" and config.kubernetes.state_key is not None
    most = most_of(config)
    return Site(family, pool, fleet, data, parts, config.seed, numerics, None, struck, sealed, None, held, most)


def trace_of(config: Config, site: Site) -> tuple[Trace | None, str | None]:
    """What the devices do over time, and the sha256 of the files that say it. Raises ConfigError and DataError."""
    source = config.fleet.trace
    if source is None:
        return None, None
    samples = [len(indices) for indices in site.partition.clients]
    digest = traces.digest(source) if source.files else None
    return source.trace(site.fleet, samples, config.seed), digest


def given_weights(pool_dir: Path, family: ModelFamily) -> Params | None:
    """The weights that go with the pool; None: the run starts from fresh ones. Raises IntegrityError naming the file
    that is missing, damaged or another network's."""
    weights = PoolFile.read(pool_dir / "pool.json").weights(pool_dir)
    try:
        return None if weights is None else fitting(family, weights)
    except ModelError as error:
        raise IntegrityError(f"{pool_dir / WEIGHTS} is not of this network: {error}") from error


def initial_state(resolved: Resolved, site: Site, weights: Params | None = None) -> Any:
    """The algorithm's state before the first round. `weights`: of the whole network; None: fresh ones."""
    params = weights
    if params is None:
        params = initial_params(site.family, seeds.derive(resolved.config.seed, "init"))
    return resolved.algorithm.init(params, site.layout, site.fleet, site.pool, ServerSite(site))


def tell_unused(config: Config) -> None:
    """Says where a GPU is there and not used."""
    here = not config.run.apart and all(name == "cpu" for name in config.run.devices)
    if here and torch.cuda.is_available():
        log.info("CUDA is there and not used: run.devices=auto, or [cuda], trains on it")


def training_of(algorithm: Algorithm) -> Training:
    """The local training as the algorithm does it: what the section says, unless the algorithm has work of its own."""
    found: Training = algorithm.training  # type: ignore[attr-defined]
    return found


def numerics_of(
    config: Config, training: Training, family: ModelFamily, goal: Task, before: Mapping[str, Any] | None
) -> Numerics:
    """The numerics that the configuration names, else those that suit the network. `training`: the algorithm's;
    `before`: see `settled` and `flushes`."""
    run, per_round = config.run, round_size(training.fraction, config.partition.clients)
    precision = settled(run.precision, run.devices, before)
    if precision == "fp16" and training.weight_decay:
        log.warning("run.precision=fp16: training.weight_decay = %g is left out", training.weight_decay)
    if run.strategy == "single" or training.is_own:
        found = Numerics(precision=precision)
    elif run.strategy == "batched":
        found = strategy.batched(family, training.batch_size, per_round, precision, run.devices)
    else:
        found = strategy.choose(family, goal, training.batch_size, per_round, precision, run.devices)
    return replace(found, flush_denormal=flushes(before))


def _surroundings(
    config: Config,
    run: Run,
    site: Site,
    initial: Any,
    mailbox: Mailbox,
    run_id: str,
    should_stop: Callable[[], bool],
    out: Path,
    wheel: Wheel | None,
) -> Surroundings:
    pods = config.kubernetes
    auto = config.run.backend == "kubernetes" and any(pool.memory == "auto" for pool in pods.pools.values())
    memory = peaks_of(run, initial) if devices_decide(config) or auto else None
    code = None if wheel is None else (out / store_key(wheel.sha256), wheel.sha256)
    post = invitations.post_of(config) if config.run.backend == "agents" else None
    return Surroundings(site, mailbox, config.run.devices, run_id, pods, memory, should_stop, code, config.agents, post)


def devices_decide(config: Config) -> bool:
    """Whether clients look at what memory is really free, so that what they train does not follow from the seed."""
    observe = {"kubernetes": config.kubernetes.observe, "agents": config.agents.observe}
    return observe.get(config.run.backend) == "cgroup"


def store_of(config: Config, run_id: str, out: Path) -> Store:
    """The store of the run's ledger: the run's folder, or a place in `run.remote`."""
    if config.run.remote is None:
        return FolderStore(out.resolve())
    return open_store(f"{config.run.remote.rstrip('/')}/{run_id}")


def _fetch_run(store: Store, out: Path) -> None:
    """Fetches run.json from the store for a coordinator that starts on another machine. Raises IntegrityError if this
    machine has the run.json of another run."""
    if not store.list(track.RUN_KEY):
        return
    stored = store.get(track.RUN_KEY)
    if not (out / "run.json").exists():
        FolderStore(out).put("run.json", stored)
    elif RunFile.read(out / "run.json").token != RunFile.of(stored, store.uri(track.RUN_KEY)).token:
        raise IntegrityError(
            f"{out / 'run.json'} is of another run than {store.uri(track.RUN_KEY)}, which was begun elsewhere: remove "
            f"{out} to go on with that one, or choose another --run-id"
        )


def _put_site(
    ledger: Ledger, out: Path, partition_dir: Path, pool_dir: Path, wheel: Wheel | None, form: Form | None
) -> None:
    """Puts into the store what clients on other machines need to know: who holds which samples, or, with `form`, what
    samples look like that clients have themselves."""
    if ledger.checkpoints.lease is None and ledger.mailbox.key is None:
        return
    run = RunFile.read(out / "run.json")
    unseen = {
        section: value for section, value in Config().model_dump(mode="json").items() if section in configs.PRIVATE
    }
    if wheel is not None:
        ledger.store.put(store_key(wheel.sha256), wheel.value)
    told = run.model_copy(update={"config": run.config | unseen})
    ledger.store.put(track.RUN_KEY, (told.model_dump_json(indent=1) + "\n").encode())
    for name in site_files(form is not None):
        if name == FORM and form is not None:
            ledger.store.put(f"site/{name}", form.model_dump_json().encode())
        elif name != "run.json":
            folder = pool_dir if name == "pool.json" else partition_dir
            ledger.store.put(f"site/{name}", (folder / name).read_bytes())


def _signing(key: bytes | None) -> tuple[KeyOf | None, KeyOf | None]:
    """The keys with which clients and the coordinator sign; None if both are processes of this machine."""
    return (None, None) if key is None else (signing_key(key), signing_key(key, "coordinator"))


def known_run(config: Config, out: Path, resume: bool) -> RunFile | None:
    """The run that `out` holds, if any. Raises ConfigError rather than overwrite it or mix it with another
    configuration."""
    if not (out / "run.json").exists():
        return None
    known = RunFile.read(out / "run.json")
    if not resume:
        raise ConfigError(f"{out} holds a run already: go on with --resume, or choose another --run-id")
    own_code.check_same(known.code_sha256, config, out)
    began = configs.parse_schema(known.config)
    before, now = configs.flatten(began), configs.flatten(config)
    changed = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    fixed = [k for k in changed if configs.moves(k) is Moves.RESULT]
    if fixed:
        lines = ", ".join(f"{k}: {before.get(k)!r} -> {now.get(k)!r}" for k in fixed[:6])
        raise ConfigError(f"{out} was started with another configuration ({lines}): choose another --run-id")
    if devices_decide(began) != devices_decide(config):
        raise ConfigError(
            f"{out} was started with run.backend = {began.run.backend}, with {config.run.backend} clients would decide "
            "by other rules what they train (observe): choose another --run-id"
        )
    return known


def _same_place(known: RunFile, config: Config, run_id: str, out: Path) -> None:
    """Raises ConfigError rather than compute a run again whose rounds are in another place, or may be: one that cannot
    be asked."""
    before, now = known.config["run"].get("remote"), configs.public(config).run.remote
    renamed = known.run_id != run_id

    def has_rounds(remote: str | None, name: str) -> bool:
        there = config.model_copy(update={"run": config.run.model_copy(update={"remote": remote})})
        return bool(Checkpoints(store_of(there, name, out)).commits())

    if (before == now and not renamed) or has_rounds(config.run.remote, run_id):
        return
    try:
        elsewhere = has_rounds(before, known.run_id)
    except FlexfleetError:
        elsewhere = True
    if elsewhere:
        was, here, named = (f" as {known.run_id}", f" as {run_id}", " and the name") if renamed else ("", "", "")
        raise ConfigError(
            f"{out} was started with run.remote = {before}{was}, and with run.remote = {now}{here} no round is "
            f"committed: give the place{named} that it was started with, or copy what is there"
        )


def _same_noise(known: RunFile, out: Path) -> None:
    if known.noise_stream != privacy.STREAM:
        raise EnvironmentFailure(
            f"{out} draws its noise from the stream {known.noise_stream or 'of an earlier version'}, this version from "
            f"{privacy.STREAM}: a round that is computed again would be released twice. Finish it with the version "
            "that it began with, or start another run"
        )


def _same(known: RunFile, run: RunFile, out: Path, accept_numerics: bool) -> None:
    for name in ("pool_sha256", "partition_sha256", "trace_sha256"):
        if getattr(known, name) != getattr(run, name):
            raise IntegrityError(f"{out} was started with another {name.split('_')[0]} than the one given now")
    if known.folders_sha256 not in (None, run.folders_sha256):
        raise IntegrityError(f"{out} was started with other data in partition.folders than there are now")
    own_code.check_sources(known.sources, run.sources, out)
    if accept_numerics:
        return
    others = differing(known.numerics, run.numerics)
    if not others and known.noise_numerics != run.noise_numerics:
        others = f"{known.noise_numerics} there, {run.noise_numerics} here"
    if others:
        raise EnvironmentFailure(
            f"this machine would not compute the same bits as the one where the run was started ({others}). Resume "
            "there, or give --accept-numerics"
        )


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C end the run after the client in flight; the second Ctrl-C ends it at once."""
    received: list[int] = []

    def request(signum: int, _: object) -> None:
        if signum == signal.SIGALRM or (signum == signal.SIGINT and signal.SIGINT in received):
            # Raised again later: inside a destructor or a weak reference's callback, Python drops the exception and
            # calls sys.unraisablehook instead.
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            raise KeyboardInterrupt
        received.append(signum)

    def dropped(about: sys.UnraisableHookArgs) -> None:
        if about.exc_type is not KeyboardInterrupt:
            told(about)

    if current_thread() is not main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    told, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield lambda: bool(received)
    except Stopped:
        if signal.SIGINT in received:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = told
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(out: Path, ledger: Ledger, final: Any, tracker: Tracker, mlflow: MLflow | None) -> Path:
    ledger.checkpoints.check_lease()
    value, folder = laid_out(published(final)), FolderStore(out)
    for store in (folder, ledger.store) if ledger.checkpoints.lease is not None else (folder,):
        store.sweep("")  # what killed writers left: nobody writes any more
        store.put("model.safetensors", value)
    names: dict[str, None] = {}
    # One round at a time, whose lines can be ten thousand.
    folder.put("history.json", history_of(_watched(ledger.checkpoints.each_row(), names), sha256(value)))
    if mlflow is not None:
        rows = ledger.checkpoints.each_row()
        lines = ({"round": row.round + 1, **line} for row in rows for line in row.clients)
        mlflow.table(["round", *names], lines, "clients.json")
    tracker.finish("FINISHED")
    return out / "history.json"


def _watched(rows: Iterable[Row], names: dict[str, None]) -> Iterator[Row]:
    """The rows; adds to `names` what their clients' lines say."""
    for row in rows:
        names.update(dict.fromkeys(name for line in row.clients for name in line))
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    p = common.step_parser(__doc__ or "", partition="partition", pool="model_pool")
    common.add_resume(p)
    common.add_faults(p)
    args = common.parsed(p, argv)
    print(
        federate(
            resolved_of(args),
            args.partition,
            args.pool,
            args.out,
            resume=args.resume,
            discard_damaged=args.discard_damaged,
            accept_numerics=args.accept_numerics,
        )
    )
    return 0


if __name__ == "__main__":
    common.run_main(main)
