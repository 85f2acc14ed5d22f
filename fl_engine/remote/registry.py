"""The coordinator's interface to the keys and mailboxes of devices and pods. A registry contains these files:

    `<name>.json`: An invited device (`Member`).
    `revoked/<name>`: An empty file, which marks a device as revoked. The device's name is not used again.

A registry contains secret keys, so it must be in a store for which workers get no URLs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError, Refused
from fl_engine.core.records import Record, parsed
from fl_engine.core.types import Device
from fl_engine.data.local_data import assign_clients
from fl_engine.remote import messages
from fl_engine.remote.messages import HEARTBEAT, HEARTBEAT_BYTES, MESSAGE, MESSAGE_BYTES, Heartbeat, Invitation, Message
from fl_engine.remote.settings import URL_S
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from fl_engine.storage.urls import Upload, Verb

REVOKED = "revoked/"
CLIENTS = "site/devices.json"
"""Store key of `DeviceClients` in the run's store."""


class Member(messages.Note):
    """A device or pod with a mailbox."""

    name: messages.Name
    tier: str | None
    """Pool of the worker; None for any pool."""
    invited: messages.Hex
    """Key of the invitation."""
    id: messages.Hex | None = None
    """ID of the enrolled device; None before enrollment."""
    pod: bool = False

    @staticmethod
    def new(name: str, tier: str | None, pod: bool = False) -> Member:
        return Member(name=name, tier=tier, invited=secrets.token_hex(32), pod=pod)

    @property
    def key(self) -> str:
        return self.invited if self.pod or self.id is None else messages.enrolled_key(self.invited, self.id)

    def signed(self, heartbeat: Heartbeat) -> bool:
        """Return whether a device with this invitation signed the heartbeat. The device need not be enrolled."""
        return heartbeat.is_signed_with(self.invited if self.pod else messages.enrolled_key(self.invited, heartbeat.id))


@dataclass(frozen=True)
class Registry:
    store: Store

    def revoked(self) -> set[str]:
        return {key.removeprefix(REVOKED) for key in self.store.list(REVOKED)}

    def names(self) -> list[str]:
        """Return the names of the invited devices."""
        keys = self.store.list("")
        files = {key.removesuffix(".json") for key in keys if "/" not in key and key.endswith(".json")}
        return sorted(files - {key.removeprefix(REVOKED) for key in keys if key.startswith(REVOKED)})

    def member(self, name: str) -> Member:
        """Return a device. Raises IntegrityError if the device is not invited."""
        return parsed(Member, self.store.get(f"{name}.json"), self.store.uri(f"{name}.json"))

    def put(self, member: Member) -> None:
        self.store.put(f"{member.name}.json", member.model_dump_json().encode())

    def revoke(self, name: str) -> Member:
        """Delete a device's key, and return the device. Raises ConfigError if the device is not invited."""
        if name not in (names := self.names()):
            raise ConfigError(f"device {name!r} is not invited. Invited devices: {', '.join(names) or 'none'}")
        member = self.member(name)
        self.store.put(f"{REVOKED}{name}", b"")
        self.store.delete(f"{name}.json")
        return member


@dataclass(frozen=True)
class Mailboxes:
    home: Store
    """Folder with all mailboxes."""
    verb: Verb | None = None
    """HTTP verb for workers' uploads; None if workers access `home` without presigned URLs."""
    endpoint: str | None = None
    """Address at which workers reach the S3 server."""

    def urls(self, name: str) -> tuple[str | None, Upload | None]:
        """Presign the URL of a worker's messages and the heartbeat upload. Return (None, None) if `verb` is None."""
        if self.verb is None or not isinstance(self.home, S3Store):
            return None, None
        heartbeat = self.home.upload(f"{name}/{HEARTBEAT}", HEARTBEAT_BYTES, URL_S, self.verb, self.endpoint)
        return self.home.presign(f"{name}/{MESSAGE}", URL_S, self.endpoint), heartbeat

    def write(self, member: Member, before: Message | None, **changes: Any) -> Message:
        """Write and return the next message, which is a copy of the message `before` with `changes`."""
        made = self._made(member, before, changes)
        self.home.put(f"{member.name}/{MESSAGE}", made.text())
        return made

    def _made(self, member: Member, before: Message | None, changes: dict[str, Any]) -> Message:
        message, heartbeat = self.urls(member.name)
        # Derive the number from the clock, so that it increases even if the last message was lost.
        number = max(int(time.time()), -1 if before is None else before.number + 1)
        enrolled = "" if member.id is None else messages.short(member.id)
        fresh = {"number": number, "enrolled": enrolled, "message": message, "heartbeat": heartbeat}
        return (before or Message(name=member.name, number=0)).model_copy(update=fresh | changes).signed(member.key)

    def last(self, member: Member) -> Message | None:
        """Return the last message; None if no valid message with the coordinator's signature exists."""
        with suppress(IntegrityError):
            value = self.home.get(f"{member.name}/{MESSAGE}", MESSAGE_BYTES)
            return messages.read_message(value, member.key, member.invited)
        return None

    def heartbeat(self, member: Member) -> Heartbeat | None:
        """Return the last heartbeat; None if it cannot be read. Raises IntegrityError if it is not valid."""
        try:
            value = self.home.get(f"{member.name}/{HEARTBEAT}", HEARTBEAT_BYTES)
        except (IntegrityError, Refused):  # the heartbeat is missing, too long or unreadable
            return None
        messages.check_version(value, member.name, by_device=True)
        found = messages.read_heartbeat(value, member.name)
        if not member.signed(found):
            need = "A device that has lost its folder needs another invitation"
            raise IntegrityError(f"the heartbeat of {member.name} must be signed with the worker's key. {need}")
        return found

    def invite(self, registry: Registry, stem: str, tier: str | None) -> Invitation:
        """Invite a device. The name is the first `<stem>-<number>` that no registry with these mailboxes has used."""
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
            folder=None if message else self.home.uri(member.name),
            pod=member.pod,
        )

    def revoke(self, registry: Registry, name: str) -> None:
        """Delete a device's key, and write a message that stops the device's agent."""
        member = registry.revoke(name)
        self.write(member, self.last(member), lease=None, run="", revoked=True)
        self.home.delete(f"{name}/{HEARTBEAT}")


class DeviceClients(Record):
    """The mapping of devices to clients, which is stored only if devices have their own data."""

    clients: dict[str, int]


def clients_of_devices(store: Store, members: Iterable[Member], fleet: Sequence[Device]) -> dict[str, int]:
    """Assign clients to devices (`assign_clients`), and store the mapping for the rest of the run."""
    known = dict[str, int]()
    if CLIENTS in store.list(CLIENTS):
        known = parsed(DeviceClients, store.get(CLIENTS), store.uri(CLIENTS)).clients
    found = assign_clients(known, {member.name: member.tier for member in members}, fleet)
    if found != known:
        store.put(CLIENTS, DeviceClients(clients=found).model_dump_json().encode())
    return found
