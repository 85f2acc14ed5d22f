"""How far runs are, read from their ledgers."""

from __future__ import annotations

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
from flexfleet.files.manifest import MANIFEST
from flexfleet.files.measure import measure_in
from flexfleet.files.run_folder import check_is_folder
from flexfleet.files.run_status import tally_of
from flexfleet.pipeline.resume import place_of


def describe(run: Path) -> dict[str, Any]:
    """Describe how far a run is.

    `status` is that of a run that has ended (`files.artifacts.Status`), or `unfinished` (running or killed; resuming is
    safe). `stop` is the round after which the run ends, at most that if `rounds.stop_simulated_s` may end it before.
    `metric` is `accuracy` if avg and full are accuracies, else null. `run_id` is the folder's name, with which the run
    is resumed; with `run.remote` the name of its ledger.

    Raises Unreachable soon if the ledger's server does not answer.
    """
    check_is_folder(run)
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
    """The rounds of a study's trial whose ledger was deleted when it ended; empty for other runs."""
    if run.resolve().parent.name != TRIALS or not (run / "history.json").is_file():
        return []
    return [row_of(each) for each in BareHistory.read(run / "history.json").rounds]


def status_of(config: Config, run: Path, rows: Sequence[Row]) -> Status | Literal["unfinished"]:
    """How the run has ended; `unfinished` unless the ledger's `rows` are all that the configuration asks for and the
    results in the folder are of all of them."""
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
    """Describe all runs of a store, by the name of their folder, and those of its comparisons and studies (`runs_in`).
    A run that cannot be read has the status `unreadable` and the reason. Empty if the store does not exist."""
    if not store.exists():
        return []
    check_is_folder(store)
    folders = sorted(store.glob("*"))
    return _described(run for each in folders for run in ([(each, each.name)] if _is_run(each) else _placed(each)))


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Describe the runs of the comparison or study in this folder, each with its place in the store as `run_id`:
    `<comparison>/<label>-s<seed>`. Empty if it holds none, or is a run's own folder."""
    return [] if _is_run(folder) else _described(_placed(folder))


def _placed(folder: Path) -> list[tuple[Path, str]]:
    """The folders of the runs in a comparison or study, each with its place in the store."""
    found = [each.parent for at in ("", *OF_STUDY) for each in sorted((folder / at).glob("*/run.json"))]
    return [(run, f"{folder.resolve().name}/{run.relative_to(folder).as_posix()}") for run in found]


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").exists()


def _described(runs: Iterable[tuple[Path, str]]) -> list[dict[str, Any]]:
    """Asks no server again that did not answer for an earlier run, because each would wait as long."""
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
