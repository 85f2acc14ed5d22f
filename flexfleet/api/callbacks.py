"""Define callbacks, which let users execute their own code during a run.

Callbacks receive copies of all values, so the model is bit-identical with and without callbacks. If a callback raises
an error, the run ends between two rounds and can be resumed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import ConfigError, nearest
from fl_engine.core.types import Assignment, ClientUpdate, Params
from fl_engine.training.evaluation import published

if TYPE_CHECKING:
    from flexfleet.api.results import Result


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
