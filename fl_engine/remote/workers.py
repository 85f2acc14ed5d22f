"""The coordinator's view of its workers: which are present, and what each holds."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fl_engine.core.errors import IntegrityError
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import HEARTBEAT_BYTES, Heartbeat, Lease, Message, pause
from fl_engine.remote.provisioner import Provisioner
from fl_engine.remote.registry import Member
from fl_engine.storage.lease import BEAT_S
from fl_engine.storage.overlapping import overlapped

log = logging.getLogger("flexfleet")

FORMER = 8
"""Number of earlier processes of a mailbox that are remembered."""
REFRESH_S = 2.0
"""The least seconds between two polls for newly invited devices."""
STARTS_S = 0.5
"""The least seconds between two polls for the first heartbeat of a worker."""
AWAY_S = 60.0
"""The most seconds between two polls for a heartbeat of a worker that is away."""
IDLE_S = 1500.0
"""Seconds of silence after which an idle worker counts as away. It sends a heartbeat at least every ten minutes."""
SIGN_S = 600.0
"""Seconds after which a worker gets another message with fresh URLs, as a sign of life."""


@dataclass
class Held:
    """The lease that a worker holds."""

    lease: str
    worker: str
    """The process that may execute it."""
    clients: list[int]
    """Clients without a result."""
    alone: bool
    """Whether the lease has a single client."""
    since: float
    """When it was written, on the clock of `time.monotonic`."""
    heard: float
    """When a new heartbeat last named the lease; `since` if none has."""
    taken: bool = False
    """Whether a heartbeat has named the lease."""


@dataclass
class Worker:
    """A mailbox, and the process that uses it."""

    member: Member
    message: Message
    """The last one that was written."""
    heard: float
    """When its heartbeat last changed, or when the first poll was."""
    heartbeat: Heartbeat | None = None
    process: str = ""
    """Id of the process that sends heartbeats; empty: none has yet."""
    former: deque[str] = field(default_factory=lambda: deque(maxlen=FORMER))
    """Ids of earlier processes."""
    away: bool = False
    """Not present until its heartbeat changes."""
    revoked: bool = False
    rests: float = 0.0
    """It gets no assignment before this time, because it has failed or has not taken the last one."""
    failures: int = 0
    """How often in a row."""
    why: str = ""
    """Why its last assignment failed; empty: it has had a result since."""
    held: Held | None = None
    doubled: bool = False
    """Whether a second user of the mailbox was reported."""
    seen: tuple[str, int] | None = None
    """Process and number of the last valid heartbeat."""
    looked: float = -math.inf
    """When the last poll for a heartbeat was."""
    written: float = 0.0
    """When the last message was written."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_silent(self) -> bool:
        """Whether its heartbeats have stopped, without a message that it has ended."""
        return self.away and self.heartbeat is not None and not self.is_gone and self.held is None

    @property
    def is_gone(self) -> bool:
        return self.heartbeat is not None and self.heartbeat.state == "gone"


class Workers:
    """`check` raises Replaced if another coordinator has the mailboxes. `lease_s`: seconds of silence after which a
    worker counts as gone."""

    def __init__(
        self, mailboxes: Mailboxes, provisioner: Provisioner, lease_s: float, check: Callable[[], None]
    ) -> None:
        self._mailboxes, self._provisioner, self._lease_s = mailboxes, provisioner, lease_s
        self._check, self._checked = check, -BEAT_S
        self._refreshed = -math.inf
        self.by_name: dict[str, Worker] = {}
        self.numerics: set[str] = set()
        """How workers' arithmetic differs from the coordinator's."""

    @property
    def present(self) -> list[Worker]:
        return [worker for worker in self.by_name.values() if not worker.away and not worker.revoked]

    def members(self) -> list[Member]:
        return [worker.member for worker in self.by_name.values() if not worker.revoked]

    def still_mine(self) -> None:
        """Raise Replaced if another coordinator has the mailboxes. A lock that was valid BEAT_S seconds ago still
        counts as valid."""
        if time.monotonic() - self._checked >= BEAT_S:
            self._check()
            self._checked = time.monotonic()

    def send(self, worker: Worker, lease: Lease | None, **changes: Any) -> None:
        """Write the worker's next message."""
        self.still_mine()
        given = {"worker": worker.process or None, "lease_s": self._lease_s, "revoked": worker.revoked, "lease": lease}
        worker.message = self._mailboxes.write(worker.member, worker.message, **given | changes)
        worker.written = time.monotonic()

    def refresh(self, at_once: bool = False) -> list[Worker]:
        """Add new workers, remove revoked ones, and return the new ones. `at_once`: do not wait for the interval."""
        self.still_mine()
        # The names of enrolled devices are read from a store, which costs requests.
        every = min(REFRESH_S, self._lease_s / 12) if self._provisioner.strangers else 0.0
        if not at_once and time.monotonic() - self._refreshed < every:
            return []
        self._refreshed = time.monotonic()
        names, new = set(self._provisioner.names()), []
        for name in names - self.by_name.keys():
            with suppress(IntegrityError, KeyError):  # revoked meanwhile
                new.append(self._meet(self._provisioner.member(name)))
        for name in self.by_name.keys() - names:
            worker = self.by_name[name]
            worker.revoked = True
            if worker.held is None:
                if not worker.member.pod:  # a mailbox of a deleted pod has no reader
                    self.send(worker, None, run="", site="")
                del self.by_name[name]
        return new

    def _meet(self, member: Member) -> Worker:
        """Return a worker that was found. It may still execute the lease of its last message, so the lease stays."""
        before, now = self._mailboxes.last(member), time.monotonic()
        message = self._mailboxes.write(member, before, lease_s=self._lease_s, revoked=False)
        worker = Worker(member, message, now, away=True, written=now)
        self.by_name[member.name] = worker
        self.hear(worker)
        if worker.heartbeat is not None:
            worker.heard = now  # its age is unknown
            worker.away = worker.is_gone
        return worker

    def hear(self, worker: Worker) -> None:
        """Poll for a new heartbeat."""
        worker.looked = time.monotonic()
        try:
            found = self._mailboxes.heartbeat(worker.member)
        except IntegrityError as error:
            log.debug("%s", error)
            return
        if found is None or worker.seen == (found.worker, found.number) or not self._is_own(worker, found):
            return
        worker.seen = found.worker, found.number
        if found.worker != worker.process:
            if found.worker in worker.former and not worker.away:
                self._report(worker, "two processes have this device's folder")
                return
            if worker.process:
                worker.former.append(worker.process)
            worker.process = found.worker
        worker.heartbeat, worker.heard, worker.away = found, worker.looked, found.state == "gone"
        if found.numerics and found.numerics not in self.numerics:
            self.numerics.add(found.numerics)
            log.warning(
                "%s computes other last bits than the coordinator (%s), so results depend on the worker of a client",
                worker.name,
                found.numerics,
            )
        if worker.held is not None and (found.lease, found.worker) == (worker.held.lease, worker.held.worker):
            worker.held.taken, worker.held.heard = True, worker.looked

    def _is_own(self, worker: Worker, found: Heartbeat) -> bool:
        """Whether the enrolled device has sent the heartbeat. The first device enrolls."""
        member = worker.member
        if member.pod or member.id == found.id:
            return True
        if member.id is not None:
            self._report(worker, "a second device uses the invitation, and gets no assignments")
            return False
        worker.member = member.model_copy(update={"id": found.id})
        self._provisioner.enroll(worker.member)
        return True

    def _report(self, worker: Worker, what: str) -> None:
        """Warn once that a mailbox has two users, except for pods, which Kubernetes may start before the first ends."""
        if worker.doubled or worker.member.pod:
            return
        worker.doubled = True
        cure = f"flexfleet invite --revoke {worker.name}"
        log.warning("%s: %s. If you did not start both, somebody has a copy: run `%s`", worker.name, what, cure)

    def listen(self) -> None:
        """Poll heartbeats: most often of workers with a lease, more and more rarely of workers that are away."""
        self.still_mine()
        now, every = time.monotonic(), self._lease_s / 12

        def interval(w: Worker) -> float:
            if w.held is not None:
                return every
            return pause(now - w.heard, max(AWAY_S, every), min(STARTS_S, every)) if w.away else every * 4

        due = [w for w in self.by_name.values() if now - w.looked >= interval(w)]
        for _ in overlapped(self._mailboxes.home, HEARTBEAT_BYTES, self.hear, due):
            pass
        for w in self.by_name.values():
            if w.held is None and not w.away:
                w.away = self._provisioner.lost(w.name, w.process) is not None
            if w.held is None and now - w.heard > IDLE_S:
                w.away = True

    def renew(self) -> None:
        """Write another message for each that is older than SIGN_S seconds."""
        for worker in self.by_name.values():
            if time.monotonic() - worker.written > SIGN_S and not worker.revoked:
                self.send(worker, worker.message.lease if worker.held else None)

    def dismiss(self) -> None:
        """Write messages that the run is over."""
        names = set(self._provisioner.names())
        for worker in self.by_name.values():
            worker.held = None
            worker.revoked = worker.name not in names
            self.send(worker, None, run="", site="")
