"""Define callbacks, which let users execute their own code during a run: loggers for CSV, TensorBoard and Weights &
Biases, early stopping, and the base class of the user's own callbacks.

Callbacks receive copies of all values, so the model is bit-identical with and without callbacks. If a callback raises
an error, the run ends between two rounds and can be resumed.
"""

from __future__ import annotations

import copy
import csv
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import ConfigError, EnvironmentFailure, nearest
from fl_engine.core.text import path_of
from fl_engine.core.types import Assignment, ClientUpdate, Params
from fl_engine.training.evaluation import published
from flexfleet.files.measure import LOWER
from flexfleet.files.terminal import missing

if TYPE_CHECKING:
    from flexfleet.api.results import Result

log = logging.getLogger("flexfleet")


class _Stop:
    def __repr__(self) -> str:
        return "flexfleet.STOP"


STOP = _Stop()
"""Value that `Callback.on_round` returns to end the run after the current round."""


@dataclass(frozen=True)
class Round:
    """Results of a round, passed to `Callback.on_round`.

    Examples:
        >>> def on_round(self, round): print(round.number, round.metrics["avg"])
    """

    number: int
    """Number of the round, counted from 1."""
    metrics: Mapping[str, float]
    """Metrics as in `Result.history`: avg, full, loss/<level>, train_loss, bytes_down, seconds_round, ..."""
    clients: Sequence[Mapping[str, Any]]
    """One mapping for each client that was selected in the round."""
    _state: Any = field(repr=False)

    @property
    def params(self) -> Params:
        """A copy of the state_dict of the global model after the round."""
        return {name: tensor.clone() for name, tensor in published(self._state).items()}


class Callback:
    """Base class of callbacks. Override the methods that you need.

    Examples:
        >>> class Enough(flexfleet.Callback):
        ...     def on_round(self, round):
        ...         return flexfleet.STOP if round.metrics.get("avg", 0) > 0.9 else None
        >>> flexfleet.run(callbacks=[Enough()])
    """

    def on_start(self, result: Result) -> None:
        """Called once, before this process computes its first round.

        Args:
            result: The run, without metrics. The files of the run are written to `result.folder`.
        """

    def on_update(self, assignment: Assignment, update: ClientUpdate) -> None:
        """Called when a client's update arrives, before it is accepted or rejected.

        Args:
            assignment: The assignment for the client.
            update: The client's update.
        """

    def on_round(self, round: Round) -> Any:
        """Called when a round has been computed and evaluated, before it is committed. If the process was killed before
        the commit, the round is computed again and this method is called again.

        Args:
            round: The round.

        Returns:
            None, or STOP to commit this round and end the run with the status `stopped`.
        """

    def on_end(self, status: str) -> None:
        """Called when a run ends, if `on_start` was called.

        Args:
            status: Final status: `finished`, `diverged`, `nothing_merged`, `stopped` or `failed`.
        """


class Watching(Tracker):
    """Tracker that calls the callbacks of a run. `open` returns a new `Result` of the run."""

    def __init__(self, callbacks: Sequence[Callback], open: Callable[[], Any]) -> None:
        if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
            raise ConfigError(f"callbacks must be a list of flexfleet.Callback objects, got {callbacks!r}")
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for kind in map(type, callbacks):
            for name in dir(kind):
                if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
                    raise ConfigError(
                        f"{kind.__name__}.{name} is not a method of flexfleet.Callback{nearest(name, hooks)}",
                        code="config.own_code",
                    )
        self._callbacks, self._open = tuple(callbacks), open
        self._updates = [each for each in callbacks if type(each).on_update is not Callback.on_update]
        self.stopped = False
        self._started: list[Callback] = []

    def params(self, values: Mapping[str, Any]) -> None:
        """Call `on_start`. This method is called exactly once in a run, before the first round."""
        for callback in self._callbacks:
            callback.on_start(self._open())
            self._started.append(callback)

    def update(self, assignment: Assignment, update: ClientUpdate) -> None:
        for callback in self._updates:
            sent, received = replace(assignment, encoded=None), replace(update, encoded=None)
            # Clone slices first, because deepcopy would copy the whole model for each slice.
            params = (sent.payload, sent.memory, received.payload, received.state)
            clones: dict[int, Any] = {id(t): t.clone() for each in params for t in each.values()}
            callback.on_update(copy.deepcopy(sent, clones), copy.deepcopy(received, clones))

    def round(
        self, number: int, metrics: Mapping[str, float], clients: Sequence[Mapping[str, Any]], state: Any
    ) -> bool:
        for callback in self._callbacks:
            decision = callback.on_round(Round(number, dict(metrics), copy.deepcopy(list(clients)), state))
            if decision is not None and decision is not STOP:
                name = type(callback).__name__
                raise ConfigError(f"{name}.on_round must return None or flexfleet.STOP, got {decision!r}")
            self.stopped |= decision is STOP
        return self.stopped

    def end(self, status: str) -> None:
        for callback in self._started:
            callback.on_end(status)


# ---------------------------------------------------------------------------------------- shipped callbacks
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
        self, metric: str = "avg", patience: int = 10, min_delta: float = 0.0, mode: Literal["max", "min"] | None = None
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
