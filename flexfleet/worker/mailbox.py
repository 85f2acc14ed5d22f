"""A worker's mailbox, which reads messages, sends heartbeats, and stores the state of the device."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError, masked, printable
from fl_engine.core.records import parsed
from fl_engine.core.text import path_of
from fl_engine.remote import messages
from fl_engine.remote.messages import AssignmentMessage, Heartbeat, Hex, Invitation, Message, Name, Note, State
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store
from fl_engine.storage.urls import Upload, UrlStore
from flexfleet.files.owner_limits import Limits

log = logging.getLogger("flexfleet")

HEARTBEATS = 6
"""Heartbeats that a worker sends per lease timeout. A worker is lost if no heartbeat arrives during the timeout."""
INVITATION_BYTES = 2**16
FILE = "device.json"


class WorkerDevice(Note):
    """State of a device, stored in device.json."""

    name: Name
    id: Hex
    invited: Hex
    """Key of the invitation, which identifies the device."""
    message: str | None
    heartbeat: Upload | None
    folder: str | None
    number: int = -1
    """Number of the last message."""
    pod: bool = False

    @property
    def key(self) -> str:
        return self.invited if self.pod else messages.enrolled_key(self.invited, self.id)


class WorkerMailbox:
    """A thread-safe mailbox of a worker. `process` is an ID that does not change if the process replaces itself."""

    def __init__(self, place: FolderStore, device: WorkerDevice, process: str, limits: Limits | None = None) -> None:
        self.device, self.process, self.limits = device, process, limits or Limits()
        self.requests = 0
        self.lease: str | None = None
        """ID of the lease whose assignments the worker executes."""
        self.lease_s = messages.MOST_S * 2
        self.numerics = ""
        """See `Heartbeat.numerics`."""
        self.revoked = False
        self._place, self._lock, self._sending = place, threading.Lock(), threading.Lock()
        self._number = int(time.time() * 1000)  # Use the time, so that the number increases even after a restart.
        self._made: tuple[object, Store] | None = None
        self._store_device({})

    def _store_device(self, changed: Mapping[str, object]) -> None:
        self.device = self.device.model_copy(update=dict(changed))
        self._place.put(FILE, self.device.model_dump_json().encode())

    def forget(self) -> None:
        self._place.delete(FILE)

    def _store(self) -> Store:
        """Return a store for the current URLs. The store and its connection are reused until the URLs change."""
        device, within_s = self.device, min(10.0, self.lease_s / HEARTBEATS)
        known = (device.message, device.heartbeat, within_s)
        if self._made is None or self._made[0] != known:
            writes = {} if device.heartbeat is None else {messages.HEARTBEAT: device.heartbeat}
            urls = {messages.MESSAGE: device.message or ""}
            folder = device.folder
            store = UrlStore(urls, writes, within_s) if folder is None else open_store(folder)
            self._made = known, self.limits.counted(store)
        return self._made[1]

    def read(self) -> Message:
        """Return the current message. If the message is for another process, return the message without its lease.

        Raises EnvironmentFailure if the store does not respond, IntegrityError if the message is invalid, and
        ClientError if this device was revoked or another device uses the invitation.
        """
        with self._lock:
            self.requests, store = self.requests + 1, self._store()
        value = store.get(messages.MESSAGE, messages.MESSAGE_BYTES)
        messages.check_version(value, self.device.name, by_device=False)
        with self._lock:
            try:
                message = messages.read_message(value, self.device.key, self.device.invited)
            except IntegrityError:
                # The signature is not checked, because anyone who can write the message can also delete it.
                enrolled = re.search(rb'"enrolled":"([0-9a-f]{16})"', value)
                if enrolled is not None and enrolled[1].decode() != messages.short(self.device.id):
                    cure = "Use a separate invitation for each device"
                    raise ClientError(f"another device has enrolled as {self.device.name}. {cure}") from None
                raise
            if message.name != self.device.name or message.number < self.device.number:
                raise IntegrityError(f"expected a new message for {self.device.name}, got a message for {message.name}")
            heartbeat = None if message.heartbeat is None else message.heartbeat.url
            try:
                for address in filter(None, (message.message, heartbeat)):
                    messages.check_own(address, self.device.message, self.device.folder)
            except ConfigError as error:
                raise IntegrityError(f"the message contains an address of another server: {error}") from error
            if message.number != self.device.number:
                urls: dict[str, object] = {"message": message.message, "heartbeat": message.heartbeat}
                self._store_device({"number": message.number, **(urls if self.device.folder is None else {})})
        self.lease_s = message.lease_s
        self.revoked = message.revoked
        if message.revoked:
            raise ClientError(f"the invitation of {message.name} was revoked. Request a new invitation")
        return message if message.worker == self.process else message.model_copy(update={"lease": None})

    def check_own(self, assignment: AssignmentMessage) -> None:
        """Raise ConfigError if the assignment contains an address outside the device's own store."""
        urls = (*assignment.reads.values(), *(upload.url for upload in assignment.writes.values()))
        for address in urls if assignment.store is None else (assignment.store, *urls):
            messages.check_own(address, self.device.message, self.device.folder)

    def send_heartbeat(self, state: State, error: str = "", over: threading.Event | None = None) -> bool:
        """Send a heartbeat. Returns True if the heartbeat was stored. If the event `over` is set, no heartbeat is sent.
        Heartbeats are sent one at a time, so that a new heartbeat is never overwritten by an older heartbeat."""
        with self._sending:
            if over is not None and over.is_set():
                return False
            with self._lock:
                device, self._number, self.requests = self.device, self._number + 1, self.requests + 1
                heartbeat = Heartbeat(
                    name=device.name,
                    id=device.id,
                    worker=self.process,
                    number=self._number,
                    state=state,
                    lease=self.lease,
                    error=printable(error)[:500],
                    numerics=self.numerics[:300],
                    requests=min(self.requests, messages.MOST),
                    at=time.time(),
                ).signed(device.key)
                length = device.heartbeat.size if device.heartbeat and device.heartbeat.verb == "PUT" else 0
                store = self._store()
            try:
                store.put(messages.HEARTBEAT, heartbeat.text(length))
            except (EnvironmentFailure, IntegrityError) as problem:
                log.warning("the heartbeat could not be sent: %s", problem)
                return False
        return True

    def failed(self, error: str) -> None:
        """Report the failure of the lease. Retry until the report is stored or the lease has expired."""
        until = time.monotonic() + self.lease_s
        while not self.send_heartbeat("failed", error) and time.monotonic() < until:
            time.sleep(self.lease_s / HEARTBEATS / 2)


def read_invitation(where: str) -> Invitation:
    """Read an invitation from a file or an https address. Redirects are not followed. Raises ConfigError."""
    if "://" not in where:
        try:
            with path_of(where).open("rb") as opened:
                return Invitation.of(opened.read(INVITATION_BYTES + 1), where)
        except OSError as error:
            raise ConfigError(f"--invite: {where} cannot be read: {error.strerror}") from error
    shown = masked(where)
    if not re.match(r"https://|http://(localhost|127\.0\.0\.1)[:/]", where):
        raise ConfigError(f"--invite must be a file or an https address, got {shown}")
    try:
        return Invitation.of(UrlStore({"": where}, {}, 10.0).get("", INVITATION_BYTES), shown)
    except (EnvironmentFailure, IntegrityError) as error:
        raise ConfigError(f"--invite: {shown} cannot be read: {error}") from error


def device_of(where: str, folder: Path | None) -> tuple[WorkerDevice, Path]:
    """Read or create the state of the invited device; return it with the device's folder. Raises ConfigError if the
    invitation is invalid, and IntegrityError if the device's file is damaged."""
    invitation = read_invitation(where)
    folder = folder or folder_of(invitation.name)
    place = FolderStore(folder)
    if FILE in place.list(FILE):
        device = parsed(WorkerDevice, place.get(FILE), place.uri(FILE))
        if device.invited == invitation.key:
            return device, folder
    shared = invitation.model_dump(include={"name", "message", "heartbeat", "folder", "pod"})
    return WorkerDevice(id=secrets.token_hex(16), invited=invitation.key, **shared), folder


def folder_of(name: str) -> Path:
    """Return the folder of a device: systemd's STATE_DIRECTORY, or a folder in the user's state directory."""
    if directory := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return path_of(directory)
    return platformdirs.user_state_path("flexfleet") / name
