"""Who makes sure that workers are present: people who start enrolled devices, or a backend that starts processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from fl_engine.core.types import Device, RoundPlan
from fl_engine.remote.registry import Member, Registry


class Lost(NamedTuple):
    """A fact about a worker that cannot answer any more."""

    reason: str
    failed: bool
    """Its assignment may be the reason; otherwise the worker was taken away."""


class Need(NamedTuple):
    """What an open round needs, and the workers that it has."""

    open: Mapping[str, int]
    """Orders without a result, by pool."""
    waiting: Mapping[str, int]
    """Orders that no worker holds, by pool."""
    present: Mapping[str, str | None]
    """The ids of the processes that send heartbeats, and their pools."""
    silent: frozenset[str]
    """Names of workers that have stopped to send heartbeats."""


class Provisioner(Protocol):
    """Workers belong to pools: devices to their tier, pods to their class of resources. No method waits for a server
    for long, so that rounds do not."""

    room: int
    """How many orders a worker may hold at once."""
    strangers: bool
    """The workers are other people's: each gets a limited share of a round's orders."""
    drains: int
    """How often in a round a worker may be taken away while it holds an order, before it counts against the order."""
    quorum: float
    """Share of the wanted clients without which a round does not end; 0: a round ends with those that have answered."""
    wait_s: float
    """Seconds without a worker at work after which a round does not wait any more."""

    @property
    def moved(self) -> float:
        """When a worker was last about to come, on the clock of `time.monotonic`; -inf: unknown."""

    def pool(self, client: int) -> str:
        """The pool whose workers execute the client's orders."""

    def suits(self, own: str | None, pool: str) -> bool:
        """Whether a worker of the pool `own` may execute the orders of `pool`. None: a device of no tier."""

    def torch_device(self, client: int) -> str: ...

    def names(self) -> Collection[str]:
        """The workers' mailboxes. A worker whose mailbox disappears is revoked."""

    def member(self, name: str) -> Member:
        """Raises IntegrityError or KeyError if it has been revoked meanwhile."""

    def enroll(self, member: Member) -> None:
        """Store the id of a device that has enrolled."""

    def begin(self, plan: RoundPlan) -> None:
        """A round begins."""

    def end(self) -> None:
        """The round is over, or given up."""

    def need(self, need: Need) -> None:
        """Called again and again while a round is open. Raises EnvironmentFailure if no worker is present and none can
        come."""

    def lost(self, name: str, worker: str) -> Lost | None:
        """What is known of a process that has ended; None: nothing."""

    def hopeless(self, pool: str) -> bool:
        """Whether no worker of this pool can come in this round."""

    def why(self, pool: str) -> str:
        """Why no worker of this pool takes orders; empty: unknown."""

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        """What to do if workers of these pools are waited for in vain; `names`: the known workers."""


class Enrolled:
    """Devices that people start where they are: each is one client."""

    room, strangers, drains, quorum, moved = 1, True, 1, 0.0, -math.inf

    def __init__(self, fleet: Sequence[Device], registry: Registry, wait_s: float) -> None:
        self._fleet, self._registry, self.wait_s = fleet, registry, wait_s

    def pool(self, client: int) -> str:
        return self._fleet[client].tier

    def suits(self, own: str | None, pool: str) -> bool:
        return own in (None, pool)

    def torch_device(self, client: int) -> str:
        return "cpu"

    def names(self) -> Collection[str]:
        return self._registry.names()

    def member(self, name: str) -> Member:
        return self._registry.member(name)

    def enroll(self, member: Member) -> None:
        self._registry.put(member)

    def begin(self, plan: RoundPlan) -> None:
        pass

    def end(self) -> None:
        pass

    def need(self, need: Need) -> None:
        pass

    def lost(self, name: str, worker: str) -> Lost | None:
        return None

    def hopeless(self, pool: str) -> bool:
        return False

    def why(self, pool: str) -> str:
        return ""

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        invite = f"flexfleet invite --tier {pools[0] if pools else 'TIER'}"
        if not names:
            where = self._registry.store.uri()
            return f"No device is invited ({where} lists none; run.secrets sets where to look): {invite}"
        return (
            f"Invited devices: {', '.join(names)}. Start `flexfleet agent` on them, invite others ({invite}), or raise "
            "agents.wait_s"
        )
