"""Who sees to it that devices are there: their owners, whom somebody has invited, or a backend that starts them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fl_engine.core.types import Device, RoundPlan

SAY_EVERY_S = 30.0


class Lost(NamedTuple):
    """Why a device cannot answer any more, as somebody else knows."""

    reason: str
    counts: bool
    """Whether its order has failed with it; else the device was taken away, whatever the order did."""


class Keeper(Protocol):
    """`place`: the kind of device that may have a client's order; devices (`Member.tier`) are of one kind or of any."""

    moved: float
    """When a device was last on its way, on the clock of `time.monotonic`; -inf: nobody knows."""
    room: int
    """How many orders a device may hold at once."""
    strangers: bool
    """The devices are other people's: each gets a limited share of a round's orders."""
    spares: bool
    """A round may do without the clients of a place whose devices take no orders: whoever asked for it counts the
    answers."""
    drains: int
    """How often in a round a device that holds an order may be taken away, as it says itself or others do: from then on
    it counts against the order, which may be why its pod is evicted, and since a device may say so and live on."""

    def place(self, client: int) -> str: ...

    def device(self, client: int) -> str:
        """The torch device that trains a client's order."""

    def begin(self, plan: RoundPlan) -> None:
        """A round begins."""

    def keep(self, asked: Mapping[str, int], unheld: Mapping[str, int], silent: Mapping[str, bool]) -> bool:
        """Looks after the devices; whether others are there now. `asked`: by place, the orders without an answer;
        `unheld`: those of them that no device holds; `silent`: devices that say nothing, and whether they were there
        and have not said that they end. Called all the time while a round is open. Raises Stopped where no device can
        come."""

    def gave_up(self, place: str) -> bool:
        """Whether no device of this place takes orders any more in this round."""

    def lost(self, name: str, heard: float) -> Lost | None:
        """What is known of a device that was heard of last at `heard`; None: nothing, or nothing since."""

    def why(self, place: str) -> str:
        """Why no device of this place takes orders; empty: nobody knows."""

    def advice(self, names: Sequence[str], places: Sequence[str]) -> str:
        """What to do where devices of these places are waited for in vain; `names`: those that are known."""


class Invited:
    """Devices that people start where they are: each is one client. `roster`: where they are listed."""

    moved, room, strangers, spares, drains = -math.inf, 1, True, False, 1

    def __init__(self, fleet: Sequence[Device], roster: str = "") -> None:
        self._fleet, self._roster, self._met = fleet, roster, 0.0

    def place(self, client: int) -> str:
        return self._fleet[client].tier

    def device(self, client: int) -> str:
        return "cpu"

    def begin(self, plan: RoundPlan) -> None:
        self._met = time.monotonic()

    def keep(self, asked: Mapping[str, int], unheld: Mapping[str, int], silent: Mapping[str, bool]) -> bool:
        """While orders wait, others may have been invited."""
        if not any(unheld.values()) or time.monotonic() - self._met <= SAY_EVERY_S:
            return False
        self._met = time.monotonic()
        return True

    def gave_up(self, place: str) -> bool:
        return False

    def lost(self, name: str, heard: float) -> Lost | None:
        return None

    def why(self, place: str) -> str:
        return ""

    def advice(self, names: Sequence[str], places: Sequence[str]) -> str:
        invite = f"flexfleet invite --tier {places[0] if places else 'TIER'}"
        if not names:
            where = f" ({self._roster} lists none; where to look is set by run.secrets)" if self._roster else ""
            return f"No device is invited{where}: {invite}"
        return (
            f"Invited are {', '.join(names)}: start `flexfleet agent` on them, or invite others ({invite}), or raise "
            "agents.wait_s"
        )
