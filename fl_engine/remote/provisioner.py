"""Provisioners, which provide workers. Users start enrolled devices, and `kubernetes.provisioner` starts pods."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fl_engine.core.types import Device, RoundPlan
from fl_engine.remote.registry import Mailboxes, Member, Registry
from fl_engine.remote.settings import LEASE_S, AgentsConfig, KubernetesConfig


class Lost(NamedTuple):
    """The reason why a worker process or its lease has ended."""

    reason: str
    failed: bool
    """True if the assignment may have caused the end; False if the worker was interrupted, for example evicted."""
    untaken: bool = False
    """True if the worker did not start the assignments of the lease."""


class Need(NamedTuple):
    """The available workers of a round, and the number of assignments that need workers."""

    open: Mapping[str, int]
    """Number of assignments without a result for each pool."""
    waiting: Mapping[str, int]
    """Number of assignments without a lease for each pool."""
    present: Mapping[str, str | None]
    """Map the process id of each available worker to its pool."""
    silent: frozenset[str]
    """Names of workers whose heartbeats have stopped."""


class Provisioner:
    """Base class of provisioners. Each worker belongs to a pool, which is the tier of a device or the class of a pod.
    Methods must not wait for a server, because waiting would delay the round."""

    options: AgentsConfig | KubernetesConfig
    mailboxes: Mailboxes
    registry: Registry
    """Keys of the devices. A provisioner without a registry overrides `names` and `member`."""
    lease_s: float = LEASE_S
    """Seconds without a heartbeat after which a worker is treated as lost."""
    room: int = 1
    """Maximum number of assignments in a worker's lease."""
    strangers: bool = True
    """True if other people own the workers. In this case, the number of assignments per worker is limited."""
    drains: int = 1
    """Maximum interruptions of an assignment at one worker; each further interruption counts as a failed attempt."""
    quorum: float = 0.0
    """Minimum fraction of the required results in a round. With fewer results, the run stops."""
    wait_s: float
    """Seconds without a working worker after which a round stops waiting."""
    moved: float = -math.inf
    """Last time at which a worker was about to start (`time.monotonic`); -inf if unknown."""

    def pool(self, client: int) -> str:
        """Return the pool whose workers execute the client's assignments."""
        raise NotImplementedError

    def suits(self, own: str | None, pool: str) -> bool:
        """Return whether a worker of the pool `own` may execute assignments of `pool`. None means any pool."""
        return own in (None, pool)

    def torch_device(self, client: int) -> str:
        return "cpu"

    def names(self) -> Collection[str]:
        """Return the names of the mailboxes. A known worker whose name is missing counts as revoked."""
        return self.registry.names()

    def member(self, name: str) -> Member:
        """Return a worker. Raises IntegrityError or KeyError if the worker has been revoked."""
        return self.registry.member(name)

    def enroll(self, member: Member) -> None:
        """Store a device's id after its enrollment."""
        self.registry.put(member)

    def begin(self, plan: RoundPlan) -> None:
        """Prepare for a round."""

    def end(self) -> None:
        """Clean up after a round, even if the round was stopped."""

    def need(self, need: Need) -> None:
        """Receive the round's open assignments and available workers, which the scheduler reports repeatedly. Raises
        EnvironmentFailure if no worker is available and no worker can start."""

    def lost(self, name: str, worker: str) -> Lost | None:
        """Return the reason why a process has ended; None if the process may still run."""
        return None

    def hopeless(self, pool: str) -> bool:
        """Return True if no worker of this pool can start in this round."""
        return False

    def why(self, pool: str) -> str:
        """Return the reason why no worker of this pool executes assignments; empty if unknown."""
        return ""

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        """Return advice for the user if these `pools` have no working worker. `names` are the known workers."""
        raise NotImplementedError


class Enrolled(Provisioner):
    """Enrolled devices, which people start themselves. Each device is one client."""

    def __init__(
        self, fleet: Sequence[Device], registry: Registry, mailboxes: Mailboxes, options: AgentsConfig
    ) -> None:
        self._fleet, self.registry, self.mailboxes, self.options = fleet, registry, mailboxes, options
        self.wait_s, self.lease_s = options.wait_s, options.lease_s

    def pool(self, client: int) -> str:
        return self._fleet[client].tier

    def advice(self, names: Sequence[str], pools: Sequence[str]) -> str:
        invite = f"flexfleet invite --tier {pools[0] if pools else 'TIER'}"
        if not names:
            where = self.registry.store.uri()
            return f"No device is invited in run.secrets ({where}). Invite one: {invite}"
        return f"Start `flexfleet agent` on the devices ({', '.join(names)}), or invite others: {invite}"
