"""The messages between the coordinator and a worker, through the object store alone.

    <name>/message.json     written by the coordinator: the lease that the worker holds, if any
    <name>/heartbeat.json   written by the worker: its state
    <name>/probe            random bytes, with which `flexfleet profile` measures the way to the store

- A worker makes outgoing requests only, so it needs no open port. It has no credentials of the store: a message holds
  URLs for the assignments of one lease.
- A lease has an id. It ends when the worker is silent for `lease_s`, when its `seconds` have passed, when another
  process replaces the worker, or when the message names another lease. Then another worker gets the assignments without
  a result under another id. Results are stored and signed by lease, so a worker that returns late cannot replace its
  successor's result.
- Messages, heartbeats and results are signed with keys that no message holds, so anybody may read a message. A worker's
  key comes with its invitation; `result_key` derives the key of a lease's results from it.
- An invitation is for one device. With its first heartbeat the device enrolls: its key follows from the invitation's
  key and from a secret id (`enrolled_key`). A second device with a copy of the invitation has another key, which the
  coordinator reports.
- Each side measures silence on its own clock: a new number in a heartbeat or message is a sign of life.
- A worker is a stranger. The length of what it sends, its numbers and its texts are bounded, and its claims affect only
  itself. Results are checked as for any client (`exchange.updates`).
- Requests cost money, so both sides poll at intervals of a tenth of the time that they have waited (`pause`).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fl_engine.core.errors import ConfigError, IntegrityError, brief, masked
from fl_engine.core.fields import Index
from fl_engine.data.local_data import FORM
from fl_engine.storage.run_files import Sum
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import Store, canonical
from fl_engine.storage.urls import Upload, UrlStore
from fl_engine.training.memory import Peaks

MESSAGE, HEARTBEAT = "message.json", "heartbeat.json"
MESSAGE_BYTES = 2**22
"""Upper bound of a message; URLs take some kB for each assignment."""
HEARTBEAT_BYTES = 2**12
LEAST_S, MOST_S = 0.2, 30.0
"""Bounds of the seconds between two polls for a message."""
MOST = 10**9
"""The largest count that a worker can claim."""
SITE_FILES = ("run.json", "pool.json", "partition.json", "partition.safetensors")
"""Files under `site/` in the run's store, which a client needs besides its assignments and the data."""
OWN_SITE_FILES = ("run.json", "pool.json", FORM)
"""The same for clients with data of their own."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){8,64}$")]
Worker = Annotated[str, Field(pattern=r"^[0-9a-f-]{16,36}$")]
"""Id of a process: the UID of its pod, or random digits."""
HeartbeatUpload = Annotated[Upload, AfterValidator(lambda upload: _no_larger(upload, HEARTBEAT_BYTES))]
"""A heartbeat is padded to the size of its upload, which a hostile server must not choose."""
Claim = Annotated[int, Field(ge=0, le=MOST)]
State = Literal["idle", "working", "failed", "gone"]
"""`failed`: it could not execute the lease; `gone`: the process ends."""


def _no_larger(upload: Upload, most: int) -> Upload:
    if not 0 < upload.size <= most:
        raise ValueError(f"an upload must have from 1 to {most} bytes, got {upload.size}")
    return upload


def site_files(own: bool) -> tuple[str, ...]:
    """Return the names of the site's files. `own`: clients have data of their own (partition.rule=local)."""
    return OWN_SITE_FILES if own else SITE_FILES


class Note(BaseModel):
    """JSON that both sides exchange, or that one of them stores."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[2] = 2


N = TypeVar("N", bound="Signed")


class Signed(Note):
    signature: str = Field(default="", max_length=64)
    """HMAC-SHA256 of all other fields."""

    def _sum(self, key: str) -> str:
        content = canonical([type(self).__name__, self.model_dump(mode="json", exclude={"signature"})])
        return hmac.new(bytes.fromhex(key), content, "sha256").hexdigest()

    def signed(self: N, key: str) -> N:
        return self.model_copy(update={"signature": self._sum(key)})

    def is_by(self, key: str) -> bool:
        return hmac.compare_digest(self._sum(key).encode(), self.signature.encode())

    def text(self, length: int = 0) -> bytes:
        """Return the stored bytes, padded to `length`, as an upload by PUT expects (`urls.Upload`)."""
        return self.model_dump_json().encode().ljust(length)


class Assignment(Note):
    """Assignments of a round for one worker, and how it reaches their files."""

    round: Index
    clients: Annotated[tuple[Index, ...], Field(min_length=1)]
    evaluates: bool = False
    """The assignments are those of the round's evaluation."""
    site: dict[str, Sum] = {}
    """Map the name of each file under `site/` to its sum, so that write access to the store cannot change them."""
    orders: dict[Index, Sum] = {}
    """Map each client to the sum of its assignment's file, which names its tensors by their sums."""
    device: str = "cpu"
    """Torch device."""
    observe: Literal["simulated", "cgroup"] = "simulated"
    memory: Peaks | None = None
    """For `cgroup`: the memory that training takes."""
    failures: Index = 0
    """For `cgroup`: how many workers were killed while they held only one of these assignments."""
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The sha256 of the wheel with the run's own code, in the store (`storage.code`)."""
    store: str | None = None
    """The run's store, for workers that reach it without URLs."""
    reads: dict[str, str] = {}
    """Map keys of the store to URLs."""
    writes: dict[str, Upload] = {}

    def open(self) -> Store:
        return open_store(self.store) if self.store else UrlStore(self.reads, self.writes)

    @property
    def lengths(self) -> dict[str, int]:
        """Map the keys that are uploaded by PUT to their only valid length in bytes."""
        return {key: upload.size for key, upload in self.writes.items() if upload.verb == "PUT"}


class Lease(Note):
    id: Hex
    seconds: Annotated[float, Field(gt=0)]
    """How long the assignment may take from its reading to its last result."""
    assignment: Assignment


class Account(Note):
    """The coordinator's count of a worker's assignments."""

    results: int = 0
    """Assignments with a result."""
    lost: int = 0
    """Assignments whose lease ended without a result."""
    last: str = ""
    """The last assignment with a result."""


class Message(Signed):
    name: Name
    number: int = Field(ge=0)
    """Rises with every message to this mailbox."""
    worker: Worker | None = None
    """The process that may execute the lease; None: no process has sent a heartbeat yet."""
    enrolled: str = Field(default="", max_length=16)
    """`short` of the enrolled device's id; empty: no device has enrolled yet."""
    run: str = ""
    """The run that the worker works for; empty: none."""
    site: str = ""
    """Identifies run and configuration: the site of one lease serves the next with the same value."""
    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of silence after which a lease ends."""
    lease: Lease | None = None
    message: str | None = None
    """URL of the next message; None: in a folder."""
    heartbeat: HeartbeatUpload | None = None
    sign: str | None = None
    """URL or address of the coordinator's lock, which changes as long as the coordinator lives."""
    account: Account = Account()
    revoked: bool = False


class Heartbeat(Signed):
    name: Name
    id: Hex
    """The device's own id (`enrolled_key`); equal for all processes of a device."""
    worker: Worker
    number: int = Field(ge=0, le=10**15)
    """Rises with every heartbeat of this process."""
    state: State
    lease: Hex | None = None
    """The lease that the worker executes, or could not execute."""
    error: str = Field(default="", max_length=500)
    numerics: str = Field(default="", max_length=300)
    """How this machine's arithmetic differs from the coordinator's in the last bits."""
    requests: Claim = 0
    """Requests to the store since the process started."""
    version: str = Field(default="", max_length=40)
    at: float = Field(default=0.0, ge=0, le=4e9)
    """Unix time on the device's clock."""


class Probe(Note):
    """URLs with which a device measures its transfers to and from the store."""

    read: str
    write: Upload


class Invitation(Note):
    name: Name
    key: Hex
    tier: str | None
    """None: takes assignments of any tier."""
    message: str | None = None
    heartbeat: HeartbeatUpload | None = None
    probe: Probe | None = None
    folder: str | None = None
    """Address of the mailbox, for workers that reach it without URLs."""
    pod: bool = False
    """The worker is a pod of the coordinator's cluster. It uses the invitation's own key, and imports the packages of
    its image that the run's configuration names."""

    @staticmethod
    def of(value: bytes, where: str) -> Invitation:
        """Parse an invitation from the file or address `where`. Raises ConfigError."""
        try:
            found = Invitation.model_validate_json(value)
        except ValidationError as error:
            raise ConfigError(f"{where} must be an invitation of `flexfleet invite`: {brief(error)}") from error
        if found.folder is None and (found.message is None or found.heartbeat is None):
            raise ConfigError(f"{where} must be an invitation with URLs or a folder")
        probe = () if found.probe is None else (found.probe.read, found.probe.write.url)
        for address in (*probe, *(() if found.heartbeat is None else (found.heartbeat.url,))):
            check_own(address, found.message, found.folder)
        return found


def enrolled_key(invited: str, id: str) -> str:
    """Return the hexadecimal key of the device with this id. `invited`: the invitation's key."""
    return hmac.new(bytes.fromhex(invited), f"enroll {id}".encode(), "sha256").hexdigest()


def result_key(key: str, site: str, lease: str) -> bytes:
    """Return the key that signs the results of a lease. It depends on `site` (`Message.site`), so results of another
    configuration do not count. `key`: the worker's key."""
    return hmac.digest(bytes.fromhex(key), f"result {site} {lease}".encode(), "sha256")


def short(id: str) -> str:
    """Return the first digits of the sha256 of a device's id."""
    return hashlib.sha256(id.encode()).hexdigest()[:16]


def check_own(address: str, message: str | None, folder: str | None) -> None:
    """Raise ConfigError unless an address is in the device's own store: on the server of `message` (the URL of its
    messages), or beside `folder` (its mailbox). A device calls no other address, whatever its coordinator sends."""
    if folder is not None:
        own = folder.rsplit("/", 2)[0]
        found, is_own = address, f"{address}/".startswith(f"{own}/") and ".." not in address.split("/")
    else:
        found, own = _server(address), _server(message or "")
        is_own = found == own
    if not is_own:
        raise ConfigError(
            f"{masked(found)} is outside of this device's store {masked(own)}, so it is not called. If the store has "
            "moved, invite the device again"
        )


def _server(address: str) -> str:
    """Return scheme, host and port of an address."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise ConfigError(f"expected an http(s) address: {error}") from None
    if port is None or not parts.hostname:
        raise ConfigError(f"expected an http(s) address, got {masked(address)[:200]!r}")
    return f"{parts.scheme}://{parts.hostname}:{port}"


def read_message(value: bytes, key: str, invited: str) -> Message:
    """Return the message if it is signed with the device's own `key`. Before the coordinator has read its first
    heartbeat, a message is signed with the `invited` key and holds no lease. Raises IntegrityError for others."""
    try:
        message = Message.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"not a message: {brief(error)}") from error
    if not message.is_by(key) and not (message.is_by(invited) and message.lease is None):
        raise IntegrityError("the message is not signed with this device's key")
    return message


def read_heartbeat(value: bytes, name: str) -> Heartbeat:
    """Parse a heartbeat of this mailbox; the signature is not checked. Raises IntegrityError."""
    try:
        heartbeat = Heartbeat.model_validate_json(value)
    except (ValidationError, ValueError) as error:
        text = brief(error) if isinstance(error, ValidationError) else str(error)
        raise IntegrityError(f"{name}/{HEARTBEAT} is not a valid heartbeat: {text[:300]}") from error
    if heartbeat.name != name:
        raise IntegrityError(f"{name}/{HEARTBEAT} is the heartbeat of another mailbox")
    return heartbeat


def pause(waited_s: float, most_s: float = MOST_S, least_s: float = LEAST_S) -> float:
    """Return the seconds until the next poll: a tenth of the time that was waited."""
    return min(max(least_s, waited_s / 10), max(most_s, least_s))
