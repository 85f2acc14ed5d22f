"""What the coordinator and a worker write to each other, through the object store alone.

    <name>/message.json     written by the coordinator: the lease that the worker holds, if any
    <name>/heartbeat.json   written by the worker: that it lives, and what it does
    <name>/probe            random bytes, with which `flexfleet profile` measures the way to the store

How the two work together:

- A worker makes outgoing requests only, so it needs no open port. It has no credentials of the store: a message holds
  URLs for the assignments of one lease.
- A lease has an id of its own. It ends when the worker is silent for `lease_s`, when its `seconds` have passed, when
  another process has taken the worker's place, or when the message names another lease. Then another worker gets what
  has no result yet, under another id. Results are stored and signed by lease, so a worker that returns late cannot
  replace its successor's result.
- Messages, heartbeats and results are signed with keys that no message holds. A worker's key comes with its invitation;
  `result_key` derives the key of a lease's results from it. So anybody may read a message.
- An invitation is for one device. With its first heartbeat the device enrolls: its key follows from the invitation's
  key and from an id that only the device and the coordinator know (`enrolled_key`). A second device with a copy of the
  invitation has another key, which the coordinator reports.
- Silence is measured on the clock of the side that waits: another number in a heartbeat or message is a sign of life.
  The two clocks are never compared.
- A worker is a stranger. The length of what it sends, its numbers and its texts are bounded, and its claims decide only
  about itself. Whether a result counts is decided as for any client (`exchange.updates`).
- Requests cost money, so both sides look ever more rarely (`pause`): a change is seen after at most a tenth more than
  the time that was waited.
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
"""More than a message holds: URLs take some kB for each assignment."""
HEARTBEAT_BYTES = 2**12
LEAST_S, MOST_S = 0.2, 30.0
"""Seconds between two looks for a message."""
MOST = 10**9
"""The largest count that a worker can claim."""
SITE_FILES = ("run.json", "pool.json", "partition.json", "partition.safetensors")
"""Under `site/` in the run's store: what a client needs besides its assignments and the data."""
OWN_SITE_FILES = ("run.json", "pool.json", FORM)
"""The same for clients with data of their own."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){8,64}$")]
Worker = Annotated[str, Field(pattern=r"^[0-9a-f-]{16,36}$")]
"""A process: the UID of a pod, or random digits."""
HeartbeatUpload = Annotated[Upload, AfterValidator(lambda upload: _no_larger(upload, HEARTBEAT_BYTES))]
"""A heartbeat is filled up to the size that its upload names, which a hostile server must not choose."""
Claim = Annotated[int, Field(ge=0, le=MOST)]
State = Literal["idle", "working", "failed", "gone"]
"""`failed`: it could not execute the lease; `gone`: it ends."""


def _no_larger(upload: Upload, most: int) -> Upload:
    if not 0 < upload.size <= most:
        raise ValueError(f"an upload must have from 1 to {most} bytes, got {upload.size}")
    return upload


def site_files(own: bool) -> tuple[str, ...]:
    """Names of the site's files. `own`: clients have data of their own (partition.rule=local)."""
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
        """The stored bytes; with `length`, exactly so many, as an upload by PUT expects (`urls.Upload`)."""
        return self.model_dump_json().encode().ljust(length)


class Assignment(Note):
    """Which orders of a round a worker executes, and how it reaches them."""

    round: Index
    clients: Annotated[tuple[Index, ...], Field(min_length=1)]
    evaluates: bool = False
    """The orders are those of the round's evaluation."""
    site: dict[str, Sum] = {}
    """Map the name of each file under `site/` to its sum: write access to the store alone changes nothing in them."""
    orders: dict[Index, Sum] = {}
    """Map each client to the sum of its order's file, which names its tensors by their sums."""
    device: str = "cpu"
    """Torch device."""
    observe: Literal["simulated", "cgroup"] = "simulated"
    memory: Peaks | None = None
    """For `cgroup`: bytes that a client takes before it trains, and at the peak of training each level of the pool."""
    failures: Index = 0
    """For `cgroup`: how many workers that held one of the orders alone were killed."""
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The sha256 of the wheel with the run's own code, in the store (`storage.code`)."""
    store: str | None = None
    """The run's store, for workers that reach it themselves; None: by URL."""
    reads: dict[str, str] = {}
    """Map keys of the store to URLs."""
    writes: dict[str, Upload] = {}

    def open(self) -> Store:
        return open_store(self.store) if self.store else UrlStore(self.reads, self.writes)

    @property
    def lengths(self) -> dict[str, int]:
        """Map keys of the store to the only length in bytes at which they can be written; others are left out."""
        return {key: upload.size for key, upload in self.writes.items() if upload.verb == "PUT"}


class Lease(Note):
    id: Hex
    seconds: Annotated[float, Field(gt=0)]
    """How long the assignment may take from when it is read to its last result."""
    assignment: Assignment


class Account(Note):
    """What the coordinator knows of a worker's work."""

    results: int = 0
    """Orders with a result."""
    lost: int = 0
    """Orders whose lease ended without a result."""
    last: str = ""
    """The last order with a result."""
    at: str = ""
    """Time of that result, on the coordinator's clock."""


class Message(Signed):
    name: Name
    number: int = Field(ge=0)
    """Rises with every message to this mailbox."""
    worker: Worker | None = None
    """The process that the message is for; None: none was heard of yet. Other processes do not obey its lease."""
    enrolled: str = Field(default="", max_length=16)
    """The first digits of the sha256 of the enrolled device's id; empty: no device has enrolled yet."""
    run: str = ""
    """The run that the worker works for; empty: none."""
    site: str = ""
    """Equal for messages of one run in one configuration: what was read for one lease serves the next."""
    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of silence after which a lease ends."""
    lease: Lease | None = None
    message: str | None = None
    """URL of the next message; None: in a folder."""
    heartbeat: HeartbeatUpload | None = None
    sign: str | None = None
    """Where the coordinator's own lock is stored, which changes as long as the coordinator lives: a URL, or an address.
    None: only another message is a sign of life."""
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
    """Why it failed."""
    numerics: str = Field(default="", max_length=300)
    """In what this machine's arithmetic differs from the coordinator's in the last bits; empty: in nothing known."""
    requests: Claim = 0
    """Requests to the store since the process started."""
    version: str = Field(default="", max_length=40)
    at: float = Field(default=0.0, ge=0, le=4e9)
    """Unix time on the device's clock."""


class Probe(Note):
    """URLs of `<name>/probe`: the device measures with them how quickly it exchanges files with the store."""

    read: str
    write: Upload


class Invitation(Note):
    name: Name
    key: Hex
    tier: str | None
    """None: takes the orders of clients of any tier."""
    message: str | None = None
    heartbeat: HeartbeatUpload | None = None
    probe: Probe | None = None
    folder: str | None = None
    """Where the mailboxes are, for workers that reach the place themselves; None: at the URLs."""
    pod: bool = False
    """The worker is a pod of the coordinator's cluster: each pod of the mailbox uses the invitation's own key, and
    imports the packages of its image that the run's configuration names."""

    @staticmethod
    def of(value: bytes, where: str) -> Invitation:
        """Raises ConfigError."""
        try:
            found = Invitation.model_validate_json(value)
        except ValidationError as error:
            raise ConfigError(
                f"{where} is not an invitation: {brief(error)}. `flexfleet invite` writes them"
            ) from error
        if found.folder is None and (found.message is None or found.heartbeat is None):
            raise ConfigError(f"{where} must name URLs or a folder. Let `flexfleet invite` write another one")
        probe = () if found.probe is None else (found.probe.read, found.probe.write.url)
        try:  # before the device stores it
            for address in (*probe, *(() if found.heartbeat is None else (found.heartbeat.url,))):
                check_own(address, found.message, found.folder)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return found


def enrolled_key(invited: str, id: str) -> str:
    """Return the key of the device with this id, hexadecimal. `invited`: the invitation's key."""
    return hmac.new(bytes.fromhex(invited), f"enroll {id}".encode(), "sha256").hexdigest()


def result_key(key: str, site: str, lease: str) -> bytes:
    """Return the key that signs the results of a lease. `key`: the worker's. `site` (`Message.site`) is part of it, so
    a result of another configuration does not count."""
    return hmac.digest(bytes.fromhex(key), f"result {site} {lease}".encode(), "sha256")


def short(id: str) -> str:
    """Return `Message.enrolled` for the device with this id."""
    return hashlib.sha256(id.encode()).hexdigest()[:16]


def check_own(address: str, message: str | None, folder: str | None) -> None:
    """Raise ConfigError unless an address is in the device's own store: on the server of `message`, the URL of its
    messages, or in the place that holds `folder`, the folder of its mailbox. A device calls nothing else, whatever its
    coordinator names."""
    if folder is not None:
        own = folder.rsplit("/", 2)[0]
        found, is_own = address, f"{address}/".startswith(f"{own}/") and ".." not in address.split("/")
    else:
        found, own = _server(address), _server(message or "")
        is_own = found == own
    if not is_own:
        raise ConfigError(
            f"{masked(found)} is outside of this device's store, {masked(own)}, so it is not called. If the store has "
            "moved, the device needs another invitation (`flexfleet invite` on the server)"
        )


def _server(address: str) -> str:
    """Scheme, host and port of an address."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise ConfigError(f"not an address ({error}); an http(s) address is expected") from None
    if port is None or not parts.hostname:
        raise ConfigError(f"{masked(address)[:200]!r} is not an http(s) address")
    return f"{parts.scheme}://{parts.hostname}:{port}"


def read_message(value: bytes, key: str, invited: str) -> Message:
    """Return the message. `key` is the device's own. Before the coordinator has read its first heartbeat, a message is
    signed with the `invited` key and holds no lease. Raises IntegrityError if the message is not obeyed."""
    try:
        message = Message.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"not a message: {brief(error)}") from error
    if not message.is_by(key) and not (message.is_by(invited) and message.lease is None):
        raise IntegrityError("the message is not signed with this device's key, so it is not obeyed")
    return message


def read_heartbeat(value: bytes, name: str) -> Heartbeat:
    """Raises IntegrityError unless it is a heartbeat of this mailbox; the signature is not checked here."""
    try:
        heartbeat = Heartbeat.model_validate_json(value)
    except (ValidationError, ValueError) as error:
        text = brief(error) if isinstance(error, ValidationError) else str(error)
        raise IntegrityError(f"{name} left something that is not a heartbeat: {text[:300]}") from error
    if heartbeat.name != name:
        raise IntegrityError(f"{name} left a heartbeat of another mailbox")
    return heartbeat


def pause(waited_s: float, most_s: float = MOST_S, least_s: float = LEAST_S) -> float:
    """Seconds until the next look, after so many of waiting: looks are a tenth apart of what was waited."""
    return min(max(least_s, waited_s / 10), max(most_s, least_s))
