"""Provisioners provide workers: people start enrolled devices, and `kubernetes.provisioner` starts pods."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fl_engine.core.types import Device, RoundPlan
from fl_engine.remote.registry import Member, Registry


class Lost(NamedTuple):
    """Why a worker process has ended."""

    reason: str
    failed: bool
    """Its assignment may be the reason; otherwise the worker was taken away."""


class Need(NamedTuple):
    """What an open round needs, and the workers that it has."""

    open: Mapping[str, int]
    """Number of assignments without a result, by pool."""
    waiting: Mapping[str, int]
    """Number of assignments that no worker holds, by pool."""
    present: Mapping[str, str | None]
    """Map the id of each process that sends heartbeats to its pool."""
    silent: frozenset[str]
    """Names of workers whose heartbeats have stopped."""


class Provisioner:
    """Workers belong to pools: devices to their tier, pods to their class of resources. No method may wait for a
    server, because rounds would wait too."""

    room: int = 1
    """The most assignments of a worker at a time."""
    strangers: bool = True
    """The workers are other people's: each gets a limited share of a round's assignments."""
    drains: int = 1
    """How often in a round a worker may be taken away from an assignment before the assignment counts as failed."""
    quorum: float = 0.0
    """The share of the wanted clients that must have a result; 0: a round ends with those that have one."""
    wait_s: float
    """Seconds without a worker at work after which a round stops waiting."""

    @property
    def moved(self) -> float:
        """When a worker was last about to come, on the clock of `time.monotonic`; -inf: unknown."""
        return -math.inf

    def pool(self, client: int) -> str:
        """Return the pool whose workers execute the client's assignments."""
        raise NotImplementedError

    def suits(self, own: str | None, pool: str) -> bool:
        """Whether a worker of the pool `own` (None: a device without a tier) may execute assignments of `pool`."""
        raise NotImplementedError

    def torch_device(self, client: int) -> str:
        """Return the torch device that trains the client."""
        return "cpu"

    def names(self) -> Collection[str]:
        """Return the names of the mailboxes. A worker whose mailbox disappears is revoked."""
        raise NotImplementedError

    def member(self, name: str) -> Member:
        """Return a worker. Raises IntegrityError or KeyError if it has been revoked."""
        raise NotImplementedError

    def enroll(self, member: Member) -> None:
        """Store the id of a device that has enrolled."""

    def begin(self, plan: RoundPlan) -> None:
        """Prepare for a round."""

    def end(self) -> None:
        """The round is over, or given up."""

    def need(self, need: Need) -> None:
        """Report what an open round needs; called repeatedly. Raises EnvironmentFailure if no worker is present and
        none can come."""

    def lost(self, name: str, worker: str) -> Lost | None:
        """Return why a process has ended; None: it is not known to have ended."""
        return None

    def hopeless(self, pool: str) -> bool:
        """Whether no worker of this pool can come in this round."""
        return False

    def why(self, pool: str) -> str:
        """Return why no worker of this pool takes assignments; empty: unknown."""
        return ""

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        """Return what to do if a round waits in vain for workers of these pools; `names`: the known workers."""
        raise NotImplementedError


class Enrolled(Provisioner):
    """Devices that people start where they are: each is one client."""

    def __init__(self, fleet: Sequence[Device], registry: Registry, wait_s: float) -> None:
        self._fleet, self._registry, self.wait_s = fleet, registry, wait_s

    def pool(self, client: int) -> str:
        return self._fleet[client].tier

    def suits(self, own: str | None, pool: str) -> bool:
        return own in (None, pool)

    def names(self) -> Collection[str]:
        return self._registry.names()

    def member(self, name: str) -> Member:
        return self._registry.member(name)

    def enroll(self, member: Member) -> None:
        self._registry.put(member)

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        invite = f"flexfleet invite --tier {pools[0] if pools else 'TIER'}"
        if not names:
            where = self._registry.store.uri()
            return f"No device is invited (run.secrets: {where}): {invite}"
        return f"Start `flexfleet agent` on the devices ({', '.join(names)}), or invite others: {invite}"
