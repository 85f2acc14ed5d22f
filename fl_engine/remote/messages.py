"""The messages between the coordinator and a worker, which are files in the object store.

    `<name>/message.json`: The coordinator's message, which contains the worker's lease or None.
    `<name>/heartbeat.json`: The worker's last heartbeat, which contains the worker's state.

A worker sends only outgoing requests, so the device needs no open port. Instead of credentials for the store, a worker
gets URLs for the files of one lease. A lease ends if the worker sends no heartbeat for `lease_s` seconds, or if the
lease's `seconds` have passed. A lease also ends if another process replaces the worker, or if a new message contains
another lease. The coordinator then leases assignments without a result to another worker, with another lease id.
Results are stored and signed per lease, so a late worker cannot replace another worker's result.

Messages, heartbeats and results are signed with keys that no message contains, so messages need not be secret. An
invitation is for one device, which enrolls with its first heartbeat. The device's key is derived from the invitation's
key and a secret id (`enrolled_key`). A second device with the same invitation derives another key, and the coordinator
reports this device.

Coordinator and worker measure timeouts on their own clocks. A heartbeat or message is new if its number has changed.
The coordinator does not trust workers, so it limits the lengths, numbers and strings in a heartbeat. Requests cost
money, so the polling interval is a tenth of the time waited so far (`pause`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from contextlib import suppress
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError

import fl_engine
from fl_engine.core.errors import ConfigError, IntegrityError, brief, masked, printable
from fl_engine.core.fields import Index
from fl_engine.core.records import Strict, parsed
from fl_engine.data.local_data import FORM
from fl_engine.storage.run_files import Sum
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import Store, canonical
from fl_engine.storage.urls import Upload, UrlStore
from fl_engine.training.memory import Peaks

MESSAGE, HEARTBEAT = "message.json", "heartbeat.json"
MESSAGE_BYTES = 2**22
"""Maximum size of a message in bytes. The URLs take a few kB per assignment."""
HEARTBEAT_BYTES = 2**12
LEAST_S, MOST_S = 0.2, 30.0
"""Minimum and maximum seconds between two polls for a message."""
MOST = 10**9
"""Maximum value of `Heartbeat.requests`."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){8,64}$")]
Worker = Annotated[str, Field(pattern=r"^[0-9a-f-]{16,36}$")]
"""ID of a process, which is the UID of its pod or a random number."""
State = Literal["idle", "working", "failed", "paused", "gone"]
"""State of a worker. `failed`: the worker could not execute the assignments. `paused`: the limits of the device's owner
allow no assignments now. `gone`: the process is ending."""


def _is_small(upload: Upload) -> Upload:
    if not 0 < upload.size <= HEARTBEAT_BYTES:
        raise ValueError(f"the size of a heartbeat must be from 1 to {HEARTBEAT_BYTES} bytes, got {upload.size}")
    return upload


HeartbeatUpload = Annotated[Upload, AfterValidator(_is_small)]
"""Permission to upload heartbeats, padded to `Upload.size` bytes. The limit protects devices from a hostile server."""


def site_files(own: bool) -> tuple[str, ...]:
    """Return the names of the files under `site/` that clients need. `own` is True if devices have their own data."""
    return ("run.json", "pool.json", *((FORM,) if own else ("partition.json", "partition.safetensors")))


class Note(Strict):
    """Base class for JSON that the coordinator and the workers exchange or store."""

    schema_version: Literal[2] = 2


N = TypeVar("N", bound="Signed")


class Signed(Note):
    version: str = Field(default=fl_engine.__version__, max_length=40)
    """Version of flexfleet that wrote the JSON."""
    signature: str = Field(default="", max_length=64)
    """HMAC-SHA256 of all other fields."""

    def _signature(self, key: str) -> str:
        content = canonical([type(self).__name__, self.model_dump(mode="json", exclude={"signature"})])
        return hmac.new(bytes.fromhex(key), content, "sha256").hexdigest()

    def signed(self: N, key: str) -> N:
        return self.model_copy(update={"signature": self._signature(key)})

    def is_signed_with(self, key: str) -> bool:
        return hmac.compare_digest(self._signature(key).encode(), self.signature.encode())

    def text(self, length: int = 0) -> bytes:
        """Return the JSON, padded with spaces to the `length` in bytes that a PUT upload requires (`urls.Upload`)."""
        return self.model_dump_json().encode().ljust(length)


class AssignmentMessage(Note):
    """Assignments of a round for one worker, and the URLs or the store address of their files."""

    round: Index
    clients: Annotated[tuple[Index, ...], Field(min_length=1)]
    evaluates: bool = False
    """True if the assignments belong to the round's evaluation."""
    site: dict[str, Sum] = Field(default={})
    """Map the name of each file under `site/` to its checksum, so that workers detect a changed file."""
    assignments: dict[Index, Sum] = Field(default={})
    """Map each client to the checksum of its assignment file, which contains the checksums of the tensor files."""
    device: str = "cpu"
    observe: Literal["simulated", "cgroup"] = "simulated"
    memory: Peaks | None = None
    """Memory that training requires; used only if `observe` is `cgroup`."""
    failures: Index = 0
    """Number of workers that were killed while executing one of these assignments alone, for `observe=cgroup`."""
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the wheel with the user's code in the store (`storage.code`)."""
    store: str | None = None
    """Address of the run's store, for workers that do not use presigned URLs."""
    reads: dict[str, str] = Field(default={})
    writes: dict[str, Upload] = Field(default={})

    def open(self) -> Store:
        return open_store(self.store) if self.store else UrlStore(self.reads, self.writes)

    @property
    def lengths(self) -> dict[str, int]:
        """Map the store key of each upload by PUT to the upload's required length in bytes."""
        return {key: upload.size for key, upload in self.writes.items() if upload.verb == "PUT"}


class Lease(Note):
    id: Hex
    seconds: Annotated[float, Field(gt=0)]
    """Maximum seconds from the start of the lease to its last result."""
    assignment: AssignmentMessage


class Account(Note):
    """The coordinator's counters for a worker."""

    results: int = 0
    lost: int = 0
    last: str = ""
    """Description of the last assignment with a result."""


class Message(Signed):
    name: Name
    number: int = Field(ge=0)
    """Sequence number, which increases with every message to this mailbox."""
    worker: Worker | None = None
    """ID of the process that may execute the lease; None if no process has sent a heartbeat yet."""
    enrolled: str = Field(default="", max_length=16)
    """Hash of the enrolled device's id (`short`); empty if no device has enrolled yet."""
    run: str = ""
    """Name of the worker's run; empty if the worker has no run."""
    site: str = ""
    """Hash of the files under `site/`. A worker reuses the files in memory if the hash has not changed."""
    lease_s: Annotated[float, Field(gt=0)] = 60.0
    lease: Lease | None = None
    message: str | None = None
    """URL of the next message; None if the mailbox is a folder."""
    heartbeat: HeartbeatUpload | None = None
    account: Account = Account()
    revoked: bool = False


class Heartbeat(Signed):
    name: Name
    id: Hex
    """ID of the device (`enrolled_key`), which is the same for all processes on the device."""
    worker: Worker
    number: int = Field(ge=0, le=10**15)
    """Sequence number, which increases with every heartbeat from this process."""
    state: State
    lease: Hex | None = None
    """ID of the worker's current lease, or of the lease that failed."""
    error: str = Field(default="", max_length=500)
    """Reason for the states `failed` and `paused`."""
    numerics: str = Field(default="", max_length=300)
    """Description of numerical differences between this machine and the coordinator."""
    requests: int = Field(default=0, ge=0, le=MOST)
    """Number of requests to the store since the process started."""
    at: float = Field(default=0.0, ge=0, le=4e9)
    """Unix time of the heartbeat on the device's clock."""


class Invitation(Note):
    name: Name
    key: Hex
    tier: str | None
    """Tier of the assignments that the worker executes; None for any tier."""
    message: str | None = None
    heartbeat: HeartbeatUpload | None = None
    folder: str | None = None
    """Address of the mailbox, for workers that do not use presigned URLs."""
    pod: bool = False
    """True for a pod in the coordinator's cluster, which uses the invitation's key and imports configured packages."""

    @staticmethod
    def of(value: bytes, where: str) -> Invitation:
        """Parse an invitation that was read from the file or address `where`. Raises ConfigError if it is invalid."""
        try:
            found = Invitation.model_validate_json(value)
        except ValidationError as error:
            raise ConfigError(f"{where} is not an invitation from `flexfleet invite`: {brief(error)}") from error
        if found.folder is None and (found.message is None or found.heartbeat is None):
            raise ConfigError(f"the invitation {where} must contain URLs or a folder. Create it again")
        if found.heartbeat is not None:
            check_own(found.heartbeat.url, found.message, found.folder)
        return found


def enrolled_key(invited: str, id: str) -> str:
    """Return the hexadecimal key of the device with this id. `invited` is the invitation's key."""
    return hmac.new(bytes.fromhex(invited), f"enroll {id}".encode(), "sha256").hexdigest()


def result_key(key: str, site: str, lease: str) -> bytes:
    """Return the key that signs the results of a lease. The key depends on the hash `site` (`Message.site`), so results
    from another configuration are rejected. `key` is the worker's key."""
    return hmac.digest(bytes.fromhex(key), f"result {site} {lease}".encode(), "sha256")


def short(id: str) -> str:
    """Return the first 16 digits of the SHA-256 of a device's id."""
    return hashlib.sha256(id.encode()).hexdigest()[:16]


def check_own(address: str, message: str | None, folder: str | None) -> None:
    """Raise ConfigError if an address is outside of the device's own store. The address must be on the same server as
    `message` (the URL of the device's messages), or in the store that contains `folder` (the device's mailbox). A
    device sends no requests to other addresses, even if the coordinator's message contains them."""
    if folder is not None:
        own = folder.rsplit("/", 2)[0]
        found, is_own = address, f"{address}/".startswith(f"{own}/") and ".." not in address.split("/")
    else:
        found, own = _server(address), _server(message or "")
        is_own = found == own
    if not is_own:
        raise ConfigError(f"{masked(found)} is outside of this device's store {masked(own)}. Invite the device again")


def _server(address: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        if port is not None and parts.hostname:
            return f"{parts.scheme}://{parts.hostname}:{port}"
    raise ConfigError(f"the address must be http(s)://host:port, got {masked(address)[:200]!r}")


def check_version(value: bytes, name: str, by_device: bool) -> None:
    """Raise IntegrityError if another version of flexfleet wrote the message or heartbeat of the worker `name`."""
    found, own = re.search(rb'"version":"([0-9A-Za-z.+-]{1,40})"', value), fl_engine.__version__
    if found is not None and (other := found[1].decode()) != own:
        worker, coordinator = (other, own) if by_device else (own, other)
        raise IntegrityError(
            f"{name} has flexfleet {worker}, its coordinator has flexfleet {coordinator}. Install {coordinator} on the "
            "device: pip install -c constraints.txt '.[engine]'. For pods, change kubernetes.image"
        )


def read_message(value: bytes, key: str, invited: str) -> Message:
    """Parse a message, and check its signature with the device's `key`. Until the coordinator has read the first
    heartbeat, messages are signed with `invited` and must have no lease. Raises IntegrityError if a check fails."""
    message = parsed(Message, value, MESSAGE)
    if not message.is_signed_with(key) and not (message.is_signed_with(invited) and message.lease is None):
        raise IntegrityError("the message is not signed with this device's key")
    return message


def read_heartbeat(value: bytes, name: str) -> Heartbeat:
    """Parse a heartbeat without checking its signature. Raises IntegrityError if the heartbeat is not valid."""
    try:
        heartbeat = Heartbeat.model_validate_json(value)
    except ValueError as error:
        raise IntegrityError(f"{name}/{HEARTBEAT} is not a valid heartbeat: {printable(str(error))[:300]}") from error
    if heartbeat.name != name:
        raise IntegrityError(f"{name}/{HEARTBEAT} must be a heartbeat of {name}, got {heartbeat.name}")
    return heartbeat


def pause(waited_s: float, most_s: float = MOST_S, least_s: float = LEAST_S) -> float:
    """Return the seconds until the next poll. The pause is a tenth of the time waited so far, clipped to the bounds."""
    return min(max(least_s, waited_s / 10), max(most_s, least_s))
