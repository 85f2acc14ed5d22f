"""Where the rounds of a run lie, and whether the run that a folder holds may be resumed."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.core.errors import ConfigError, DataError, EnvironmentFailure, FlexfleetError, IntegrityError
from fl_engine.core.fields import Moves
from fl_engine.models.build import INIT
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.loop import check_end
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store, encode, sha256
from fl_engine.training.numerics import differing
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.files.artifacts import PoolFile, RunFile
from flexfleet.files.run_folder import check_same
from flexfleet.pipeline import own_code, warm_start
from flexfleet.pipeline.prepare import Resolved
from flexfleet.tracking import record as track

log = logging.getLogger("flexfleet")


def store_of(config: Config, run_id: str, out: Path) -> Store:
    """The store of the run's ledger: the run's folder, or a place in `run.remote`."""
    if config.run.remote is None:
        return FolderStore(out.resolve())
    return open_store(place_of(config.run.remote, run_id), patience_s=config.run.patience_s)


def check_recorded(store: Store, out: Path) -> None:
    """Raises IntegrityError where rounds are there without run.json, which says what they were computed with."""
    if commits := Checkpoints(store).commits():
        raise IntegrityError(
            f"{out / 'run.json'} is missing, though {commits[-1] + 1} round(s) are committed in {store.uri()}: put it "
            "back, or begin another run"
        )


def place_of(remote: str, run_id: str) -> str:
    """The address of a run's ledger in `run.remote`."""
    return f"{remote.rstrip('/')}/{run_id}"


def fetch_run(store: Store, out: Path) -> None:
    """Fetches run.json from the store for a coordinator that starts on another machine. Raises IntegrityError if this
    machine has the run.json of another run."""
    if not store.list(track.RUN_KEY):
        return
    stored = store.get(track.RUN_KEY)
    if not (out / "run.json").exists():
        FolderStore(out).put("run.json", stored)
        return
    here, there = out / "run.json", store.uri(track.RUN_KEY)
    known, found = RunFile.read(here), RunFile.of(stored, there)
    same_run = known.token == found.token
    if not known.token and not found.token:  # nothing tracks them: the same where the same rounds follow from them
        same_run = _computed_from(known, here) == _computed_from(found, there)
    if not same_run:
        raise IntegrityError(
            f"{here} is of another run than {there}, which was begun elsewhere: remove {out} to go on with that one, "
            "or choose another --run-id"
        )


FILES = ("pool_sha256", "partition_sha256", "trace_sha256")
"""The fields of a run's record with the digests of the files that its rounds are computed from."""


def _computed_from(run: RunFile, where: Path | str) -> dict[str, Any]:
    parameters = configs.flatten(began_with(run, where))
    decide = {name: value for name, value in parameters.items() if configs.moves(name) is Moves.RESULT}
    return decide | {name: getattr(run, name) for name in FILES}


def began_with(run: RunFile, where: Path | str) -> Config:
    """Return the configuration in a record."""
    try:
        return configs.parse_schema(run.config)
    except ConfigError as error:
        said = f"the parameters in {where} are not those of this version of flexfleet ({error})"
        raise ConfigError(f"{said}: go on with the version that it was begun with") from error


def known_run(config: Config, out: Path, resume: bool) -> RunFile | None:
    """The run that `out` holds, if any. Raises ConfigError rather than overwrite it or mix it with another
    configuration."""
    if not (out / "run.json").exists():
        return None
    known = RunFile.read(out / "run.json")
    if not resume:
        raise ConfigError(f"{out} holds a run already: go on with --resume, or choose another --run-id")
    _same_settings(known, config, out)
    return known


def check_begun(config: Config, store: Store, out: Path) -> None:
    """For a pipeline's first task: raises the ConfigError with which `federate` would refuse, after the tasks before it
    were paid, to go on with the run in `store` with these settings or to this end. Where the store cannot be reached,
    `federate` tells."""
    with suppress(EnvironmentFailure):
        if (known := track.known_file(store)) is not None:
            _same_settings(known, config, out)
            check_end(ledger_in(store), config.rounds)


def _same_settings(known: RunFile, config: Config, out: Path) -> None:
    own_code.check_same(known.code_sha256, config, out)
    began = began_with(known, out / "run.json")
    before, now = configs.flatten(began), configs.flatten(config.settled(began))
    check_same(out, before, now, lambda name: configs.moves(name) is Moves.RESULT)
    if devices_decide(began) != devices_decide(config):
        raise ConfigError(
            f"{out} was started with run.backend = {began.run.backend}, with {config.run.backend} clients would decide "
            "by other rules what they train (observe): choose another --run-id"
        )


def same_place(known: RunFile, config: Config, run_id: str, out: Path) -> None:
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
        was, here, named = "", "", ""
        if renamed:
            was, here, named = f" as {known.run_id}", f" as {run_id}", " and the name (the folder's)"
        raise ConfigError(
            f"{out} was started with run.remote = {before}{was}, and with run.remote = {now}{here} no round is "
            f"committed: give the place{named} that it was started with, or copy what is there"
        )


def tell_shared(known: RunFile, run_id: str, out: Path) -> None:
    """Says where a folder goes on in the MLflow run of a run that had another name: it may be a copy of that one."""
    if known.mlflow_run_id is not None and known.run_id != run_id:
        log.warning(
            "%s was begun as %s, and goes on in the MLflow run that it had then, %s: if this is a copy, the figures of "
            "both get there; tracking.mlflow=null tracks nothing",
            out,
            known.run_id,
            known.mlflow_run_id,
        )


def same_start(resolved: Resolved, pool: Path, out: Path) -> None:
    """Raises ConfigError where `model.init`, or the network, has other weights now than those that the folder of the
    pool has. A source that is not here (any more), or that does not answer, is taken to be the same."""
    try:
        weights = resolved.start
    except (DataError, EnvironmentFailure) as error:
        log.info("model.%s cannot be compared with the weights that the run was started from: %s", INIT, error)
        return
    if weights is not None:
        warm_start.check_same(
            PoolFile.read(pool / "pool.json").weights_sha256, sha256(encode(weights)), resolved.config, out
        )


def same_noise(known: RunFile, out: Path) -> None:
    """Raises EnvironmentFailure where this version would draw other noise than the run began with."""
    if known.noise_stream != privacy.STREAM:
        raise EnvironmentFailure(
            f"{out} draws its noise from the stream {known.noise_stream or 'of an earlier version'}, this version from "
            f"{privacy.STREAM}: a round that is computed again would be released twice. Finish it with the version "
            "that it began with, or start another run"
        )


def tell_of_copies(known: RunFile, ledger_at: str) -> None:
    """Warns where a private run goes on elsewhere than it was: nobody sees from here whether it goes on there too."""
    if known.ledger_at not in (None, ledger_at):
        log.warning(
            "this private run's rounds were in %s, and go on in %s. If that was a copy, and both go on, both draw the "
            "same noise: where their clients differ, the difference of their models has none. Go on with one of them "
            "alone, and publish models of that one alone (docs/guides/privacy.md)",
            known.ledger_at,
            ledger_at,
        )


def same(known: RunFile, run: RunFile, out: Path, accept_numerics: bool) -> None:
    """Raises IntegrityError where the pool, the data or the code are others than those that the run began with, and,
    unless `accept_numerics`, EnvironmentFailure where this machine would compute other bits."""
    for name in FILES:
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


def devices_decide(config: Config) -> bool:
    """Whether clients look at what memory is really free, so that what they train does not follow from the seed."""
    observe = {"kubernetes": config.kubernetes.observe, "agents": config.agents.observe}
    return observe.get(config.run.backend) == "cgroup"
