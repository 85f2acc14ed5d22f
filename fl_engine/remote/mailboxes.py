"""The coordinator's side of the mailboxes: it writes messages and reads heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import Any

from fl_engine.core.errors import IntegrityError, Refused
from fl_engine.remote.messages import (
    HEARTBEAT,
    HEARTBEAT_BYTES,
    MESSAGE,
    MESSAGE_BYTES,
    Heartbeat,
    Invitation,
    Message,
    Probe,
    read_heartbeat,
)
from fl_engine.remote.registry import Member, Registry
from fl_engine.remote.settings import URL_S
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import PROBE, PROBE_BYTES, Store
from fl_engine.storage.urls import Upload, Verb


@dataclass(frozen=True)
class Mailboxes:
    home: Store
    """The folder of all mailboxes."""
    verb: Verb | None = None
    """How workers upload; None: they reach `home` without URLs."""
    endpoint: str | None = None
    """Address of the S3 server as workers reach it."""
    lock: str | None = None
    """The key of the coordinator's lock in `home`."""

    def _read(self, key: str) -> str | None:
        """Return a URL to read a key; None if workers reach `home` without URLs."""
        if self.verb is None or not isinstance(self.home, S3Store):
            return None
        return self.home.presign(key, URL_S, self.endpoint)

    def _write(self, key: str, most: int) -> Upload | None:
        """Return an upload of at most so many bytes; None if workers reach `home` without URLs."""
        if self.verb is None or not isinstance(self.home, S3Store):
            return None
        return self.home.upload(key, most, URL_S, self.verb, self.endpoint)

    def urls(self, name: str) -> tuple[str | None, Upload | None]:
        """Return the URL of a worker's messages, and the upload of its heartbeats."""
        return self._read(f"{name}/{MESSAGE}"), self._write(f"{name}/{HEARTBEAT}", HEARTBEAT_BYTES)

    def write(self, member: Member, before: Message | None, **changes: Any) -> Message:
        """Write the next message: the one before with `changes`."""
        made = self._made(member, before, changes)
        self.home.put(f"{member.name}/{MESSAGE}", made.text())
        return made

    def _made(self, member: Member, before: Message | None, changes: dict[str, Any]) -> Message:
        message, heartbeat = self.urls(member.name)
        # The clock makes the number rise even if the last message is lost.
        number = max(int(time.time()), -1 if before is None else before.number + 1)
        fresh = {"number": number, "enrolled": member.enrolled, "message": message, "heartbeat": heartbeat}
        sign = None if self.lock is None else self._read(self.lock) or self.home.uri(self.lock)
        fresh |= {"sign": sign, **changes}
        return (before or Message(name=member.name, number=0)).model_copy(update=fresh).signed(member.key)

    def last(self, member: Member) -> Message | None:
        """Return the last message; None if it is missing, or not the coordinator's."""
        try:
            message = Message.model_validate_json(self.home.get(f"{member.name}/{MESSAGE}", MESSAGE_BYTES))
        except (IntegrityError, ValueError):
            return None
        return message if message.is_by(member.key) or message.is_by(member.invited) else None

    def heartbeat(self, member: Member) -> Heartbeat | None:
        """Return the last heartbeat; None if it cannot be read. Raises IntegrityError unless a device with the
        invitation has signed it."""
        try:
            value = self.home.get(f"{member.name}/{HEARTBEAT}", HEARTBEAT_BYTES)
        except (IntegrityError, Refused):  # missing, too long, or made unreadable
            return None
        found = read_heartbeat(value, member.name)
        if not member.signed(found):
            raise IntegrityError(f"the heartbeat of {member.name} is not signed with its key")
        return found

    def invite(self, registry: Registry, stem: str, tier: str | None) -> Invitation:
        """Invite a device with the first free name `<stem>-<number>`. Names of other registries with these mailboxes
        are not free either."""
        taken = {*registry.names(), *registry.revoked()}
        members = (Member.new(f"{stem}-{number}", tier) for number in count(1))
        free = (member for member in members if member.name not in taken)
        member = next(m for m in free if self.home.create(f"{m.name}/{MESSAGE}", self._made(m, None, {}).text()))
        registry.put(member)
        return self.invitation(member)

    def invitation(self, member: Member) -> Invitation:
        message, heartbeat = self.urls(member.name)
        return Invitation(
            name=member.name,
            key=member.invited,
            tier=member.tier,
            message=message,
            heartbeat=heartbeat,
            probe=None if member.pod else self._probe(f"{member.name}/{PROBE}"),
            folder=None if message else self.home.uri(member.name),
            pod=member.pod,
        )

    def _probe(self, key: str) -> Probe | None:
        read, write = self._read(key), self._write(key, PROBE_BYTES)
        return None if read is None or write is None else Probe(read=read, write=write)

    def revoke(self, registry: Registry, name: str) -> None:
        """Delete a device's key, and write the message that ends it."""
        member = registry.revoke(name)
        self.write(member, self.last(member), lease=None, run="", revoked=True)
        self.home.delete(f"{name}/{HEARTBEAT}", f"{name}/{PROBE}")
