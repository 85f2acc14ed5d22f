"""Read the progress of runs from their ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from fl_engine.core.errors import ConfigError, FlexfleetError
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.files.artifacts import History, RunFile, RunResult, Status
from flexfleet.files.measure import measure_in
from flexfleet.files.run_folder import MANIFEST, check_is_folder
from flexfleet.files.run_status import first_failures, tally_of
from flexfleet.pipeline.resume import place_of


def describe(run: Path) -> dict[str, Any]:
    """Describe the progress of a run.

    `status` is `unfinished` if rounds or results are missing and the run can be resumed. For all other runs, `status`
    is the final status (`files.artifacts.Status`). `stop` is the number of rounds after which the run ends, or the
    maximum number if the end is not yet known. `metric` is `accuracy` if `avg` and `full` are accuracies, otherwise
    null. `run_id` is the name of the folder. If `run.remote` is set, `run_id` is the name of the run's ledger.

    Raises Unreachable after a few seconds if the ledger's server does not respond.
    """
    file, config, ledger = _opened(run)
    rows = ledger.rows(lines=False) or _of_ended_trial(run)
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


def failures_of(run: Path) -> list[dict[str, Any]]:
    """Return the first failure of each kind in a run (`run_status.first_failures`)."""
    return first_failures(_opened(run)[2].each_row())


def _opened(run: Path) -> tuple[RunFile, Config, Checkpoints]:
    check_is_folder(run)
    if not (run / "run.json").is_file():
        raise ConfigError(f"{run} must be the folder of a run, but does not contain a run.json")
    file = RunFile.read(run / "run.json")
    config = configs.parse_schema(file.config)
    remote = config.run.remote
    store = FolderStore(run.resolve()) if remote is None else open_store(place_of(remote, file.run_id), hasty=True)
    return file, config, Checkpoints(store)


TRIALS = "trials"
OF_STUDY = (TRIALS, "held-out")
"""Subfolders of a study that contain the runs of the study."""


def _of_ended_trial(run: Path) -> list[Row]:
    """Return the rounds of an ended trial whose ledger has been deleted. The list is empty for other runs."""
    if run.resolve().parent.name != TRIALS or not (run / "history.json").is_file():
        return []
    return list(History.read(run / "history.json").rounds)


def status_of(config: Config, run: Path, rows: Sequence[Row]) -> Status | Literal["unfinished"]:
    """Return the status of a run. The status is `unfinished` if rounds or results are missing."""
    if config.rounds.end(row.metrics for row in rows) is None or not (run / "history.json").is_file():
        return "unfinished"
    history = History.read(run / "history.json")
    if len(history.rounds) != len(rows):
        return "unfinished"
    tally = tally_of(row.metrics for row in rows)
    if (run / MANIFEST).is_file():
        has_results = RunResult.read(run / "result.json").model_sha256 == history.model_sha256
    else:
        # Three kinds of folders do not have a manifest: folders of the `federate` step, runs of a study, and runs
        # whose model cannot be evaluated.
        of_study = run.resolve().parent.name in OF_STUDY
        has_results = not (run / "pool").is_dir() or of_study or not tally.finite
    return tally.status if has_results else "unfinished"


def list_runs(store: Path) -> list[dict[str, Any]]:
    """Describe all runs in a store, sorted by folder. Runs of comparisons and studies are included. If a run cannot be
    read, its status is `unreadable` and `why` contains the reason. The list is empty if the store does not exist."""
    if not store.exists():
        return []
    check_is_folder(store)
    return _described(run for each in sorted(store.glob("[!.]*")) for run in _placed(each))


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Describe the runs of the comparison or study in this folder. `run_id` is the run's path in the store, such as
    `<comparison>/<label>-s<seed>`. The list is empty if the folder does not contain runs, or is itself a run."""
    return [] if (folder / "run.json").exists() else _described(_placed(folder))


def _placed(folder: Path) -> list[tuple[Path, str]]:
    """Return the folder of each run in `folder`, and the path of this run in the store."""
    if (folder / "run.json").exists():
        return [(folder, folder.name)]
    found = [each.parent for at in ("", *OF_STUDY) for each in sorted((folder / at).glob("*/run.json"))]
    return [(run, f"{folder.resolve().name}/{run.relative_to(folder).as_posix()}") for run in found]


def _described(runs: Iterable[tuple[Path, str]]) -> list[dict[str, Any]]:
    rows = []
    for run, place in runs:
        try:
            found = describe(run)
            rows.append({**found, "run_id": place} if "/" in place else found)
        except FlexfleetError as error:
            unknown = dict.fromkeys(("round", "stop", "avg", "full", "metric"))
            rows.append({"run_id": place, "status": "unreadable", **unknown, "why": str(error)})
    return rows
