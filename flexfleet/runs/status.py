"""Reads from their ledgers how far runs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.storage.checkpoints import Checkpoints
from flexfleet import config as configs
from flexfleet.files.artifacts import RunFile
from flexfleet.files.measure import measure_in
from flexfleet.steps.federate import store_of


def describe(run: Path) -> dict[str, Any]:
    """status: `finished`, or `unfinished` (running or killed: the ledger does not say which, and resuming is safe).
    stop: after how many rounds the run ends; at most so many, where `rounds.stop_simulated_s` may end it before.
    metric: accuracy if that is the metric of avg and full, else null."""
    if not (run / "run.json").is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no run.json")
    file = RunFile.read(run / "run.json")
    config = configs.parse_schema(file.config)
    rows = Checkpoints(store_of(config, file.run_id, run)).rows(lines=False)
    scored = [row for row in rows if "avg" in row.metrics]
    done = rows[-1].round + 1 if rows else 0
    end = config.rounds.end(row.metrics for row in rows)
    return {
        "run_id": file.run_id,
        "status": "finished" if end is not None and (run / "history.json").is_file() else "unfinished",
        "round": done,
        "stop": config.rounds.stop if end is None else end,
        "avg": scored[-1].metrics["avg"] if scored else None,
        "full": scored[-1].metrics["full"] if scored else None,
        "metric": measure_in(scored[-1].metrics).name or None if scored else None,
    }


def list_runs(store: Path) -> list[dict[str, Any]]:
    """All runs of a store, by name."""
    return [describe(path.parent) for path in sorted(store.glob("*/run.json"))]
