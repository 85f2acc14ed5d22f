"""Where the rounds of a run are stored, and whether the run in a folder may be resumed."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, DataError, EnvironmentFailure, IntegrityError
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
    """Raise IntegrityError if there are rounds without run.json, which says what they were computed with."""
    if commits := Checkpoints(store).commits():
        raise IntegrityError(
            f"{out / 'run.json'} is missing, but {store.uri()} has {commits[-1] + 1} committed rounds. Restore it, or "
            "start another run"
        )


def place_of(remote: str, run_id: str) -> str:
    """The address of a run's ledger in `run.remote`."""
    return f"{remote.rstrip('/')}/{run_id}"


def fetch_run(store: Store, out: Path) -> None:
    """Fetch run.json from the store for a coordinator that starts on another machine. Raises IntegrityError if `out`
    has the run.json of another run."""
    if not store.list(track.RUN_KEY):
        return
    stored = store.get(track.RUN_KEY)
    if not (out / "run.json").exists():
        FolderStore(out).put("run.json", stored)
        return
    here, there = out / "run.json", store.uri(track.RUN_KEY)
    known, found = RunFile.read(here), RunFile.of(stored, there)
    same_run = known.token == found.token
    if not known.token and not found.token:  # only tracked and private runs have a token
        same_run = _computed_from(known, here) == _computed_from(found, there)
    if not same_run:
        raise IntegrityError(
            f"{here} is of another run than {there}, which was begun elsewhere. Remove {out} to resume that one, or "
            "choose another --run-id"
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
        raise ConfigError(f"{where} has parameters of another version of flexfleet: {error}") from error


def known_run(config: Config, out: Path, resume: bool) -> RunFile | None:
    """The run in `out`, if any. Raises ConfigError if it may not be resumed, or has another configuration."""
    if not (out / "run.json").exists():
        return None
    known = RunFile.read(out / "run.json")
    if not resume:
        raise ConfigError(f"{out} holds a run already: go on with --resume, or choose another --run-id")
    _same_settings(known, config, out)
    return known


def check_begun(config: Config, store: Store, out: Path) -> None:
    """For a pipeline's first task: raise the ConfigError with which `federate` would later refuse to resume the run in
    `store` with these settings. Ignores a store that cannot be reached, which `federate` reports."""
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
            f"run.backend: {out} was started with {began.run.backend}, and with {config.run.backend} clients would "
            "choose in another way what they train (observe). Choose another --run-id"
        )


def same_place(known: RunFile, config: Config, run_id: str, out: Path) -> None:
    """Raise ConfigError rather than compute a run again whose rounds are stored in another place."""
    before, now = known.config["run"].get("remote"), configs.public(config).run.remote
    moved = before != now or (now is not None and known.run_id != run_id)
    if moved and not Checkpoints(store_of(config, run_id, out)).commits():
        raise ConfigError(
            f"{out} was started with run.remote = {before}, and with run.remote = {now} no round is committed. Give "
            f"the place, and the run ID {known.run_id}, that it was started with, or copy its rounds"
        )


def same_start(resolved: Resolved, pool: Path, out: Path) -> None:
    """Raise ConfigError if `model.init`, or the network, has other weights than the pool's folder. A source that is
    missing or does not answer is assumed to be the same."""
    try:
        weights = resolved.start
    except (DataError, EnvironmentFailure) as error:
        log.info("model.%s cannot be compared with the weights that the run was started from: %s", INIT, error)
        return
    if weights is not None:
        warm_start.check_same(
            PoolFile.read(pool / "pool.json").weights_sha256, sha256(encode(weights)), resolved.config, out
        )


def tell_of_copies(known: RunFile, ledger_at: str) -> None:
    """Warn if a private run continues in another place, because it may continue in the first place too."""
    if known.ledger_at not in (None, ledger_at):
        log.warning(
            "this private run's rounds were in %s, and continue in %s. If that was a copy, and both continue, both "
            "draw the same noise, which the difference of their models does not have. Continue only one of them, and "
            "publish only its models (docs/guides/privacy.md)",
            known.ledger_at,
            ledger_at,
        )


def same(known: RunFile, run: RunFile, out: Path, accept_numerics: bool) -> None:
    """Raise IntegrityError if the pool, the data or the code have changed since the run began; EnvironmentFailure,
    unless `accept_numerics`, if this machine would compute other bits."""
    for name in FILES:
        if getattr(known, name) != getattr(run, name):
            raise IntegrityError(f"{out} was started with another {name.split('_')[0]}")
    if known.folders_sha256 not in (None, run.folders_sha256):
        raise IntegrityError(f"{out} was started with other data in partition.folders")
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
    """Whether clients measure which memory is free, so that what they train does not follow from the seed."""
    observe = {"kubernetes": config.kubernetes.observe, "agents": config.agents.observe}
    return observe.get(config.run.backend) == "cgroup"
