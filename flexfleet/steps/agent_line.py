"""What a device that stays knows, and how it reads letters and beats."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import urllib3
from pydantic import ValidationError

import fl_engine
from fl_engine.core.addresses import path_of
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError, brief, printable
from fl_engine.exchange.assignment import Assignment
from fl_engine.exchange.letters import (
    BEAT,
    BEAT_BYTES,
    LETTER,
    LETTER_BYTES,
    MOST,
    MOST_S,
    Beat,
    Hex,
    Invitation,
    Letter,
    Name,
    Note,
    State,
    check_own,
    read_letter,
    safe,
)
from fl_engine.storage.places import open_store
from fl_engine.storage.store import FolderStore, Store, sha256
from fl_engine.storage.urls import Upload, UrlStore, patient_pool, why

log = logging.getLogger("flexfleet")

BEATS = 6
"""How many beats a device sends within the time of silence after which it counts as gone."""
INVITATION_BYTES = 2**16


class Known(Note):
    """agent.json: all that the device remembers."""

    name: Name
    key: Hex
    invited: Hex
    """The key of its invitation: another one makes it another device."""
    generation: int
    letter: str | None
    beat: Upload | None
    folder: str | None
    number: int = -1
    """The number of the last letter."""
    done: str = ""
    """The last loan that it answered, or gave up."""
    begun: str = ""
    """The loan that it was at when something killed it, where it looks at the free memory."""
    orders: int = 0
    plain: bool = False
    told: str = ""
    """sha256 of where the invitation was: it may not be there at a later start."""

    @staticmethod
    def of(invitation: Invitation, where: str) -> Known:
        i = invitation
        return Known(
            name=i.name,
            key=i.key,
            invited=i.key,
            generation=i.generation,
            letter=i.letter,
            beat=i.beat,
            folder=i.folder,
            plain=i.plain,
            told=sha256(where.encode()),
        )


class Line:
    """The device's letters and beats. Several threads may use it."""

    def __init__(self, place: FolderStore, known: Known, device: str | None = None) -> None:
        self.known = known
        self.device = device
        """The torch device that trains, as the owner says; None: the one that orders name."""
        self.requests = 0
        self.loan: str | None = None
        """The order that it works at."""
        self.lease_s = MOST_S * 2
        self._sign: str | None = None
        self._place, self._lock, self._sending = place, threading.Lock(), threading.Lock()
        self._boot, self._beats = secrets.token_hex(8), 0
        self._made: tuple[object, Store] | None = None

    def remember(self, **changed: object) -> None:
        with self._lock:
            self._remember(changed)

    def _remember(self, changed: Mapping[str, object]) -> None:
        self.known = self.known.model_copy(update=dict(changed))
        self._place.put("agent.json", self.known.model_dump_json().encode())

    def forget(self) -> None:
        self._place.delete("agent.json")

    def _store(self) -> Store:
        """One store, and so one connection, as long as the URLs stay."""
        known, within_s = self.known, min(10.0, self.lease_s / BEATS)
        if self._made is None or self._made[0] != (known.letter, known.beat, within_s):
            self._made = (known.letter, known.beat, within_s), _store_of(known, within_s)
        return self._made[1]

    def read(self) -> Letter:
        """The letter that is there now. Raises EnvironmentFailure where the store does not answer, IntegrityError for
        what is not obeyed, ClientError if this device is revoked, or needs another invitation."""
        with self._lock:
            self.requests, store = self.requests + 1, self._store()
        value = store.get(LETTER, LETTER_BYTES)
        with self._lock:
            letter, key = read_letter(value, self.known.key, self.known.generation)
            if letter.name != self.known.name or letter.number < self.known.number:
                raise IntegrityError(f"the letter is an older one, or another device's ({letter.name})")
            beat = None if letter.beat is None else letter.beat.url
            try:
                for address in filter(None, (letter.letter, beat, letter.sign)):
                    check_own(address, self.known.letter, self.known.folder)
            except ConfigError as error:
                raise IntegrityError(f"the letter is not obeyed: {error}") from error
            if letter.number != self.known.number:
                urls = {"letter": letter.letter, "beat": letter.beat} if self.known.folder is None else {}
                self._remember({"number": letter.number, "key": key, "generation": letter.generation, **urls})
        self.lease_s, self._sign = letter.lease_s, letter.sign
        if letter.revoked:
            raise ClientError(f"{letter.name} was revoked: this device takes no orders any more")
        return letter

    def check_own(self, assignment: Assignment) -> None:
        """Raise ConfigError if the assignment names an address outside of the device's own store."""
        urls = (*assignment.reads.values(), *(upload.url for upload in assignment.writes.values()))
        for address in urls if assignment.store is None else (assignment.store, *urls):
            check_own(address, self.known.letter, self.known.folder)

    def sign(self) -> bytes | None:
        """The coordinator's lease as it is now; None: no letter says where it is. Raises ConfigError,
        EnvironmentFailure or IntegrityError where it cannot be read."""
        if self._sign is None:
            return None
        with self._lock:
            self.requests += 1
        return _read(self._sign, min(10.0, self.lease_s / BEATS))

    def beat(self, state: State, said: str = "", over: threading.Event | None = None) -> bool:
        """Tells what the device is at; whether that was sent. Where it was not, the next beat may. Nothing is sent when
        `over` is set. One beat at a time, so that none arrives after a later one."""
        with self._sending:
            if over is not None and over.is_set():
                return False
            with self._lock:
                known, self._beats, self.requests = self.known, self._beats + 1, self.requests + 1
                beat = Beat(
                    name=known.name,
                    boot=self._boot,
                    number=self._beats,
                    generation=known.generation,
                    state=state,
                    loan=self.loan,
                    said=printable(said)[:500],
                    requests=min(self.requests, MOST),
                    version=fl_engine.__version__[:40],
                    at=time.time(),
                ).signed(known.key)
                length = known.beat.size if known.beat is not None and known.beat.verb == "PUT" else 0
                store = self._store()
            try:
                store.put(BEAT, beat.text(length))
            except (EnvironmentFailure, IntegrityError) as error:
                log.warning("no beat: %s", error)
                return False
        return True

    def failed(self, said: str) -> None:
        """Tells that it could not carry out the order; again until that arrives or the lease is over anyhow."""
        until = time.monotonic() + self.lease_s
        while not self.beat("failed", said) and time.monotonic() < until:
            time.sleep(self.lease_s / BEATS / 2)


def _store_of(known: Known, within_s: float) -> Store:
    if known.folder is not None:
        return open_store(known.folder)
    return UrlStore({LETTER: known.letter or ""}, {} if known.beat is None else {BEAT: known.beat}, within_s)


def _read(where: str, within_s: float) -> bytes:
    """The value at a URL, or at a store's address."""
    if where.startswith(("http://", "https://")):
        return UrlStore({"sign": where}, {}, within_s).get("sign", BEAT_BYTES)
    place, _, name = where.rpartition("/")
    return open_store(place).get(name, BEAT_BYTES)


def invitation_of(where: str) -> Invitation:
    """From a file, or from an https address. Raises ConfigError."""
    if not where.startswith(("http://", "https://")):
        path = Path(where)
        try:
            with open(path, "rb") as file:
                return Invitation.of(file.read(INVITATION_BYTES + 1), where)
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    shown = where.partition("?")[0]
    try:
        with patient_pool() as pool:
            answer = pool.request("GET", safe(where), preload_content=False, redirect=False)
            value = answer.read(INVITATION_BYTES + 1)
            answer.release_conn()
    except urllib3.exceptions.HTTPError as error:
        raise EnvironmentFailure(f"{shown} cannot be reached: {why(error)}") from None
    if answer.status != 200:
        raise ConfigError(f"{shown} answers with HTTP {answer.status}: an invitation is expected")
    return Invitation.of(value, shown)


def remembered(folder: Path) -> Known | None:
    """What the device in this folder knows; None: there is none. Raises IntegrityError where it cannot be read."""
    place = FolderStore(folder)
    try:
        return Known.model_validate_json(place.get("agent.json"))
    except IntegrityError:
        return None
    except ValidationError as error:
        raise IntegrityError(f"{place.uri('agent.json')} is damaged ({brief(error)}): delete it") from error


def known_of(where: str, folder: Path | None) -> tuple[Known, Path]:
    """What the device knows, and the folder where it remembers that. Once an invitation was read it may be gone. Raises
    ConfigError and EnvironmentFailure where it cannot be read and no folder remembers it."""
    try:
        invitation = invitation_of(where)
    except (ConfigError, EnvironmentFailure) as error:
        for each in [folder] if folder is not None else _folders():
            known = remembered(each)
            if known is not None and known.told == sha256(where.encode()):
                log.info("%s; going on with what %s remembers of it", error, each)
                return known, each
        raise
    folder = folder or folder_of(invitation.name)
    known, new = remembered(folder), Known.of(invitation, where)
    if known is None or known.invited != invitation.key:
        return new, folder
    return known.model_copy(update={"told": new.told}), folder


def _folders() -> list[Path]:
    """Where devices of this user may remember."""
    here = folder_of("-")
    return [here] if os.environ.get("STATE_DIRECTORY") else sorted(p for p in here.parent.glob("*") if p.is_dir())


def folder_of(name: str) -> Path:
    """Where a device remembers: systemd says it, else a folder of the user. Raises ConfigError for a user without a
    home folder."""
    if told := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return path_of(told)
    if base := os.environ.get("XDG_STATE_HOME"):
        return path_of(base) / "flexfleet" / name
    try:
        return Path.home() / ".local" / "state" / "flexfleet" / name
    except RuntimeError as error:
        raise ConfigError("this user has no home folder: name where the device remembers by --folder") from error
