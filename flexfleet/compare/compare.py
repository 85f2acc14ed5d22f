"""Several algorithms on the same task, with several seeds: every run of its own, then one table and one page of all.

A comparison is a folder `<run.store>/<id>/`: a run folder for each label and seed (what `flexfleet run` makes), beside
it the run's configuration and log, `shared-s<seed>/` with what all runs of the seed start from, and in the end
comparison.json, .md, .svg and .html.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_engine.core.errors import ConfigError, FlexfleetError, IntegrityError, Stopped
from fl_engine.storage.places import open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.compare.comparison import Comparison
from flexfleet.compare.side_by_side import Job, last_words, side_by_side
from flexfleet.compare.tabulate import tabulate
from flexfleet.config import Config, algorithm, parse
from flexfleet.config.entries import Entry, folder_of
from flexfleet.config.overrides import hand_over
from flexfleet.files.artifacts import History, Result, RunFile
from flexfleet.run.check import check
from flexfleet.run.run import need_packages, run
from flexfleet.steps.federate import alone, known_run, store_of
from flexfleet.steps.prepare import Resolved
from flexfleet.steps.share import fits, share
from flexfleet.tracking import record as track
from flexfleet.tracking.trackers import PARENT, TOKEN, MLflow, ending

log = logging.getLogger("flexfleet")


class RunsFailed(FlexfleetError):
    """Some runs of a comparison did not finish; the exit code is the first one's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def compare(
    runs: Sequence[Entry],
    id: str,
    *,
    to: Sequence[float] = (),
    at_once: int = 1,
    resume: bool = False,
    options: Sequence[str] = (),
    night: str | None = None,
) -> Comparison:
    """Runs what is not finished, `at_once` side by side, and writes the comparison. `options` go to each run as they
    are (`--discard-damaged`). `night`: the MLflow run of the night that this is of.

    Raises ConfigError before anything trains; RunsFailed where runs failed, after all others ended; Stopped and
    KeyboardInterrupt when all processes have stopped.
    """
    folder = folder_of(runs)
    if at_once < 1:
        raise ConfigError(f"--jobs is the number of runs side by side, at least 1, got {at_once}")
    if (folder / "run.json").exists():
        raise ConfigError(f"{folder} is the folder of a run, not of a comparison: choose another --id")
    if folder.exists() and not resume:
        raise ConfigError(f"{folder} exists already: go on with --resume, or choose another --id")
    check_all(runs)
    need_packages(Resolved.of(runs[0].config))
    track.prepare(runs[0].config)
    with alone(folder):
        mlflow = begin(runs, id, {PARENT: night} if night else {})
        try:
            with ending(mlflow):
                _run(runs, id, folder, at_once, options, mlflow.root if mlflow else None)
        except Stopped:
            raise Stopped(f"stopped on request: {_go_on(id)}") from None
        except KeyboardInterrupt:
            log.warning("interrupted: %s", _go_on(id))
            raise
        return tabulate(id, runs, {entry.name: folder / entry.name for entry in runs}, folder, to, mlflow)


def begin(runs: Sequence[Entry], id: str, given: Mapping[str, str], run_id: str | None = None) -> MLflow | None:
    """The comparison's own small MLflow run: begun before those that are its children, and found again whatever joins
    them. None where nothing is tracked. `given`: more tags; `run_id`: that of one that has been begun."""
    config = runs[0].config
    if config.tracking.mlflow is None:
        return None
    store = FolderStore(folder_of(runs).resolve()) if config.run.remote is None else open_store(config.run.remote)
    about = {"flexfleet.kind": "comparison", "flexfleet.comparison": id, "flexfleet.store": store.uri(), **given}
    if run_id is None:
        about[TOKEN] = track.lasting_token("comparison", store, stores_of(runs))
    return track.tracker(config, id, about, run_id)


def stores_of(runs: Sequence[Entry]) -> list[Store]:
    """Where the runs' ledgers are."""
    return [store_of(entry.config, entry.name, folder_of(runs) / entry.name) for entry in runs]


def check_all(runs: Sequence[Entry]) -> None:
    """Raises what `check` does for the first run that could not be made; a begun one must have the same settings."""
    for entry in runs:
        out = folder_of(runs) / entry.name
        try:
            if known_run(entry.config, out, resume=True) is None:
                check(Resolved.of(entry.config))
        except FlexfleetError as error:
            raise type(error)(f"{entry.label}, seed {entry.seed}: {error}".replace("--run-id", "--id")) from error


def _run(
    runs: Sequence[Entry], id: str, folder: Path, at_once: int, options: Sequence[str], parent: str | None
) -> None:
    left = [entry for entry in runs if not finished(entry.config, folder / entry.name)]
    if len(left) < len(runs):
        log.info("%d of %d runs are finished", len(runs) - len(left), len(runs))
    if not left:
        return
    for name in ("json", "md", "svg", "html"):  # would be of other runs than the folder has in the end
        (folder / f"comparison.{name}").unlink(missing_ok=True)
    given = {entry.name: hand_over(entry.config, folder / f"{entry.name}.yaml") for entry in left}
    shares = _shares(left, folder, given)
    codes = side_by_side(shares, at_once)
    ready = [entry for entry in left if codes.get(shared_name(entry.seed), 0) == 0]
    jobs = [_job(entry, tags(entry, id, parent), folder, options, *given[entry.name]) for entry in ready]
    codes |= side_by_side(jobs, at_once)
    failed = [(name, code) for name, code in codes.items() if code]
    if failed:
        logs = {job.name: job.log for job in (*shares, *jobs)}
        for name, code in failed:
            log.error("%s: exit code %d, %s: %s", name, code, logs[name], last_words(logs[name]))
        done = sum(finished(entry.config, folder / entry.name) for entry in runs)
        names = ", ".join(f"{name} ({logs[name]})" for name, _ in failed)
        raise RunsFailed(
            f"{done} of {len(runs)} runs are finished, failed: {names}. Nothing is tabulated while runs are missing: "
            f"mend the cause, and {_go_on(id)}; or leave the algorithm or the seed out there",
            failed[0][1],
        )


def _shares(left: Sequence[Entry], folder: Path, given: Mapping[str, tuple[str, str]]) -> list[Job]:
    """For each seed whose partition and pre-training are still to be computed for runs that have not begun."""
    jobs = []
    for seed in dict.fromkeys(entry.seed for entry in left):
        fresh = [e for e in left if e.seed == seed and not (folder / e.name / "run.json").exists()]
        out = folder / shared_name(seed)
        if not fresh:
            continue
        first = _to_share(fresh)
        if fits(Resolved.of(first.config), out):
            continue
        config, stdin = given[first.name]
        argv = ("--config", config, "--out", str(out))
        jobs.append(Job(out.name, "flexfleet.steps.share", argv, folder / f"{out.name}.log", stdin))
    return jobs


def _to_share(runs: Sequence[Entry]) -> Entry:
    """Of these runs of one seed the first that measures APoZ: then the pre-training is there for all that do."""
    return next((e for e in runs if algorithm(e.config).needs_apoz), runs[0])


def _job(entry: Entry, given: Mapping[str, str], folder: Path, options: Sequence[str], config: str, stdin: str) -> Job:
    argv = ["run", "--config", config, "--run-id", entry.name, "--resume", *options]
    argv += ["--shared", str(folder / shared_name(entry.seed))]
    argv += [word for key, value in given.items() for word in ("--tag", f"{key}={value}")]
    return Job(entry.name, "flexfleet.cli", tuple(argv), folder / f"{entry.name}.log", stdin)


def tags(entry: Entry, id: str, parent: str | None) -> dict[str, str]:
    """Of a run's MLflow run: by these the UI groups the runs of a comparison. `parent`: the one that it is below."""
    return {"flexfleet.comparison": id, "algorithm": entry.label, **({PARENT: parent} if parent else {})}


def shared_name(seed: int) -> str:
    return f"shared-s{seed}"


def finished(config: Config, out: Path) -> bool:
    """Whether the run has gone through to its result, with as many rounds as are wanted."""
    try:
        result, history = Result.read(out / "result.json"), History.read(out / "history.json")
    except IntegrityError:
        return False
    return len(history.rounds) == config.rounds.stop and result.model_sha256 == history.model_sha256


# --------------------------------------------------------------------------------------- as tasks of a graph
def prepare(runs: Sequence[Entry], id: str, out: Path, job_id: str) -> list[dict[str, str]]:
    """`pairs_of` the comparison, whose own MLflow run is begun."""
    pairs = pairs_of(runs, id, out)
    return below(pairs, begin(runs, id, track.of_job(runs[0].config, job_id)))


def below(pairs: Sequence[Mapping[str, str]], mlflow: MLflow | None) -> list[dict[str, str]]:
    """Adds what the tasks want to know of the MLflow run that they belong to: its id, and what theirs are below."""
    about = {"mlflow": mlflow.run_id if mlflow else "", "parent": mlflow.root if mlflow else ""}
    return [{**pair, **about} for pair in pairs]


def pairs_of(runs: Sequence[Entry], id: str, out: Path) -> list[dict[str, str]]:
    """Checks all runs and writes what those of a seed have in common into `out`/<id>; gives what the other tasks want
    to know of each run. Values are texts: a graph may make floats of numbers."""
    check_all(runs)
    need_packages(Resolved.of(runs[0].config))
    track.prepare(runs[0].config)
    for seed in dict.fromkeys(entry.seed for entry in runs):
        first = _to_share([e for e in runs if e.seed == seed])
        share(Resolved.of(first.config), out / id / shared_name(seed))
    return [{"comparison": id, "label": e.label, "run": e.name, "config": e.config.model_dump_json()} for e in runs]


def run_pair(pair: Mapping[str, str], shared: Path, out: Path, job_id: str) -> Result:
    """Makes or goes on with one run in its folder of the store, and copies what a finished run is into `out`."""
    entry, id = entry_of(pair), pair["comparison"]
    found = run(
        Resolved.of(entry.config),
        entry.name,
        resume=True,
        shared=shared / id / shared_name(entry.seed),
        tags={**tags(entry, id, pair["parent"]), **track.of_job(entry.config, job_id)},
    )
    ledger = shutil.ignore_patterns("rounds", ".lock")
    shutil.copytree(Path(entry.config.run.store) / entry.name, out, ignore=ledger, dirs_exist_ok=True)
    return found


def collect(pairs: Sequence[Mapping[str, str]], folders: Sequence[Path], out: Path) -> Comparison:
    """The comparison of the finished runs in `folders`, in any order, written into `out`."""
    by_name = {RunFile.read(folder / "run.json").run_id: folder for folder in folders}
    id, runs = pairs[0]["comparison"], [entry_of(pair) for pair in pairs]
    return tabulate(id, runs, by_name, out, mlflow=begin(runs, id, {}, pairs[0]["mlflow"]))


def entry_of(pair: Mapping[str, str]) -> Entry:
    config = parse(json.loads(pair["config"]))
    return Entry(pair["label"], config.seed, config)


def _go_on(id: str) -> str:
    return f"the same command with --id {id} --resume goes on"
