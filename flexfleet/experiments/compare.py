"""Compare several algorithms on the same data and network with several seeds: all runs, then tables and a page.

A comparison is a folder `<run.store>/<id>/`. For each label and seed it has a run folder, and beside it the run's
configuration and log. The runs of a seed start from the partition and pre-training in `shared-s<seed>/`; labels with
other settings of these have a folder `shared-s<seed>-<digest>/`. The results are comparison.json, .md, .svg and .html.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fl_engine.core.errors import ConfigError, FlexfleetError, IntegrityError, Stopped
from fl_engine.data.transforms import fingerprint
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store, sha256
from flexfleet.config import Config, algorithm, flatten
from flexfleet.config.comparison_runs import Entry, folder_of, varied
from flexfleet.config.form import hand_over
from flexfleet.config.sources import sources
from flexfleet.experiments import central_reference
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.experiments.comparison_report import FILES, tabulate
from flexfleet.experiments.executor import Command, side_by_side, told_failures
from flexfleet.files import manifest
from flexfleet.files.artifacts import BareHistory, Result, row_of
from flexfleet.files.run_folder import check_free, failures_tell, folder_lock, go_on
from flexfleet.files.run_status import tally_in
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline.check import check
from flexfleet.pipeline.own_code import check_sources
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import known_run, store_of
from flexfleet.pipeline.run import need_packages, run
from flexfleet.pipeline.share import fits, settings, share
from flexfleet.tracking import record as track
from flexfleet.tracking.server import PARENT, platform_of
from flexfleet.tracking.trackers import TOKEN, MLflow, ending

log = logging.getLogger("flexfleet")


CarryOut = Callable[[Sequence[Command], int], dict[str, int]]
"""Executes commands, at most so many at a time, and maps their names to exit codes."""


class RunsFailed(FlexfleetError):
    """Some runs of a comparison did not finish; the exit code is the first one's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_comparison(
    runs: Sequence[Entry],
    id: str,
    *,
    to: Sequence[float] = (),
    at_once: int = 1,
    resume: bool = False,
    options: Sequence[str] = (),
    night: str | None = None,
    goes_on_as: str | None = None,
    central: Sequence[Path] = (),
    references: Sequence[Entry] = (),
    carry_out: CarryOut | None = None,
) -> ComparisonFile:
    """Makes the runs that are not finished, `at_once` at a time, and writes the comparison. `options` are passed to
    each run (`--discard-damaged`). `night`: the id of the MLflow run of the nightly job that the comparison belongs to.
    `goes_on_as`: the id by which the user's command goes on, default `id`: a night's comparisons have ids of their own.
    `central`: folders of finished central trainings, the reference in its tables; `references`: central trainings that
    are made together with the runs. `carry_out`: what makes the runs, default `side_by_side`.

    Raises ConfigError before anything trains; RunsFailed if runs failed, after all others ended; Stopped and
    KeyboardInterrupt when all processes have stopped.
    """
    folder = folder_of(runs)
    goes_on = go_on(goes_on_as or id)
    check_jobs(at_once)
    if (folder / "run.json").exists():
        raise ConfigError(f"{folder} is the folder of a run, not of a comparison: choose another --id")
    check_free(folder, resume, "--id")
    if central:
        done = all(finished(entry.config, folder / entry.name) for entry in runs)
        central_reference.read(central, flatten(runs[0].config), varied(runs), None if done else partial(_data, runs))
    check_all(runs)
    runs = in_one_experiment(runs)
    track.prepare(runs[0].config)
    try:
        with failures_tell(goes_on_as or id), folder_lock(folder), stopping_at_once(goes_on):
            mlflow = begin(runs, id, {PARENT: night} if night else {})
            with ending(mlflow):
                parent = mlflow.root if mlflow else None
                _run(runs, id, folder, at_once, options, parent, references, carry_out or side_by_side, goes_on)
                central = [*central, *(folder / entry.name for entry in references)]
                trained = central_reference.read(central, flatten(runs[0].config), varied(runs)) if central else None
                made = {entry.name: folder / entry.name for entry in runs}
                return tabulate(id, runs, made, folder, to, mlflow, trained)
    except Stopped:
        raise Stopped(f"stopped on request: {goes_on}") from None


def _data(runs: Sequence[Entry]) -> dict[int, set[str]]:
    """Map seeds to the fingerprints of the runs' data."""
    found: dict[int, set[str]] = {}
    for (seed, _), entry in {(entry.seed, entry.config.partition.seed): entry for entry in runs}.items():
        found.setdefault(seed, set()).add(fingerprint(Resolved.of(entry.config).data))
    return found


def check_jobs(at_once: int) -> None:
    """Raises ConfigError."""
    if at_once < 1:
        raise ConfigError(f"--jobs is the number of runs side by side, at least 1, got {at_once}")


def in_one_experiment(runs: Sequence[Entry]) -> list[Entry]:
    """Return the runs, all tracked in the MLflow experiment of the first run. Data set, network and partition name the
    experiments, but MLflow shows no run below a run of another experiment."""
    first = runs[0].config.tracking
    if first.mlflow is None:
        return list(runs)
    at = platform_of(first.mlflow)
    names = [track.experiment(entry.config, at) for entry in runs]
    tracking = first.model_copy(update={"experiment": names[0]})
    return [
        entry if name == names[0] else replace(entry, config=entry.config.model_copy(update={"tracking": tracking}))
        for entry, name in zip(runs, names, strict=True)
    ]


def begin(runs: Sequence[Entry], id: str, given: Mapping[str, str], run_id: str | None = None) -> MLflow | None:
    """Begin or continue the comparison's own MLflow run; None without tracking. `given`: more tags; `run_id`: an MLflow
    run that was begun for the comparison."""
    config = runs[0].config
    if config.tracking.mlflow is None:
        return None
    store = FolderStore(folder_of(runs).resolve()) if config.run.remote is None else open_store(config.run.remote)
    kind = "comparison"
    about = {"flexfleet.kind": kind, "flexfleet.comparison": id, "flexfleet.store": store.uri(), **given}
    if run_id is None:
        about[TOKEN] = track.lasting_token(kind, store, track.new_token(kind, id, given))
    return track.tracker(config, id, about, run_id)


def stores_of(runs: Sequence[Entry]) -> list[Store]:
    """Return the stores of the runs' ledgers."""
    return [store_of(entry.config, entry.name, folder_of(runs) / entry.name) for entry in runs]


def check_all(runs: Sequence[Entry]) -> None:
    """Check all runs, and raise as `check` for the first invalid run. A run that has begun must have the same settings,
    the same own code, and at most `rounds.stop` rounds; all runs must have the same metric."""
    _check_metric(runs)
    for entry in runs:
        out = folder_of(runs) / entry.name
        try:
            resolved = Resolved.of(entry.config)
            known = known_run(entry.config, out, resume=True)
            if known is None:
                check(resolved)
            else:  # `federate` checks this too, but late, and not for a finished run
                check_sources(known.sources, sources(entry.config), out)
                _check_length(entry, out)
            need_packages(resolved)
        except FlexfleetError as error:
            raise type(error)(f"{entry.label}, seed {entry.seed}: {error}".replace("--run-id", "--id")) from error


def _check_length(entry: Entry, out: Path) -> None:
    """Raise ConfigError if more rounds are committed than `rounds.stop`."""
    stop = entry.config.rounds.stop
    done = max((round + 1 for round in Checkpoints(store_of(entry.config, entry.name, out)).commits()), default=0)
    if done > stop:
        raise ConfigError(
            f"rounds.stop must be at least {done}, the committed rounds of {out}, got {stop}. Or choose another id"
        )


def _check_metric(runs: Sequence[Entry]) -> None:
    """Raise ConfigError if labels have data sets with different metrics."""
    if "dataset.name" not in varied(runs):
        return
    seen = {e.label: Resolved.of(e.config).data.task.metric.name for e in runs if e.seed == runs[0].seed}
    if len(set(seen.values())) > 1:
        said = ", ".join(f"{label}: {metric}" for label, metric in seen.items())
        raise ConfigError(f"all labels must have the same metric, got {said}")


def _run(
    runs: Sequence[Entry],
    id: str,
    folder: Path,
    at_once: int,
    options: Sequence[str],
    parent: str | None,
    references: Sequence[Entry],
    carry_out: CarryOut,
    goes_on: str,
) -> None:
    left = [entry for entry in runs if not finished(entry.config, folder / entry.name)]
    if len(left) < len(runs):
        log.info("%d of %d runs are finished", len(runs) - len(left), len(runs))
    about = {"flexfleet.comparison": id, **({PARENT: parent} if parent else {})}
    central = central_reference.commands(references, folder, options, about)
    if not left and not central:
        return
    given = {entry.name: hand_over(entry.config, folder / f"{entry.name}.yaml") for entry in left}
    groups = sharing(runs)
    shared = {entry.name: name for name, group in groups.items() for entry in group}
    shares = _shares({name: [e for e in group if e in left] for name, group in groups.items()}, folder, given)
    codes = carry_out(shares, at_once)
    ready = [entry for entry in left if codes.get(shared[entry.name], 0) == 0]
    commands = [
        _command(entry, folder / shared[entry.name], tags(entry, id, parent), folder, options, *given[entry.name])
        for entry in ready
    ] + central
    for name in FILES if ready else ():  # results of earlier runs, which a kill would leave
        (folder / name).unlink(missing_ok=True)
    codes |= carry_out(commands, at_once)
    failed = [code for code in codes.values() if code]
    if failed:
        names = told_failures(codes, {each.name: each.log for each in (*shares, *commands)})
        done = sum(finished(entry.config, folder / entry.name) for entry in runs)
        raise RunsFailed(
            f"{done} of {len(runs)} runs are finished, failed: {names}. Fix the cause, and {goes_on}; or leave out the "
            "algorithm or the seed",
            failed[0],
        )


def sharing(runs: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Map the names of shared folders to their runs: those of one seed with the same settings of partition and
    pre-training. The folder of a seed's first setting is `shared-s<seed>`."""
    out: dict[str, list[Entry]] = {}
    for seed in dict.fromkeys(entry.seed for entry in runs):
        groups: dict[str, list[Entry]] = {}
        for entry in (e for e in runs if e.seed == seed):
            groups.setdefault(json.dumps(settings(flatten(entry.config)), sort_keys=True), []).append(entry)
        for i, (text, group) in enumerate(groups.items()):
            digest = f"-{sha256(text.encode())[:8]}" if i else ""
            out[f"shared-s{seed}{digest}"] = group
    return out


def _shares(groups: Mapping[str, Sequence[Entry]], folder: Path, given: Mapping[str, tuple[str, str]]) -> list[Command]:
    """Return the commands that compute partition and pre-training for runs that have not begun."""
    commands = []
    for name, group in groups.items():
        fresh = [e for e in group if not (folder / e.name / "run.json").exists()]
        out = folder / name
        if not fresh:
            continue
        first = to_share(fresh)
        resolved = Resolved.of(first.config)
        if fits(resolved, out):
            continue
        config, stdin = given[first.name]
        argv = ("--config", config, "--out", str(out))
        call = partial(share, resolved, out)
        commands.append(Command(out.name, "flexfleet.pipeline.share", argv, folder / f"{out.name}.log", stdin, call))
    return commands


def to_share(runs: Sequence[Entry]) -> Entry:
    """Return the run for which the shared folder is computed: the first that needs preparations."""
    return next((e for e in runs if algorithm(e.config).preparations), runs[0])


def _command(
    entry: Entry,
    shared: Path,
    given: Mapping[str, str],
    folder: Path,
    options: Sequence[str],
    config: str,
    stdin: str,
) -> Command:
    argv = ["run", "--config", config, "--run-id", entry.name, "--resume", *options, "--shared", str(shared)]
    argv += [word for key, value in given.items() for word in ("--tag", f"{key}={value}")]

    def call() -> None:
        run(
            Resolved.of(entry.config),
            entry.name,
            resume=True,
            discard_damaged="--discard-damaged" in options,
            accept_numerics="--accept-numerics" in options,
            shared=shared,
            tags=dict(given),
        )
        tally_in(folder / entry.name).check()

    return Command(entry.name, "flexfleet.cli.main", tuple(argv), folder / f"{entry.name}.log", stdin, call)


def tags(entry: Entry, id: str, parent: str | None) -> dict[str, str]:
    """Return the tags of a run's MLflow run, by which MLflow's UI groups the runs. `parent`: the parent's id."""
    return {"flexfleet.comparison": id, "algorithm": entry.label, **({PARENT: parent} if parent else {})}


def finished(config: Config, out: Path) -> bool:
    """Return whether the run has a usable model and all its rounds. Raises IntegrityError if a file of a finished run
    has changed."""
    if not manifest.check(out):
        return False
    try:
        result, history = Result.read(out / "result.json"), BareHistory.read(out / "history.json")
        end = config.rounds.end(row_of(each).metrics for each in history.rounds)
    except IntegrityError:
        return False
    complete = len(history.rounds) == end and result.model_sha256 == history.model_sha256
    return complete and result.status == "finished"
