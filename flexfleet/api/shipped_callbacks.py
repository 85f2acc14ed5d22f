"""Define the callbacks of flexfleet: loggers for CSV, TensorBoard and Weights & Biases, and early stopping."""

from __future__ import annotations

import csv
import logging
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fl_engine.core.errors import ConfigError, EnvironmentFailure, nearest
from fl_engine.core.text import path_of
from flexfleet.api.callbacks import STOP, Callback, Round
from flexfleet.files.measure import LOWER
from flexfleet.files.terminal import missing

if TYPE_CHECKING:
    from flexfleet.api.results import Result

log = logging.getLogger("flexfleet")


class EarlyStopping(Callback):
    """Stop the run after `patience` evaluated rounds in which a metric has not improved. The status is then `stopped`.
    `result.resume(rounds=len(result.history))` finishes the run. A resumed run also counts earlier rounds.

    Args:
        metric: Name of the metric, as in `Result.history`. Rounds without this metric do not count.
        patience: Number of evaluated rounds without an improvement.
        min_delta: Minimum change of the metric that counts as an improvement, in the unit of the metric. Accuracies are
            between 0 and 1.
        mode: `max` if higher values are better, otherwise `min`. None selects `min` for losses and mae, else `max`.

    Raises:
        ConfigError: An argument is wrong.

    Examples:
        >>> flexfleet.run(rounds=500, callbacks=[flexfleet.EarlyStopping("avg", patience=20)])
    """

    def __init__(
        self,
        metric: str = "avg",
        patience: int = 10,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError.at(f"patience must be a whole number of at least 1, got {patience!r}")
        if not min_delta >= 0:
            raise ConfigError.at(f"min_delta must be at least 0, got {min_delta!r}")
        if mode not in ("max", "min", None):
            raise ConfigError.at(f"mode must be 'max', 'min' or None, got {mode!r}")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        lower = "loss" in metric or metric.partition("/")[0] in LOWER if mode is None else mode == "min"
        self._sign = -1 if lower else 1

    def on_start(self, result: Result) -> None:
        self._best, self._best_round, self._waited = 0.0, 0, 0
        for row in result._history:
            self._count(row["round"], row)

    def on_round(self, round: Round) -> Any:
        known = round.metrics
        if self._metric not in known and self._best_round == 0 and {"avg", "train_loss"} <= known.keys():
            raise ConfigError(f"there is no metric {self._metric!r}{nearest(self._metric, known)}", path="metric")
        self._count(round.number, known)
        if self._waited < self._patience:
            return None
        log.info(
            "early stopping: %s has not improved in %d evaluated rounds. The best value is %.4g in round %d",
            self._metric, self._waited, self._best, self._best_round,
        )  # fmt: skip
        return STOP

    def _count(self, number: int, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self._metric)
        if value is None:
            return
        if self._best_round == 0 or self._sign * (value - self._best) > self._min_delta:
            self._best, self._best_round, self._waited = value, number, 0
        else:
            self._waited += 1


class CSVLogger(Callback):
    """Write a CSV file with one row for each round. A cell is empty if the round does not have the metric. A resumed
    run writes the file again, including all rounds that were committed before.

    Args:
        path: Path of the CSV file. An existing file is replaced. If None, `metrics.csv` in the run's folder is used.

    Examples:
        >>> flexfleet.run(callbacks=[flexfleet.CSVLogger("metrics.csv")])
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else path_of(path).absolute()

    def on_start(self, result: Result) -> None:
        self._file = self._path or result.folder / "metrics.csv"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, Any]] = result._history
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        self._write("w", self._rows)

    def on_round(self, round: Round) -> None:
        row = {"round": round.number, **round.metrics}
        self._rows.append(row)
        if row.keys() <= set(self._columns):
            self._write("a", [row])
        else:
            self._columns = list(dict.fromkeys([*self._columns, *row]))
            self._write("w", self._rows)

    def _write(self, mode: str, rows: list[dict[str, Any]]) -> None:
        with open(self._file, mode, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if mode == "w" and self._columns:
                writer.writeheader()
            writer.writerows(rows)


class TensorBoardLogger(Callback):
    """Log the metrics of each round with `torch.utils.tensorboard.SummaryWriter`. The step is the number of the round.

    Args:
        folder: Parent folder. The event files are written to `<folder>/<run_id>`. If None, `tensorboard` in the run's
            folder is used.

    Raises:
        EnvironmentFailure: TensorBoard is not installed.

    Examples:
        >>> flexfleet.run(callbacks=[flexfleet.TensorBoardLogger("tb")])
        >>> # tensorboard --logdir tb
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if find_spec("tensorboard") is None:
            raise EnvironmentFailure(missing("tensorboard"))
        self._folder = None if folder is None else path_of(folder).absolute()

    def on_start(self, result: Result) -> None:
        from torch.utils.tensorboard import SummaryWriter

        at = result.folder / "tensorboard" if self._folder is None else self._folder / result.run_id
        # With `purge_step`, TensorBoard ignores rounds that were logged but not committed before the run was killed.
        self._writer = SummaryWriter(at, purge_step=len(result._history) + 1)

    def on_round(self, round: Round) -> None:
        for name, value in round.metrics.items():
            self._writer.add_scalar(name, value, round.number)
        self._writer.flush()

    def on_end(self, status: str) -> None:
        self._writer.close()


class WandbLogger(Callback):
    """Log the configuration and the metrics of each round to Weights & Biases. The step is the number of the round. If
    a run is resumed, its W&B run is continued.

    Args:
        project: Name of the W&B project.
        settings: Other arguments of `wandb.init`, such as entity, group, tags or mode.

    Raises:
        EnvironmentFailure: wandb is not installed.

    Examples:
        >>> flexfleet.run(callbacks=[flexfleet.WandbLogger("my-project", mode="offline")])
    """

    def __init__(self, project: str = "flexfleet", **settings: Any) -> None:
        if find_spec("wandb") is None:
            raise EnvironmentFailure(missing("wandb"))
        self._settings = {"project": project, **settings}

    def on_start(self, result: Result) -> None:
        import wandb

        known = result.folder / "wandb_id.txt"
        if not known.exists():
            known.write_text(uuid.uuid4().hex, encoding="utf-8")
        own = {
            "id": known.read_text(encoding="utf-8"),
            "resume": "allow",
            "reinit": "create_new",
            "name": result.run_id,
        }
        self._run = wandb.init(**{**own, "config": result.config, "dir": str(result.folder), **self._settings})

    def on_round(self, round: Round) -> None:
        if round.number >= self._run.step:  # skip rounds that a killed run has already logged
            self._run.log(dict(round.metrics), step=round.number, commit=True)

    def on_end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
