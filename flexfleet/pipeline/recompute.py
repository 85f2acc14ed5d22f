"""Compute rounds of a finished or stopped run again: `flexfleet verify`, and the replay of one client's training."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.backends import InProcess
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.rounds import chain
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.replay import ClientRound, replay
from fl_engine.rounds.run import Run
from fl_engine.rounds.verify import kept_results, stored_progress, verify_rounds
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import laid_out, sha256
from fl_engine.training.evaluation import published
from fl_engine.training.local import OnStep
from fl_engine.training.numerics import describe, differing
from flexfleet import config as configs
from flexfleet.config.dotted import applied
from flexfleet.files.artifacts import EvaluationFile, History, RunFile, RunResult
from flexfleet.files.run_folder import MANIFEST, check_manifest
from flexfleet.files.run_status import tally_in
from flexfleet.pipeline import keys, partition
from flexfleet.pipeline.evaluate import evaluate
from flexfleet.pipeline.fork import check_certificate
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import devices_decide, store_of
from flexfleet.pipeline.run import result


@dataclass(frozen=True)
class Recomputation:
    """A run whose rounds can be computed again on this machine, without clients on other machines."""

    rounds: Run
    initial: Any
    backend: InProcess
    ledger: Ledger


def recomputation(resolved: Resolved, folder: Path, run: RunFile) -> Recomputation:
    """Prepare the run in `folder` for computing its rounds again.

    Raises:
        ConfigError: The assignments depended on the devices' free memory, or on data that this machine does not have.
        IntegrityError: The run's files or data have changed.
        EnvironmentFailure: This machine cannot produce bit-identical results.
    """
    config = resolved.config
    if devices_decide(config):
        raise ConfigError(
            f"{config.run.backend}.observe=cgroup: rounds cannot be computed again, because the free memory of "
            "the clients determined their sub-models"
        )
    site = partition.site_of(resolved, folder / "partition", folder / "pool", run.numerics)
    if site.most is not None:
        if config.run.apart:
            raise ConfigError(
                "partition.rule=local: rounds cannot be computed again here, because the data are on the devices"
            )
        site = partition.simulated(resolved, site)
        if run.folders_sha256 not in (None, partition.folders_sum(site)):
            raise IntegrityError("partition.folders: the data have changed since the run started. Restore the data")
    if others := differing(run.numerics, describe(site.numerics, config.run.devices)):
        raise EnvironmentFailure(f"this machine cannot produce bit-identical results: {others}")
    store = store_of(config, run.run_id, folder)
    noise_key = None
    if privacy.is_private(resolved.algorithm):
        key = keys.place(config, run.run_id, store, folder).read()
        if key is None or sha256(key) != run.key_sha256:
            raise ConfigError("the rounds of a private run can only be computed again by its owner, who has its key")
        noise_key = privacy.noise_key(key, run.token)
    initial = partition.initial_state(resolved, site, folder / "pool")
    rounds = partition.run_of(config, resolved.algorithm, site, noise_key)
    ledger = Ledger(store, rules=replace(site.rules, algorithm=resolved.algorithm, seed=config.seed))
    return Recomputation(rounds, initial, InProcess(site, config.run.devices), ledger)


def replay_client(
    resolved: Resolved,
    folder: Path,
    run: RunFile,
    round: int,
    client: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    on_step: OnStep | None = None,
) -> ClientRound:
    """Repeat the training of one client in one round of the run in `folder`. `round` counts from 0. `settings` changes
    parameters (by dotted name) for this training only. `on_step` is called before each training step. Raises the errors
    of `recomputation`, and ConfigError if the client failed or was not selected."""
    other = None
    if settings:
        if wrong := [name for name in settings if name.partition(".")[0] not in ("algorithm", "training")]:
            message = f"only algorithm.* and training.* can be set in a replay, got {wrong[0]}"
            raise ConfigError(message, path=wrong[0])
        other = configs.parse_with_algorithm(applied(run.config, settings), stored=True)[1]
    again = recomputation(resolved, folder, run)
    shared = (0, "") if run.forked is None else (run.forked.round, run.forked.run_id)
    return replay(again.rounds, again.initial, again.backend, again.ledger, round, client, other, on_step, shared)


@dataclass(frozen=True)
class Verified:
    """What `verify` has checked. Rounds are counted from 1."""

    run_id: str
    rounds: int
    """Number of rounds whose links are correct."""
    public_key: str
    """Key of the signature; empty if the run has not finished."""
    merged: tuple[int, ...]
    """Rounds whose merge was computed again from kept updates."""
    trained: tuple[int, ...]
    """Rounds whose clients were trained again."""
    evaluated: bool
    """True if the final model was evaluated again."""
    forgotten: tuple[int, ...]
    """Clients that no round asked, according to the run's certificate (`flexfleet forget`)."""
    not_checked: tuple[str, ...]
    """Reasons why something was not checked."""


def verify(
    resolved: Resolved,
    folder: Path,
    run: RunFile,
    rounds: Collection[int] = (),
    sample: int = 0,
    every: bool = False,
    public_key: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Verified:
    """Check a run's files, the hash chain of its rounds and its signature. If this machine can produce the same bits,
    also merge the kept updates, train the clients of some rounds and evaluate the final model again.

    Args:
        rounds: Rounds to train again, counted from 0.
        sample: Number of additional rounds to train again, drawn at random.
        every: True to train all rounds again.
        public_key: Expected key of the signature.

    Raises:
        IntegrityError: Something differs. The message names the first file, round or client.
        ConfigError: The run has no such round.
    """
    whole = check_manifest(folder)
    store = store_of(resolved.config, run.run_id, folder)
    ledger, left = Ledger(store), list[str]()
    rows = ledger.checkpoints.rows(lines=False)
    count = len(rows)
    if outside := [each + 1 for each in rounds if not 0 <= each < count]:
        raise ConfigError(f"--rounds must be from 1 to {count}, got {outside[0]}", path="rounds")
    link = chain.check_links(ledger.checkpoints.each_row(), store.uri())
    for each in ledger.checkpoints.with_state():
        ledger.checkpoints.read(each)
    found = _check_history(folder, link, public_key) if (folder / "history.json").exists() else None
    if found is None:
        left.append("the signature, because the run has not finished")
    elif not whole:
        left.append(f"the other files, because {folder / MANIFEST} is missing")
    first = 0 if run.forked is None else run.forked.round
    if run.forked is not None and first:
        if rows[first - 1].link != run.forked.link:
            raise IntegrityError(f"{folder / 'run.json'}: the shared rounds are not those of {run.forked.run_id}")
        base = f"rounds 1 to {first} are rounds of {run.forked.run_id}. Verify that run"
        if any(each < first for each in rounds):
            raise ConfigError(f"--rounds: {base}", path="rounds")
        left.append(f"{base}, and compare both with `flexfleet diff`")
    chosen = set(range(first, count) if every else rounds)
    others = sorted(set(range(first, count)) - chosen)
    chosen |= set(random.sample(others, min(sample, len(others))))
    merged, trained, evaluated = list[int](), list[int](), False
    try:
        again = recomputation(resolved, folder, run)
    except (ConfigError, EnvironmentFailure) as error:
        left.append(f"the kept updates, the training and the accuracies: {error}")
    else:
        if found is not None:
            final = stored_progress(again.initial, again.ledger, rows[-1]).state
            if sha256(laid_out(published(final))) != found.model_sha256:
                raise IntegrityError(f"{folder / 'model.safetensors'} is not the model of the last round")
        kept = kept_results(again.ledger)
        for train, some in ((True, chosen), (False, kept - chosen)):
            for each, how in verify_rounds(again.rounds, again.initial, again.backend, again.ledger, some, train):
                (merged if how == "merged" else trained).append(each + 1)
                progress(f"round {each + 1}: {how} again, equal")
        if evaluated := (folder / "evaluation.json").exists():
            _check_evaluation(resolved, folder)
        if rest := count - first - len(merged) - len(trained):
            left.append(f"the merge of {rest} of {count} rounds (run.keep = {resolved.config.run.keep})")
    if found is not None and (folder / "evaluation.json").exists():
        _check_result(folder)
    key, forgotten = "" if found is None else found.public_key, tuple[int, ...]()
    if found is not None and (proof := check_certificate(folder, ledger.checkpoints.each_row(), found)) is not None:
        forgotten = proof.forgotten
    return Verified(run.run_id, count, key, tuple(merged), tuple(trained), evaluated, forgotten, tuple(left))


def _check_history(folder: Path, link: str, public_key: str | None) -> History:
    """Check the rounds and the signature in history.json. `link` is the last link in the ledger."""
    name = folder / "history.json"
    history = History.read(name)
    rows = (Row.model_validate(row) for row in json.loads(name.read_bytes())["rounds"])
    ends = chain.check_links((row.model_copy(update={"round": row.round - 1}) for row in rows), str(name))
    if ends != link:
        raise IntegrityError(f"{name} and the ledger contain different rounds")
    chain.check_signature(history.public_key, history.signature, link, history.model_sha256, str(name))
    if public_key not in (None, history.public_key):
        raise IntegrityError(f"{name} is signed with the key {history.public_key}, expected {public_key}")
    return history


def _check_evaluation(resolved: Resolved, folder: Path) -> None:
    with TemporaryDirectory() as scratch:
        evaluate(resolved, folder, folder / "partition", folder / "pool", Path(scratch))
        found, stored = (EvaluationFile.read(each / "evaluation.json") for each in (Path(scratch), folder))
    if found != stored:
        raise IntegrityError(f"{folder / 'evaluation.json'} differs from a new evaluation of the model")


def _check_result(folder: Path) -> None:
    """Compare result.json with the files from which it was computed, except exports, which later commands replace."""
    if not (folder / "result.json").exists():
        return
    stored = RunResult.read(folder / "result.json")
    about = (stored.run_id, stored.mlflow_run_id, Path(stored.report), stored.store_uri)
    for each in (stored, made := result(folder, *about, tally_in(folder))):
        each.metrics.pop("precision", None)
    if stored != made:
        raise IntegrityError(f"{folder / 'result.json'} differs from history.json and evaluation.json")
