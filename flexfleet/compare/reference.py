"""The reference of a comparison: the full network trained on all samples (`flexfleet central`), with each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_engine.core.errors import IntegrityError
from flexfleet.compare.comparison import Central, sure
from flexfleet.compare.side_by_side import Command
from flexfleet.config import Config
from flexfleet.config.entries import Entry
from flexfleet.config.overrides import hand_over
from flexfleet.files.artifacts import History, Result


def finished(config: Config, out: Path) -> bool:
    """Whether the folder holds a result after the configured number of epochs."""
    try:
        return len(History.read(out / "history.json").rounds) == config.central.epochs and bool(_result(out))
    except IntegrityError:
        return False


def commands(entries: Sequence[Entry], folder: Path, options: Sequence[str], tags: Mapping[str, str]) -> list[Command]:
    """Those that train what is not trained yet."""
    found = []
    for entry in entries:
        if finished(entry.config, folder / entry.name):
            continue
        config, stdin = hand_over(entry.config, folder / f"{entry.name}.yaml")
        argv = ["central", "--config", config, "--run-id", entry.name, "--resume", *options]
        argv += [word for key, value in tags.items() for word in ("--tag", f"{key}={value}")]
        found.append(Command(entry.name, "flexfleet.cli", tuple(argv), folder / f"{entry.name}.log", stdin))
    return found


def read(entries: Sequence[Entry], folder: Path) -> Central | None:
    """The figures; None where there is no reference."""
    if not entries:
        return None
    each = [_result(folder / entry.name) for entry in entries]
    return Central(
        epochs=entries[0].config.central.epochs,
        last=sure([one.metrics["full"] for one in each]),
        best=sure([one.metrics["best"]["full"] for one in each]),
        mlflow_run_ids=tuple(one.mlflow_run_id for one in each if one.mlflow_run_id),
    )


def _result(out: Path) -> Result:
    return Result.read(out / "result.json")
