"""The coordinator's side of the mailboxes: it writes messages and reads heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
    """`home`: the folder of all mailboxes. `verb`: how workers upload; None: they reach `home` themselves. `endpoint`:
    the S3 server's address as workers reach it. `lock`: the key in `home` of the coordinator's lock."""

    home: Store
    verb: Verb | None = None
    endpoint: str | None = None
    lock: str | None = None

    def urls(self, name: str) -> tuple[str | None, Upload | None]:
        """(URL of the messages, upload of the heartbeats)."""
        if self.verb is None or not isinstance(self.home, S3Store):
            return None, None
        message = self.home.presign(f"{name}/{MESSAGE}", URL_S, self.endpoint)
        return message, self.home.upload(f"{name}/{HEARTBEAT}", HEARTBEAT_BYTES, URL_S, self.verb, self.endpoint)

    def _sign(self) -> str | None:
        if self.lock is None:
            return None
        if self.verb is None or not isinstance(self.home, S3Store):
            return self.home.uri(self.lock)
        return self.home.presign(self.lock, URL_S, self.endpoint)

    def write(self, member: Member, before: Message | None, **changes: Any) -> Message:
        """Write the next message; what is not in `changes` is as in the one before."""
        made = self._made(member, before, changes)
        self.home.put(f"{member.name}/{MESSAGE}", made.text())
        return made

    def _made(self, member: Member, before: Message | None, changes: dict[str, Any]) -> Message:
        message, heartbeat = self.urls(member.name)
        # By the clock, so that the number also rises if the last message is lost.
        number = max(int(time.time()), -1 if before is None else before.number + 1)
        fresh = {"number": number, "enrolled": member.enrolled, "message": message, "heartbeat": heartbeat}
        fresh |= {"sign": self._sign(), **changes}
        return (before or Message(name=member.name, number=0)).model_copy(update=fresh).signed(member.key)

    def last(self, member: Member) -> Message | None:
        """The last message; None: it is missing, or not ours."""
        try:
            message = Message.model_validate_json(self.home.get(f"{member.name}/{MESSAGE}", MESSAGE_BYTES))
        except (IntegrityError, ValueError):
            return None
        return message if message.is_by(member.key) or message.is_by(member.invited) else None

    def heartbeat(self, member: Member) -> Heartbeat | None:
        """The last heartbeat; None: there is none. Raises IntegrityError if a device has not signed it that has the
        invitation."""
        try:
            value = self.home.get(f"{member.name}/{HEARTBEAT}", HEARTBEAT_BYTES)
        except (IntegrityError, Refused):  # missing, too long, or made unreadable
            return None
        found = read_heartbeat(value, member.name)
        if not member.signed(found):
            raise IntegrityError(f"{member.name} left a heartbeat that is not signed with its key")
        return found

    def invite(self, registry: Registry, stem: str, tier: str | None) -> Invitation:
        taken = set[str]()
        while True:
            member = registry.invite(stem, tier, taken)
            if self.home.create(f"{member.name}/{MESSAGE}", self._made(member, None, {}).text()):
                return self.invitation(member)
            registry.forget(member.name)  # a device of another registry has a mailbox of this name
            taken.add(member.name)

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
        if self.verb is None or not isinstance(self.home, S3Store):
            return None
        write = self.home.upload(key, PROBE_BYTES, URL_S, self.verb, self.endpoint)
        return Probe(read=self.home.presign(key, URL_S, self.endpoint), write=write)

    def revoke(self, registry: Registry, name: str) -> None:
        """The device reads it with its next look, and ends."""
        member = registry.revoke(name)
        self.write(member, self.last(member), lease=None, run="", revoked=True)
        self.home.delete(f"{name}/{HEARTBEAT}", f"{name}/{PROBE}")
