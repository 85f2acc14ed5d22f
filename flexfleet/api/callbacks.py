"""Code of one's own that looks on while a run computes.

`on_round` is called after a round was computed and evaluated, and before it is committed: once for each round that this
process computes, and again for a round that is computed again after a kill. All values are copies. An error in a
callback ends the run like a kill between two rounds: it can be resumed. `return STOP` commits the round and ends the
run as `stopped`; after the last round it changes nothing, and the run is `finished`. With and without callbacks the
model is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fl_engine.core.types import ClientUpdate, Params, WorkOrder
from fl_engine.training.evaluation import published

if TYPE_CHECKING:
    from flexfleet.api.results import Result


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
        """Before the first round that is computed. `result.folder` is where the run writes."""

    def on_update(self, order: WorkOrder, update: ClientUpdate) -> None:
        """A client's update has arrived, in the order of arrival; whether it is merged is decided later."""

    def on_round(self, round: Round) -> Any:
        """A round is computed, and not committed yet. Returns None, or STOP."""

    def on_end(self, status: str) -> None:
        """A run that had started has ended: `finished`, `diverged`, `nothing_merged`, `stopped` or `failed`."""
