"""Reads from their ledgers how far runs are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from fl_engine.core.errors import Busy, ConfigError, FlexfleetError, Unreachable
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.files.artifacts import BareHistory, Result, RunFile, Status, row_of
from flexfleet.files.begun import check_looked_into
from flexfleet.files.manifest import MANIFEST
from flexfleet.files.measure import measure_in
from flexfleet.files.tally import tally_of
from flexfleet.pipeline.resumed import place_of


def describe(run: Path) -> dict[str, Any]:
    """status: that of a run that has ended (`files.artifacts.Status`), or `unfinished` (running or killed: no file says
    which, and resuming is safe). stop: after how many rounds the run ends; at most so many, where
    `rounds.stop_simulated_s` may end it before. metric: accuracy if that is the metric of avg and full, else null.
    run_id: the folder's name, with which the run goes on, also where it began with another one; with a ledger in
    `run.remote` the name that the ledger has. Raises Unreachable soon where the ledger's server does not answer."""
    check_looked_into(run)
    if not (run / "run.json").is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no run.json")
    file = RunFile.read(run / "run.json")
    config = configs.parse_schema(file.config)
    remote = config.run.remote
    store = FolderStore(run.resolve()) if remote is None else open_store(place_of(remote, file.run_id), hasty=True)
    rows = Checkpoints(store).rows(lines=False) or _of_ended_trial(run)
    scored = [row for row in rows if "avg" in row.metrics]
    done = rows[-1].round + 1 if rows else 0
    end = config.rounds.end(row.metrics for row in rows)
    own = (run if run.name not in ("", "..") else run.resolve()).name
    return {
        "run_id": own if config.run.remote is None else file.run_id,
        "status": status_of(config, run, rows),
        "round": done,
        "stop": config.rounds.stop if end is None else end,
        "avg": scored[-1].metrics["avg"] if scored else None,
        "full": scored[-1].metrics["full"] if scored else None,
        "metric": measure_in(scored[-1].metrics).name or None if scored else None,
    }


TRIALS = "trials"
OF_STUDY = (TRIALS, "held-out")
"""Folders of a study that hold its runs."""


def _of_ended_trial(run: Path) -> list[Row]:
    """The rounds of a study's trial whose ledger was deleted when it ended; none of any other run."""
    if run.resolve().parent.name != TRIALS or not (run / "history.json").is_file():
        return []
    return [row_of(each) for each in BareHistory.read(run / "history.json").rounds]


def status_of(config: Config, run: Path, rows: Sequence[Row]) -> Status | Literal["unfinished"]:
    """How the run has ended; `unfinished` unless the ledger's `rows` are all that the configuration asks for, and the
    results in the folder are of all of them. A run that got more rounds has the results of fewer until its end. Raises
    IntegrityError for a result that is damaged."""
    if config.rounds.end(row.metrics for row in rows) is None or not (run / "history.json").is_file():
        return "unfinished"
    history = BareHistory.read(run / "history.json")
    if len(history.rounds) != len(rows):
        return "unfinished"
    tally = tally_of(row.metrics for row in rows)
    if (run / MANIFEST).is_file():
        has_results = Result.read(run / "result.json").model_sha256 == history.model_sha256
    else:
        # The step federate alone writes no manifest, because the other steps write elsewhere. Neither do the runs of a
        # study, nor a run whose model cannot be evaluated.
        of_study = run.resolve().parent.name in OF_STUDY
        has_results = not (run / "pool").is_dir() or of_study or not tally.finite
    return tally.status if has_results else "unfinished"


def list_runs(store: Path) -> list[dict[str, Any]]:
    """All runs of a store, by name of their folder, also those of comparisons (so of nights) and studies (`runs_in`);
    one that cannot be read with status `unreadable`, and why. None where there is no store yet. Raises as
    `check_looked_into` does."""
    try:
        os.lstat(store)
    except FileNotFoundError:
        return []
    except OSError:  # as of a folder below a file
        pass
    check_looked_into(store)
    folders = sorted(store.glob("*"))
    return _described(run for each in folders for run in ([(each, each.name)] if _is_run(each) else _placed(each)))


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """The runs of the comparison or the study in this folder, each with its place in the store as `run_id`:
    `<comparison>/<label>-s<seed>`. None where it holds none, or is a run's own folder."""
    return [] if _is_run(folder) else _described(_placed(folder))


def _placed(folder: Path) -> list[tuple[Path, str]]:
    """The folders of the runs in a comparison or a study, each with its place in the store."""
    found = [each.parent for at in ("", *OF_STUDY) for each in _inside(folder / at)]
    return [(run, f"{folder.resolve().name}/{run.relative_to(folder).as_posix()}") for run in found]


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*/run.json"))
    except PermissionError:  # what may not be looked into hides no other run
        return []


def _is_run(folder: Path) -> bool:
    return any(folder.glob("run.json"))  # no error of a folder that may not be looked into


def _described(runs: Iterable[tuple[Path, str]]) -> list[dict[str, Any]]:
    """A server that has not answered for one run is not asked for the others: each would wait as long."""
    rows, gone = [], ""
    for run, place in runs:
        try:
            if gone and _is_remote(run):
                raise Unreachable(gone)
            found = describe(run)
            rows.append({**found, "run_id": place} if "/" in place else found)
        except FlexfleetError as error:
            gone = str(error) if isinstance(error, Unreachable) and not isinstance(error, Busy) else gone
            unknown = dict.fromkeys(("round", "stop", "avg", "full", "metric"))
            rows.append({"run_id": place, "status": "unreadable", **unknown, "why": str(error)})
    return rows


def _is_remote(run: Path) -> bool:
    return "://" in (configs.parse_schema(RunFile.read(run / "run.json").config).run.remote or "")
