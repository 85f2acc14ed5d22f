"""Code of one's own that looks on while a run computes.

`on_round` is called after a round was computed and evaluated, and before it is committed: once for each round that this
process computes, and again for a round that is computed again after a kill. All values are copies. An error in a
callback ends the run like a kill between two rounds: it can be resumed. `return STOP` commits the round and ends the
run as `stopped`; after the last round it changes nothing, and the run is `finished`. With and without callbacks the
model is the same, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.types import ClientUpdate, Params, WorkOrder
from fl_engine.training.evaluation import published
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import check_reach
from flexfleet.api.calls import Bar, barred, shown
from flexfleet.config.run_names import new_name
from flexfleet.config.run_names import plain as plain_name
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import run as run_all
from flexfleet.tracking.trackers import Several

if TYPE_CHECKING:
    from flexfleet.api.results import Result

R = TypeVar("R")


class _Stop:
    def __repr__(self) -> str:
        return "flexfleet.STOP"


STOP = _Stop()
"""What `on_round` returns to end the run before its last round."""


@dataclass(frozen=True)
class Round:
    """A round that was computed."""

    number: int
    """Counted from 1."""
    metrics: Mapping[str, float]
    """As in `Result.history`: avg, full, loss/<level>, train_loss, bytes_down, seconds_round, ..."""
    clients: Sequence[Mapping[str, Any]]
    """A line for each client that was asked."""
    _state: Any = field(repr=False)

    @property
    def params(self) -> Params:
        """The global model after the round, as a state_dict: a copy."""
        return {name: tensor.clone() for name, tensor in published(self._state).items()}


class Callback:
    """Override what you need."""

    def on_start(self, result: Result) -> None:
        """Called before the first round that is computed. `result.folder` is where the run writes."""

    def on_update(self, order: WorkOrder, update: ClientUpdate) -> None:
        """Called when a client's update arrives; whether it is merged is decided later."""

    def on_round(self, round: Round) -> Any:
        """Called when a round is computed and not yet committed. Return None, or STOP."""

    def on_end(self, status: str) -> None:
        """Called when a started run has ended: `finished`, `diverged`, `nothing_merged`, `stopped` or `failed`."""


# ------------------------------------------------------------------------------------------------- running
def run_watched(
    resolved: Resolved,
    run_id: str | None,
    resume: bool,
    callbacks: Sequence[Callback],
    progress: bool | None,
    result: Callable[[Path], R],
) -> R:
    """Run all steps in a folder of the store. `result` reads that folder: for the callbacks when the rounds begin, for
    the caller in the end."""
    if resume and run_id is None:
        raise ConfigError("resume=True needs run_id, the name of the run to resume")
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: a list of objects of flexfleet.Callback is expected, got {callbacks!r}")
    config = resolved.config
    check_reach(config)
    watching = Watching(callbacks)
    with isolated(), shown(progress):
        name = new_name(config) if run_id is None else plain_name(run_id, "run_id")
        folder = Path(config.run.store) / name
        beginning = _Beginning(lambda: watching.start(result(folder)))
        status = "failed"
        try:
            status = run_all(
                resolved,
                name,
                resume=resume,
                observer=Several([beginning, *([Bar()] if barred(progress) else [])]),
                watcher=watching if callbacks else None,
            ).status
        except Stopped:
            status = "stopped"
            if not watching.stopped:
                raise
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            watching.end(status)
    return result(folder)


class _Beginning(Tracker):
    """A tracker that reports the run's beginning: a run tracks its parameters once, before its rounds."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def params(self, values: Mapping[str, Any]) -> None:
        self._tell()


class Watching:
    """The engine's watcher that calls callbacks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for each in callbacks:
            if isinstance(each, type) or not isinstance(each, Callback):
                raise ConfigError(f"callbacks: objects of flexfleet.Callback are expected, got {each!r}")
        self._callbacks = tuple(callbacks)
        self._updates = [each for each in callbacks if type(each).on_update is not Callback.on_update]
        self.stopped = False
        self._started = False

    def start(self, result: Any) -> None:
        self._started = True
        self._each(lambda callback: callback.on_start(result))

    def update(self, order: WorkOrder, update: ClientUpdate) -> None:
        for callback in self._updates:
            hints, metrics = copy.deepcopy(dict(order.hints)), dict(update.metrics)
            sent, kept, brought, state = map(_copied, (order.payload, order.memory, update.payload, update.state))
            callback.on_update(
                replace(order, payload=sent, memory=kept, hints=hints, encoded=None),
                replace(update, payload=brought, state=state, metrics=metrics, encoded=None),
            )

    def round(
        self, number: int, metrics: Mapping[str, float], clients: Sequence[Mapping[str, Any]], state: Any
    ) -> bool:
        for callback in self._callbacks:
            said = callback.on_round(Round(number, dict(metrics), copy.deepcopy(list(clients)), state))
            if said is not None and said is not STOP:
                raise ConfigError(f"{type(callback).__name__}.on_round returns None or flexfleet.STOP, got {said!r}")
            self.stopped |= said is STOP
        return self.stopped

    def end(self, status: str) -> None:
        if self._started:
            self._each(lambda callback: callback.on_end(status))

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            call(callback)


def _copied(params: Params) -> Params:
    return {name: tensor.clone() for name, tensor in params.items()}
