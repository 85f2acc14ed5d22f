"""Run several algorithms with several seeds on the same data and network, and compare them in tables and a page.

A comparison compares variants. A variant is an algorithm with its settings, and its label is its name in tables and
files. A comparison is stored in the folder `<run.store>/<id>/`, with a run folder, a configuration and a log for each
variant and seed. Runs with the same seed share one partition and one pre-training, which are stored in
`shared-s<seed>/`. Variants with other settings for partition or pre-training use `shared-s<seed>-<digest>/`. The
results are written to comparison.json, .md, .svg and .html.

In a pipeline graph, the first task prepares all runs, each run is a task, and the last task collects the results.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, FlexfleetError, SeveralErrors
from fl_engine.core.records import Strict
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.loop import check_end
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, sha256
from flexfleet.config import Config, algorithm, flatten, parse
from flexfleet.config.comparison_runs import PlannedRun, folder_of, varied
from flexfleet.config.form import hand_over
from flexfleet.config.sources import sources
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.experiments.comparison_report import CLIENTS_FILE, FILES, tabulate
from flexfleet.experiments.executor import Command, Execute, RunsFailed, report_failures, resumable, side_by_side
from flexfleet.experiments.summarise import read_central
from flexfleet.files.artifacts import Artifact, History, RunFile, RunResult
from flexfleet.files.run_folder import check_free, check_manifest, how_to_resume
from flexfleet.files.run_status import tally_in
from flexfleet.pipeline import keys
from flexfleet.pipeline.check import check, check_folders
from flexfleet.pipeline.own_code import check_sources
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import can_adopt, share, shared_settings
from flexfleet.pipeline.resume import Attempt, known_run, store_of
from flexfleet.pipeline.run import need_packages, run
from flexfleet.tracking import record as track
from flexfleet.tracking.server import PARENT
from flexfleet.tracking.trackers import MLflow, ending

log = logging.getLogger("flexfleet")


def run_comparison(
    runs: Sequence[PlannedRun],
    id: str,
    *,
    to: Sequence[float] = (),
    at_once: int = 1,
    resume: bool = False,
    options: Sequence[str] = (),
    parent: str | None = None,
    resume_id: str | None = None,
    central: Sequence[Path] = (),
    references: Sequence[PlannedRun] = (),
    execute: Execute | None = None,
) -> ComparisonFile:
    """Execute the unfinished runs, at most `at_once` in parallel, and write the comparison.

    Args:
        options: Command-line flags for each run, such as `--discard-damaged`.
        parent: ID of the MLflow run of a nightly regression run; None if the comparison does not belong to one.
        resume_id: Value of --id in the command that resumes the comparison; None to use `id`.
        central: Folders of finished central trainings. The tables show the results of these trainings as the reference.
        references: Central trainings to execute together with the runs.
        execute: Function that executes commands; if None, `side_by_side` is used.

    Raises:
        ConfigError: The configuration is invalid. Raised before any training starts.
        RunsFailed: At least one run failed. Raised after all other runs have ended.
        Stopped, KeyboardInterrupt: The user requested a stop, and all processes have stopped.
    """
    folder = folder_of(runs)
    check_jobs(at_once, runs[0].config.run.metrics_port)
    check_free(folder, resume, "--id")
    if central:
        read_central(central, runs)
    check_folders(runs[0].config)
    check_all(runs)
    _warn_of_others(runs, folder)
    runs = in_one_experiment(runs)
    track.prepare(runs[0].config)
    with resumable(folder, resume_id or id):
        mlflow = begin(runs, id, {PARENT: parent} if parent else {})
        with ending(mlflow):
            tags = {track.COMPARISON: id, **({PARENT: mlflow.root} if mlflow else {})}
            _execute(runs, references, tags, at_once, options, execute or side_by_side, how_to_resume(resume_id or id))
            central = [*central, *(entry.folder for entry in references)]
            trained = read_central(central, runs) if central else None
            return tabulate(id, runs, {entry.name: entry.folder for entry in runs}, folder, to, mlflow, trained)


def check_jobs(at_once: int, metrics_port: int | None = None) -> None:
    """Raise ConfigError if the number of processes is less than 1, or if several processes would use the same port."""
    if at_once < 1:
        raise ConfigError(f"--jobs must be at least 1, got {at_once}", code="config.out_of_range")
    if at_once > 1 and metrics_port is not None:
        why = f"because {at_once} parallel runs cannot use port {metrics_port}. Or use --jobs 1"
        raise ConfigError.at(f"run.metrics_port must be null, {why}", code="config.conflict")


def in_one_experiment(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return copies of all runs in which the first run's MLflow experiment replaces the run's own experiment. MLflow
    requires that child runs and their parent run belong to the same experiment."""
    first = runs[0].config
    if first.tracking.mlflow is None:
        return list(runs)
    tracking = first.tracking.model_copy(update={"experiment": track.experiment(first)})
    return [replace(entry, config=entry.config.model_copy(update={"tracking": tracking})) for entry in runs]


def begin(runs: Sequence[PlannedRun], id: str, tags: Mapping[str, str], run_id: str | None = None) -> MLflow | None:
    """Start or continue the MLflow run of the comparison, and add `tags`. Returns None if tracking is off. If
    another task has started the MLflow run, `run_id` is its ID."""
    config = runs[0].config
    store = FolderStore(folder_of(runs).resolve()) if config.run.remote is None else open_store(config.run.remote)
    about = {track.COMPARISON: id, "flexfleet.store": store.uri(), **tags}
    return track.begin_parent(config, "comparison", id, store, about, run_id)


def check_all(runs: Sequence[PlannedRun]) -> None:
    """Check all runs, and raise the error of the first invalid run. The user code of a started run must not have
    changed, and the run must have at most `rounds.stop` committed rounds. All runs must have the same main metric."""
    if "dataset.name" in varied(runs):
        metrics = {e.label: Resolved.of(e.config).data.task.metric.name for e in runs if e.seed == runs[0].seed}
        if len(set(metrics.values())) > 1:
            found = ", ".join(f"{label}: {metric}" for label, metric in metrics.items())
            raise ConfigError(f"all variants must have the same main metric, got {found}", code="config.not_comparable")
    for entry in runs:
        out = entry.folder
        try:
            resolved = Resolved.of(entry.config)
            known = known_run(entry.config, out, resume=True)
            if known is None:
                check(resolved)
            else:  # check now, so that errors are found before any run starts
                check_sources(known.sources, sources(entry.config), out)
                check_end(Ledger(store_of(entry.config, entry.name, out)), entry.config.rounds)
            need_packages(resolved)
        except FlexfleetError as error:
            message = f"{entry.label}, seed {entry.seed}: {error}".replace("--run-id", "--id")
            kind = ConfigError if isinstance(error, SeveralErrors) else type(error)
            raise kind(message, code=error.code, path=error.path) from error


def _warn_of_others(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Warn if the folder contains runs that this comparison omits, for example runs of another algorithm."""
    found = sorted(file.parent.name for file in folder.glob("*/run.json"))
    if others := [name for name in found if name not in {entry.name for entry in runs}]:
        log.warning(
            "%s also contains %s, which this command does not name. Tables and the page omit %s, but the folders are "
            "kept. To show all runs, also name their algorithms and seeds",
            folder, ", ".join(others), "this run" if len(others) == 1 else "these runs",
        )  # fmt: skip


def finished(config: Config, out: Path) -> bool:
    """Return whether the run has completed its last round with a usable model. Raises IntegrityError if a file of a
    finished run has changed."""
    if not check_manifest(out):
        return False
    rounds = History.read(out / "history.json").rounds
    is_complete = len(rounds) == config.rounds.end(row.metrics for row in rounds)
    return is_complete and RunResult.read(out / "result.json").status == "finished"


def _execute(
    runs: Sequence[PlannedRun],
    references: Sequence[PlannedRun],
    tags: Mapping[str, str],
    at_once: int,
    options: Sequence[str],
    execute: Execute,
    how: str,
) -> None:
    """Execute all unfinished runs and the central trainings. Raises RunsFailed."""
    folder = folder_of(runs)
    missing = [entry for entry in runs if not finished(entry.config, entry.folder)]
    if len(missing) < len(runs):
        log.info("%d of %d runs are already finished", len(runs) - len(missing), len(runs))
    if not missing and not references:
        return
    shares: list[Command] = []
    shared: dict[str, Path] = {}
    for name, group in sharing(runs).items():
        shared |= {entry.name: folder / name for entry in group}
        fresh = [e for e in group if e in missing and not (e.folder / "run.json").exists()]
        if fresh:
            shares += _share(to_share(fresh), folder / name)
    codes = execute(shares, at_once)
    flags = [*options, *(word for key, value in tags.items() for word in ("--tag", f"{key}={value}"))]
    ready = [entry for entry in missing if codes.get(shared[entry.name].name, 0) == 0]
    if ready:  # delete the outdated results of an earlier comparison
        for name in (*FILES, CLIENTS_FILE):
            (folder / name).unlink(missing_ok=True)
    commands = [_run(entry, shared[entry.name], flags, tags) for entry in ready]
    commands += [_command("central", entry, folder, flags) for entry in references]
    codes |= execute(commands, at_once)
    if failed := [code for code in codes.values() if code]:
        names = report_failures(codes, [*shares, *commands])
        done = sum(finished(entry.config, entry.folder) for entry in runs)
        raise RunsFailed(
            f"{done} of {len(runs)} runs are finished, but these failed: {names}. Fix the cause, and {how}, "
            "or omit the algorithm or the seed",
            failed[0],
        )


def sharing(runs: Sequence[PlannedRun]) -> dict[str, list[PlannedRun]]:
    """Map the name of each shared folder to the runs that use the folder. Runs share a folder if they have the same
    seed and the same settings for partition and pre-training. The first folder of a seed is `shared-s<seed>`."""
    out: dict[str, list[PlannedRun]] = {}
    for seed in dict.fromkeys(entry.seed for entry in runs):
        groups: dict[str, list[PlannedRun]] = {}
        for entry in (e for e in runs if e.seed == seed):
            groups.setdefault(json.dumps(shared_settings(flatten(entry.config)), sort_keys=True), []).append(entry)
        for i, (text, group) in enumerate(groups.items()):
            digest = f"-{sha256(text.encode())[:8]}" if i else ""
            out[f"shared-s{seed}{digest}"] = group
    return out


def to_share(runs: Sequence[PlannedRun]) -> PlannedRun:
    """Return the run whose settings are used to compute the shared files. Choose the first run whose algorithm requires
    a preparation, such as pre-training, or the first run if no algorithm requires one."""
    return next((e for e in runs if algorithm(e.config).preparations), runs[0])


def _share(entry: PlannedRun, out: Path) -> list[Command]:
    """Return a list with the command for partition and pre-training; an empty list if `out` already contains both."""
    resolved = Resolved.of(entry.config)
    if can_adopt(resolved, out):
        return []
    config, stdin = hand_over(entry.config, out.with_name(f"{entry.name}.yaml"))
    argv = ("share", "--config", config, "--out", str(out))
    call = partial(share, resolved, out)
    return [Command(out.name, "flexfleet.pipeline", argv, out.with_name(f"{out.name}.log"), stdin, call)]


def _run(entry: PlannedRun, shared: Path, flags: Sequence[str], tags: Mapping[str, str]) -> Command:
    own = ["--tag", f"algorithm={entry.label}", "--shared", str(shared)]
    command = _command("run", entry, shared.parent, [*flags, *own])
    return replace(command, call=partial(run_one, entry, shared, tags))


def _command(step: str, entry: PlannedRun, folder: Path, flags: Sequence[str]) -> Command:
    """Return the command `flexfleet <step>` for one run. If the run is finished, the command does nothing."""
    config, stdin = hand_over(entry.config, folder / f"{entry.name}.yaml")
    argv = (step, "--config", config, "--run-id", entry.name, "--resume", *flags)
    log_file = folder / f"{entry.name}.log"
    return Command(entry.name, "flexfleet.cli.main", argv, log_file, stdin, has_rounds=step == "run")


def run_one(entry: PlannedRun, shared: Path, tags: Mapping[str, str]) -> RunResult:
    """Execute or resume one run in this process, with the partition and pre-training in `shared`. Raises Diverged or
    NothingMerged if the run does not have a usable model."""
    about = {**tags, "algorithm": entry.label}
    result = run(Resolved.of(entry.config), entry.name, Attempt(resume=True, tags=about), shared)
    tally_in(entry.folder).check()
    return result


# ------------------------------------------------------------------------------------------- pipeline tasks
class Pair(Strict):
    """Parameters of the pipeline task that executes one run (one algorithm with one seed)."""

    comparison: str
    """ID of the comparison. A nightly regression run has one comparison for each case."""
    label: str
    shared: str
    """Name of the folder that contains the run's partition and pre-training."""
    config: dict[str, Any]

    @property
    def entry(self) -> PlannedRun:
        config = parse(self.config)
        return PlannedRun(self.label, config.seed, config)


class PairsFile(Artifact):
    """Parameters of all run tasks in a pipeline graph. A task receives only the index of its run in this file, because
    Kubeflow passes all parameters in one command-line argument, which Linux limits to 128 KiB."""

    pairs: tuple[Pair, ...]
    mlflow: str | None
    """ID of the MLflow run of the comparison or nightly regression run; null if tracking is off."""
    parent: str | None
    """ID of the MLflow run that is the parent of all runs."""
    commit: str | None = None
    """Git commit with which a nightly regression run was started; null for a comparison."""


def prepare(runs: Sequence[PlannedRun], id: str, shared: Path, out: Path, job_id: str) -> list[str]:
    """Check and prepare all runs, write their parameters into the file `out`, and start the MLflow run. Returns the
    index of each run in the file."""
    runs = in_one_experiment(runs)
    pairs = pairs_of(runs, id, shared)
    return write_pairs(pairs, begin(runs, id, track.of_job(runs[0].config, job_id)), out)


def pairs_of(runs: Sequence[PlannedRun], id: str, shared: Path) -> list[Pair]:
    """Check all runs, and write their partitions and pre-training results into the folder `shared`/<id>."""
    check_all(runs)
    track.prepare(runs[0].config)
    folder: dict[str, str] = {}
    for name, group in sharing(runs).items():
        share(Resolved.of(to_share(group).config), shared / id / name)
        folder |= {entry.name: name for entry in group}
    return [
        Pair(comparison=id, label=e.label, shared=folder[e.name], config=e.config.model_dump(mode="json")) for e in runs
    ]


def write_pairs(pairs: Sequence[Pair], mlflow: MLflow | None, out: Path, commit: str | None = None) -> list[str]:
    """Write the runs into the file `out`, and return the index of each run in the file. Indices are strings, because
    Kubeflow can convert integers to floats."""
    ids = {"mlflow": mlflow.run_id, "parent": mlflow.root} if mlflow else {"mlflow": None, "parent": None}
    PairsFile(pairs=tuple(pairs), commit=commit, **ids).write(out)
    return [str(number) for number in range(len(pairs))]


def run_pair(file: PairsFile, number: str, shared: Path, out: Path, job_id: str) -> RunResult:
    """Execute or resume one run in the store, and copy the run folder to `out`, without its ledger and secret key.

    Raises:
        ConfigError: The code has changed since the nightly regression run was started, for example in another image.
        Diverged, NothingMerged: The run does not have a usable model.
    """
    pair = file.pairs[int(number)]
    entry, id = pair.entry, pair.comparison
    if file.commit is not None:
        track.check_code(file.commit, id)
    tags = {track.COMPARISON: id, **({PARENT: file.parent} if file.parent else {})}
    result = run_one(entry, shared / id / pair.shared, {**tags, **track.of_job(entry.config, job_id)})
    ignore = shutil.ignore_patterns("rounds", "states", ".lock", str(Path(keys.IN_RUN).parent))
    shutil.copytree(entry.folder, out, ignore=ignore, dirs_exist_ok=True)
    return result


def collect(file: PairsFile, folders: Sequence[Path], out: Path) -> ComparisonFile:
    """Compare the finished runs in `folders`, and write the comparison into `out`. The folders can be in any order."""
    by_name = {RunFile.read(folder / "run.json").run_id: folder for folder in folders}
    id, runs = file.pairs[0].comparison, [pair.entry for pair in file.pairs]
    return tabulate(id, runs, by_name, out, mlflow=begin(runs, id, {}, file.mlflow))
