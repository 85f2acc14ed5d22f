"""A run that callbacks look on at: what `flexfleet.run` and `Result.resume` share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.types import ClientUpdate, Params, WorkOrder
from fl_engine.training.guest import guest
from flexfleet.api.asked import check_reach
from flexfleet.api.callbacks import STOP, Callback, Round
from flexfleet.api.progress import Bar, barred, shown
from flexfleet.config import Config
from flexfleet.config.names import new_name
from flexfleet.config.names import plain as plain_name
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.whole import run as run_all
from flexfleet.tracking.trackers import Several

R = TypeVar("R")


def run_watched(
    config: Config,
    run_id: str | None,
    resume: bool,
    callbacks: Sequence[Callback],
    progress: bool | None,
    result: Callable[[Path], R],
) -> R:
    """Runs all steps in a folder of the store. `result` reads that folder: for the callbacks when the rounds begin, for
    the caller in the end."""
    if resume and run_id is None:
        raise ConfigError("resume=True needs run_id, the name of the run to go on with")
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: a list of objects of flexfleet.Callback is expected, got {callbacks!r}")
    check_reach(config)
    watching = Watching(callbacks)
    with guest(), shown(progress):
        resolved = Resolved.of(config)
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
    """A tracker that tells of the run's beginning: a run tells its parameters once, before its rounds."""

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
