"""Define a callback that stops a run when a metric no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fl_engine.core.errors import ConfigError, nearest
from flexfleet.api.callbacks import STOP, Callback, Round
from flexfleet.files.measure import LOWER

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
            raise ConfigError(f"patience must be a whole number of at least 1, got {patience!r}", path="patience")
        if not min_delta >= 0:
            raise ConfigError(f"min_delta must be at least 0, got {min_delta!r}", path="min_delta")
        if mode not in ("max", "min", None):
            raise ConfigError(f"mode must be 'max', 'min' or None, got {mode!r}", path="mode")
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
