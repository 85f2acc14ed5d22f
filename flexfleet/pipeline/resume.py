"""Find the store that contains a run's rounds, and check whether a run can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fl_engine.core.contracts import Tracker, Watcher
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.core.fields import Moves
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store
from fl_engine.training.numerics import differing
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.config.sources import sources
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_folder import MANIFEST, check_same
from flexfleet.pipeline import own_code
from flexfleet.tracking import record as track
from flexfleet.tracking.prometheus import RunMetrics

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Attempt:
    """Options for starting, resuming and observing a run or a central training."""

    resume: bool = False
    discard_damaged: bool = False
    """True if a run with a damaged checkpoint may resume from the last intact commit."""
    accept_numerics: bool = False
    """True if the run may resume although this machine cannot produce bit-identical results."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the MLflow run."""
    mlflow_run_id: str | None = None
    """ID of the MLflow run; None to create an MLflow run."""
    observer: Tracker | None = None
    """Additional tracker, to which all metrics of the run are passed."""
    watcher: Watcher | None = None
    """Watcher, to which each round is passed before it is committed."""
    metrics: RunMetrics | None = None
    """Prometheus metrics that the caller serves; None if `federate` serves them."""


def store_of(config: Config, run_id: str, out: Path) -> Store:
    """Return the store of the run's ledger: a prefix in `run.remote` if this parameter is set, otherwise the run's
    folder."""
    if config.run.remote is None:
        return FolderStore(out.resolve())
    return open_store(place_of(config.run.remote, run_id), patience_s=config.run.patience_s)


def check_recorded(store: Store, out: Path) -> None:
    """Raise IntegrityError if the store of a run without run.json contains committed rounds."""
    if commits := Checkpoints(store).commits():
        raise IntegrityError(
            f"{out / 'run.json'} is missing, but {store.uri()} has {commits[-1] + 1} committed rounds. Restore the "
            "file, or start another run"
        )


def place_of(remote: str, run_id: str) -> str:
    """Return the address of a run's ledger in `run.remote`."""
    return f"{remote.rstrip('/')}/{run_id}"


FILES = ("pool_sha256", "partition_sha256", "trace_sha256")
"""Fields of a run's record that contain digests of input files."""


def fetch_run(store: Store, out: Path) -> None:
    """Copy run.json from the store into `out` if the run was started on another machine. Raises IntegrityError if `out`
    already contains the run.json of a different run."""
    if not store.list(track.RUN_KEY):
        return
    stored, here = store.get(track.RUN_KEY), out / "run.json"
    if not here.exists():
        FolderStore(out).put("run.json", stored)
        return
    known, found = RunFile.read(here), RunFile.of(stored, store.uri(track.RUN_KEY))
    if any(getattr(known, name) != getattr(found, name) for name in ("token", *FILES)):
        raise IntegrityError(
            f"{here} and {store.uri(track.RUN_KEY)} belong to different runs. Remove {out} to resume the run in the "
            "store, or choose another --run-id"
        )


def known_run(config: Config, out: Path, resume: bool) -> RunFile | None:
    """Return the record (run.json) of the run in `out`. Return None if the run must start, because run.json is missing,
    or because the run has no committed round and differs from `config`. Raises ConfigError if a run with committed
    rounds differs from `config`, or if `resume` is False."""
    if not (out / "run.json").exists():
        return None
    known = RunFile.read(out / "run.json")
    begun = _has_rounds(known, config, out)
    if begun and not resume:
        raise ConfigError(f"{out} already contains a run. Continue with --resume, or choose another --run-id")
    try:
        _check_unchanged(known, config, out)
        if not begun:
            own_code.check_sources(known.sources, sources(config), out)
    except ConfigError:
        if begun:
            raise
        return None
    return known


def _has_rounds(known: RunFile, config: Config, out: Path) -> bool:
    """Return whether the run has committed rounds or results, or may have rounds in another store."""
    if any((out / name).exists() for name in (MANIFEST, "history.json", "model.safetensors", "result.json")):
        return True
    if known.config["run"].get("remote") != configs.public(config).run.remote:
        return True
    return bool(Checkpoints(store_of(config, known.run_id, out)).commits())


def _check_unchanged(known: RunFile, config: Config, out: Path) -> None:
    """Raise ConfigError if the user's package, or a parameter that affects results, has changed since the run
    started."""
    if known.code_sha256 != (found := own_code.sha256_of(config)):
        raise ConfigError.at(
            f"run.code = {config.run.code} (sha256 {found}) has changed since {out} was started (sha256 "
            f"{known.code_sha256}). Restore the files, or choose another --run-id"
        )
    began = configs.parse_schema(known.config)
    before, now = configs.flatten(began), configs.flatten(config.settled(began))
    check_same(out, before, now, lambda name: configs.moves(name) is Moves.RESULT)
    if devices_decide(began) != devices_decide(config):
        raise ConfigError.at(
            f"run.backend must be {began.run.backend} as in {out}, got {config.run.backend}. The two backends measure "
            "free memory differently. Restore run.backend, or choose another --run-id"
        )


def same_place(known: RunFile, config: Config, run_id: str, out: Path) -> None:
    """Raise ConfigError if `run.remote` has changed and the new store does not contain the run's rounds."""
    before, now = known.config["run"].get("remote"), configs.public(config).run.remote
    moved = before != now or (now is not None and known.run_id != run_id)
    if moved and not Checkpoints(store_of(config, run_id, out)).commits():
        raise ConfigError.at(
            f"run.remote = {now} does not contain the rounds of {out}. The run was started with run.remote = {before} "
            f"(run ID {known.run_id}). Restore this value, or copy the run's files from there to the new store"
        )


def warn_of_copies(known: RunFile, ledger_at: str) -> None:
    """Warn if a private run continues in another store, because a copy in the first store would draw the same noise."""
    if known.ledger_at not in (None, ledger_at):
        log.warning(
            "this private run was stored in %s, but its next rounds are stored in %s. Continue only one of the copies, "
            "because the copies draw the same noise (docs/guides/privacy.md)",
            known.ledger_at,
            ledger_at,
        )


def same(known: RunFile, run: RunFile, out: Path, accept_numerics: bool) -> None:
    """Raise IntegrityError if the pool, the data or the code has changed since the run started. If this machine cannot
    produce bit-identical results, raise EnvironmentFailure unless `accept_numerics` is True."""
    for name in FILES:
        if getattr(known, name) != getattr(run, name):
            raise IntegrityError(f"{out} was started with another {name.split('_')[0]}. Restore its file")
    if known.folders_sha256 not in (None, run.folders_sha256):
        raise IntegrityError(f"{out} was started with other data in partition.folders. Restore the data")
    own_code.check_sources(known.sources, run.sources, out)
    others = differing(known.numerics, run.numerics)
    if not others and known.noise_numerics != run.noise_numerics:
        others = f"{known.noise_numerics} there, {run.noise_numerics} here"
    check_numerics(others, accept_numerics)


def check_numerics(others: str, accept: bool) -> None:
    """Raise EnvironmentFailure if `others` describes any numerical difference and `accept` is False."""
    if others and not accept:
        raise EnvironmentFailure(
            f"this machine cannot produce bit-identical results ({others}). Resume on the machine that started the "
            "run, or use --accept-numerics"
        )


def devices_decide(config: Config) -> bool:
    """Return whether clients measure their free memory, which then determines their sub-models."""
    observe = {"kubernetes": config.kubernetes.observe, "agents": config.agents.observe}
    return observe.get(config.run.backend) == "cgroup"
