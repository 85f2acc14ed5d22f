"""Poll the workers' heartbeats, and record the state of each worker and its lease."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_engine.core.errors import IntegrityError, printable
from fl_engine.remote.messages import MESSAGE_BYTES, Heartbeat, Lease, Message, pause
from fl_engine.remote.provisioner import Provisioner
from fl_engine.remote.registry import Member
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.run_lock import HEARTBEAT_S

log = logging.getLogger("flexfleet")

T = TypeVar("T")
R = TypeVar("R")

REFRESH_S = 2.0
"""Minimum seconds between two searches for newly invited devices."""
STARTS_S = 0.5
"""Minimum seconds between two polls for the first heartbeat of a worker."""
AWAY_S = 60.0
"""Maximum seconds between two polls for an absent worker's heartbeat."""
IDLE_S = 1500.0
"""Seconds without a heartbeat after which an idle worker is absent. Idle workers send a heartbeat every ten minutes."""
SIGN_S = 600.0
"""Seconds after which the coordinator sends a worker another message with new URLs."""


@dataclass
class Held:
    """The lease that a worker holds."""

    lease: str
    worker: str
    """ID of the process that may execute the lease."""
    clients: list[int]
    """Clients of the lease that do not have a result yet."""
    alone: bool
    """True if the lease has a single client."""
    since: float
    """Time at which the message with the lease was written (`time.monotonic`)."""
    heartbeat_at: float
    """Arrival time of the last heartbeat for this lease; equal to `since` until the first heartbeat."""
    taken: bool = False
    """True if a heartbeat for this lease has arrived."""


@dataclass
class Worker:
    """The state of a mailbox and of the process that uses the mailbox."""

    member: Member
    message: Message
    """Last message to the worker."""
    heartbeat_at: float
    """Time of the last new heartbeat; time of the first poll if no new heartbeat has arrived."""
    heartbeat: Heartbeat | None = None
    process: str = ""
    """ID of the process that sends heartbeats; empty if no heartbeat has arrived yet."""
    away: bool = False
    """True if the worker is absent. The next new heartbeat sets the field to False."""
    revoked: bool = False
    rests_until: float = 0.0
    """Time before which the worker gets no assignment, because the previous lease failed or was not started."""
    failures: int = 0
    """Number of consecutive failures."""
    why: str = ""
    """Error message of the last failed assignment; empty if a later assignment has a result."""
    held: Held | None = None
    former: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    invalid: bool = False
    """True if a warning about an invalid heartbeat has been logged."""
    second_reported: bool = False
    seen: tuple[str, int] | None = None
    """Process id and number of the last valid heartbeat."""
    polled_at: float = -math.inf
    written_at: float = -math.inf
    """Time of the last message to the worker; -inf if the message is outdated, so that `Workers.renew` replaces it."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended, or its owner's limits allow no assignments."""
        return self.heartbeat is not None and self.heartbeat.state in ("gone", "paused")

    def count(self, **account: Any) -> None:
        """Update the worker's counters, which the next message contains."""
        changed = self.message.account.model_copy(update=account)
        self.message = self.message.model_copy(update={"account": changed})


class Workers:
    """All workers of a run. The function `check` raises Replaced if another coordinator uses the mailboxes."""

    def __init__(self, provisioner: Provisioner, check: Callable[[], None]) -> None:
        self._provisioner, self._mailboxes, self._lease_s = provisioner, provisioner.mailboxes, provisioner.lease_s
        self._check, self._checked = check, -HEARTBEAT_S
        self._refreshed = -math.inf
        self.by_name: dict[str, Worker] = {}
        self.numerics: set[str] = set()
        """Descriptions of numerical differences between workers and the coordinator."""

    @property
    def present(self) -> list[Worker]:
        return [worker for worker in self.by_name.values() if not worker.away and not worker.revoked]

    def check_lock(self) -> None:
        """Raise Replaced if another coordinator uses the mailboxes. Check at most every HEARTBEAT_S seconds."""
        if time.monotonic() - self._checked >= HEARTBEAT_S:
            self._check()
            self._checked = time.monotonic()

    def send(self, worker: Worker, lease: Lease | None, **changes: Any) -> None:
        """Write a message to the worker."""
        self.check_lock()
        given = {"worker": worker.process or None, "lease_s": self._lease_s, "revoked": worker.revoked, "lease": lease}
        worker.message = self._mailboxes.write(worker.member, worker.message, **given | changes)
        worker.written_at = time.monotonic()

    def refresh(self, at_once: bool = False) -> list[Worker]:
        """Add new workers, remove revoked workers, and return the new workers. `at_once` overrides the interval."""
        # The names of enrolled devices are stored in the registry, so each refresh costs requests.
        every = min(REFRESH_S, self._lease_s / 12) if self._provisioner.strangers else 0.0
        if not at_once and time.monotonic() - self._refreshed < every:
            return []
        self._refreshed = time.monotonic()
        names = set(self._provisioner.names())
        new = [w for w in self.overlapped(self._found, sorted(names - self.by_name.keys())) if w is not None]
        self.by_name |= {worker.name: worker for worker in new}
        self.poll(new)
        for name in self.by_name.keys() - names:
            worker = self.by_name[name]
            worker.revoked = True
            if worker.held is None:
                if not worker.member.pod:  # a deleted pod no longer reads its mailbox
                    self.send(worker, None, run="", site="")
                del self.by_name[name]
        return new

    def overlapped(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield `work(item)` for each item, in order. `work` sends small requests about different workers."""
        self.check_lock()
        return overlapped(self._mailboxes.home, MESSAGE_BYTES // 4, work, items)

    def _found(self, name: str) -> Worker | None:
        """Return a new worker; None if it was revoked in the meantime. Its first message will be due at once."""
        try:
            member = self._provisioner.member(name)
        except (IntegrityError, KeyError):
            return None
        is_new = member.id is None and not member.pod  # the messages to a new device contain no lease
        last = None if is_new else self._mailboxes.last(member)
        return Worker(member, last or Message(name=name, number=0), time.monotonic(), away=True)

    def poll(self, workers: Sequence[Worker]) -> None:
        for worker, found in zip(workers, self.overlapped(self._heartbeat, workers), strict=True):
            self._receive(worker, found)

    def _heartbeat(self, worker: Worker) -> Heartbeat | None:
        """Return the worker's last heartbeat; None if it cannot be read. Enroll the first device."""
        worker.polled_at = time.monotonic()
        try:
            found = self._mailboxes.heartbeat(worker.member)
        except IntegrityError as error:
            log.log(logging.DEBUG if worker.invalid else logging.WARNING, "%s", error)
            worker.invalid = True
            return None
        if found is not None and worker.member.id is None and not worker.member.pod:
            worker.member = worker.member.model_copy(update={"id": found.id})
            self._provisioner.enroll(worker.member)
        return found

    def _receive(self, worker: Worker, found: Heartbeat | None) -> None:
        """Update the worker's state if the heartbeat is new."""
        if found is None or worker.seen == (found.worker, found.number):
            return
        if not worker.member.pod and worker.member.id != found.id:
            self._report_second(worker, "a second device uses the same invitation and does not get assignments")
            return
        worker.seen = found.worker, found.number
        if found.worker != worker.process:
            if found.worker in worker.former and not worker.away:
                self._report_second(worker, "two processes use this device's folder")
                return
            worker.former.append(worker.process)
            worker.process = found.worker
        if found.state == "paused" and not worker.is_gone:
            log.info("%s accepts no assignments now: %s", worker.name, printable(found.error))
        worker.heartbeat, worker.heartbeat_at = found, worker.polled_at
        worker.away = worker.is_gone
        if found.numerics and found.numerics not in self.numerics:
            self.numerics.add(found.numerics)
            text = "%s differs numerically from the coordinator (%s), so results depend on the choice of worker"
            log.warning(text, worker.name, found.numerics)
        if worker.held is not None and (found.lease, found.worker) == (worker.held.lease, worker.held.worker):
            worker.held.taken, worker.held.heartbeat_at = True, worker.polled_at

    def _report_second(self, worker: Worker, what: str) -> None:
        """Warn once that a mailbox has two users. Ignore pods, because Kubernetes may replace a pod before it ends."""
        if worker.second_reported or worker.member.pod:
            return
        worker.second_reported = True
        cure = "If you did not start both, somebody has a copy of the invitation or the folder. Revoke the invitation"
        log.warning("%s: %s. %s: flexfleet invite --revoke %s", worker.name, what, cure, worker.name)

    def poll_due(self) -> None:
        """Poll all heartbeats that are due. Poll workers with a lease most often, and absent workers least often."""
        now, every = time.monotonic(), self._lease_s / 12

        def interval(w: Worker) -> float:
            if w.held is not None:
                return every
            return pause(now - w.heartbeat_at, max(AWAY_S, every), min(STARTS_S, every)) if w.away else every * 4

        self.poll([w for w in self.by_name.values() if now - w.polled_at >= interval(w)])
        for w in self.by_name.values():
            if w.held is None and not w.away:
                w.away = now - w.heartbeat_at > IDLE_S or self._provisioner.lost(w.name, w.process) is not None

    def renew(self) -> None:
        """Write a new message to each worker if its last message is older than SIGN_S seconds, or is outdated."""
        due = [w for w in self.by_name.values() if time.monotonic() - w.written_at > SIGN_S and not w.revoked]
        list(self.overlapped(lambda w: self.send(w, w.message.lease if w.held else None), due))

    def dismiss(self) -> None:
        """Write a final message to each worker, because the run is over."""
        names = set(self._provisioner.names())
        for worker in self.by_name.values():
            worker.held, worker.revoked = None, worker.name not in names
        list(self.overlapped(lambda w: self.send(w, None, run="", site=""), self.by_name.values()))
