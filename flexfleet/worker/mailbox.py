"""A worker's side of its mailbox: its stored state, messages and heartbeats."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import platformdirs
import urllib3
from pydantic import ValidationError

import fl_engine
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError, brief, printable
from fl_engine.core.text import path_of
from fl_engine.remote.messages import (
    HEARTBEAT,
    HEARTBEAT_BYTES,
    MESSAGE,
    MESSAGE_BYTES,
    MOST,
    MOST_S,
    Assignment,
    Heartbeat,
    Hex,
    Invitation,
    Message,
    Name,
    Note,
    State,
    check_own,
    enrolled_key,
    read_message,
    short,
)
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store, sha256
from fl_engine.storage.urls import Upload, UrlStore, patient_pool, why

log = logging.getLogger("flexfleet")

HEARTBEATS = 6
"""Number of heartbeats within the silence after which a worker counts as gone."""
INVITATION_BYTES = 2**16
FILE = "device.json"


class Device(Note):
    """device.json, the state of a device."""

    name: Name
    id: Hex
    invited: Hex
    """The key of its invitation, which identifies the device."""
    message: str | None
    heartbeat: Upload | None
    folder: str | None
    number: int = -1
    """The number of the last message."""
    pod: bool = False
    source: str = ""
    """sha256 of the invitation's file or address. The invitation may be missing at a later start."""

    @staticmethod
    def of(invitation: Invitation, where: str) -> Device:
        shared = {name: getattr(invitation, name) for name in ("name", "message", "heartbeat", "folder", "pod")}
        return Device(id=secrets.token_hex(16), invited=invitation.key, source=sha256(where.encode()), **shared)

    @property
    def key(self) -> str:
        return self.invited if self.pod else enrolled_key(self.invited, self.id)


class WorkerMailbox:
    """Several threads may use it. `process`: this process's id, which remains if the process replaces itself."""

    def __init__(self, place: FolderStore, device: Device, process: str) -> None:
        self.device, self.process = device, process
        self.requests = 0
        self.lease: str | None = None
        """The lease that it executes."""
        self.lease_s = MOST_S * 2
        self.numerics = ""
        """See `Heartbeat.numerics`."""
        self.revoked = False
        self._sign: str | None = None
        self._place, self._lock, self._sending = place, threading.Lock(), threading.Lock()
        self._number = int(time.time() * 1000)  # rises even if a worker is restarted within a second
        self._made: tuple[object, Store] | None = None
        self._store_device({})

    def _store_device(self, changed: Mapping[str, object]) -> None:
        self.device = self.device.model_copy(update=dict(changed))
        self._place.put(FILE, self.device.model_dump_json().encode())

    def forget(self) -> None:
        self._place.delete(FILE)

    def _store(self) -> Store:
        """Return one store, and so one connection, as long as the URLs do not change."""
        device, within_s = self.device, min(10.0, self.lease_s / HEARTBEATS)
        if self._made is None or self._made[0] != (device.message, device.heartbeat, within_s):
            self._made = (device.message, device.heartbeat, within_s), _store_of(device, within_s)
        return self._made[1]

    def read(self) -> Message:
        """Return the current message; its lease is None if it is for another process.

        Raises EnvironmentFailure if the store does not answer, IntegrityError for an invalid message, and ClientError
        if this device was revoked, or if another device uses its invitation.
        """
        with self._lock:
            self.requests, store = self.requests + 1, self._store()
        value = store.get(MESSAGE, MESSAGE_BYTES)
        with self._lock:
            try:
                message = read_message(value, self.device.key, self.device.invited)
            except IntegrityError:
                self._check_enrolled(value)
                raise
            if message.name != self.device.name or message.number < self.device.number:
                raise IntegrityError(f"the message is an older one, or for another device ({message.name})")
            heartbeat = None if message.heartbeat is None else message.heartbeat.url
            try:
                for address in filter(None, (message.message, heartbeat, message.sign)):
                    check_own(address, self.device.message, self.device.folder)
            except ConfigError as error:
                raise IntegrityError(f"the message names another server: {error}") from error
            if message.number != self.device.number:
                urls: dict[str, object] = {"message": message.message, "heartbeat": message.heartbeat}
                self._store_device({"number": message.number, **(urls if self.device.folder is None else {})})
        self.lease_s, self._sign = message.lease_s, message.sign
        self.revoked = message.revoked
        if message.revoked:
            raise ClientError(f"{message.name} was revoked, so it gets no more assignments")
        return message if message.worker == self.process else message.model_copy(update={"lease": None})

    def _check_enrolled(self, value: bytes) -> None:
        """Raise ClientError if the message reports that another device has enrolled. The message is not signed for this
        device, but somebody who can write it could also delete it."""
        try:
            enrolled = Message.model_validate_json(value).enrolled
        except ValidationError:
            return
        if enrolled not in ("", short(self.device.id)):
            raise ClientError(
                f"another device has enrolled as {self.device.name} with the same invitation. Each device needs its "
                "own (`flexfleet invite` on the server)"
            )

    def check_own(self, assignment: Assignment) -> None:
        """Raise ConfigError if the assignment names an address outside of the device's own store."""
        urls = (*assignment.reads.values(), *(upload.url for upload in assignment.writes.values()))
        for address in urls if assignment.store is None else (assignment.store, *urls):
            check_own(address, self.device.message, self.device.folder)

    def sign(self) -> bytes | None:
        """Return the coordinator's lock; None if no message has named it. Raises ConfigError, EnvironmentFailure or
        IntegrityError if it cannot be read."""
        if self._sign is None:
            return None
        with self._lock:
            self.requests += 1
        return _read(self._sign, min(10.0, self.lease_s / HEARTBEATS))

    def beat(self, state: State, error: str = "", over: threading.Event | None = None) -> bool:
        """Send a heartbeat, and return whether it arrived. Nothing is sent if `over` is set. Heartbeats are sent one
        after the other, so that none arrives after a later one."""
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
                    requests=min(self.requests, MOST),
                    version=fl_engine.__version__[:40],
                    at=time.time(),
                ).signed(device.key)
                length = device.heartbeat.size if device.heartbeat and device.heartbeat.verb == "PUT" else 0
                store = self._store()
            try:
                store.put(HEARTBEAT, heartbeat.text(length))
            except (EnvironmentFailure, IntegrityError) as problem:
                log.warning("cannot send the heartbeat: %s", problem)
                return False
        return True

    def failed(self, error: str) -> None:
        """Report that the lease cannot be executed, until the report has arrived or the lease is over."""
        until = time.monotonic() + self.lease_s
        while not self.beat("failed", error) and time.monotonic() < until:
            time.sleep(self.lease_s / HEARTBEATS / 2)


def _store_of(device: Device, within_s: float) -> Store:
    if device.folder is not None:
        return open_store(device.folder)
    writes = {} if device.heartbeat is None else {HEARTBEAT: device.heartbeat}
    return UrlStore({MESSAGE: device.message or ""}, writes, within_s)


def _read(where: str, within_s: float) -> bytes:
    """Return the value at a URL, or at a store's address."""
    if where.startswith(("http://", "https://")):
        return UrlStore({"sign": where}, {}, within_s).get("sign", HEARTBEAT_BYTES)
    place, _, name = where.rpartition("/")
    return open_store(place).get(name, HEARTBEAT_BYTES)


def invitation_of(where: str) -> Invitation:
    """Read an invitation from a file or an https address. Raises ConfigError."""
    if not where.startswith(("http://", "https://")):
        path = Path(where)
        try:
            with open(path, "rb") as file:
                return Invitation.of(file.read(INVITATION_BYTES + 1), where)
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    shown = where.partition("?")[0]
    if where.startswith("http://") and urllib3.util.parse_url(where).host not in ("127.0.0.1", "localhost", "[::1]"):
        raise ConfigError(f"{shown} must be an https address, because an invitation holds a key")
    try:
        with patient_pool() as pool:
            answer = pool.request("GET", where, preload_content=False, redirect=False)
            value = answer.read(INVITATION_BYTES + 1)
            answer.release_conn()
    except urllib3.exceptions.HTTPError as error:
        raise EnvironmentFailure(f"{shown} cannot be reached: {why(error)}") from None
    if answer.status != 200:
        raise ConfigError(f"{shown} must return an invitation, got HTTP {answer.status}")
    return Invitation.of(value, shown)


def stored_device(folder: Path) -> Device | None:
    """Return the device of a folder; None if it has none. Raises IntegrityError if the file is damaged."""
    place = FolderStore(folder)
    try:
        return Device.model_validate_json(place.get(FILE))
    except IntegrityError:
        return None
    except ValidationError as error:
        raise IntegrityError(f"{place.uri(FILE)} is damaged: {brief(error)}. Delete it") from error


def device_of(where: str, folder: Path | None) -> tuple[Device, Path]:
    """Return the device and its folder. After the first start the invitation may be missing. Raises ConfigError or
    EnvironmentFailure if it cannot be read and no folder has its device."""
    try:
        invitation = invitation_of(where)
    except (ConfigError, EnvironmentFailure) as error:
        for each in [folder] if folder is not None else _folders():
            device = stored_device(each)
            if device is not None and device.source == sha256(where.encode()):
                log.info("%s; continuing with the device of %s", error, each)
                return device, each
        raise
    folder = folder or folder_of(invitation.name)
    device, new = stored_device(folder), Device.of(invitation, where)
    if device is None or device.invited != invitation.key:
        return new, folder
    return device.model_copy(update={"source": new.source}), folder


def _folders() -> list[Path]:
    """Return the folders of this user's devices."""
    here = folder_of("-")
    return [here] if os.environ.get("STATE_DIRECTORY") else sorted(p for p in here.parent.glob("*") if p.is_dir())


def folder_of(name: str) -> Path:
    """Return the folder of a device: systemd's STATE_DIRECTORY, or one in the user's state folder."""
    if directory := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return path_of(directory)
    return platformdirs.user_state_path("flexfleet") / name
