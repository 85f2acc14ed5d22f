"""What a device that stays (an agent) and its coordinator write to each other, through the object store alone.

    <name>/letter.json    to the agent: the orders that it holds now, if any; the coordinator alone writes it
    <name>/beat.json      from the agent: that it lives, and what it is at; it can write this key, its answers, and
    <name>/probe          bytes that mean nothing, with which `flexfleet profile` measures the way to the store

How the two work together:

- The agent asks, nobody calls it: it makes outgoing requests only, and needs no open port. A letter holds a `Loan` at
  a time: an `Assignment` of one order, or of several where the agent has the room, with URLs that are good for these
  orders alone; the agent has no credentials of the store.
- Orders are lent, not given: a loan has an id of its own. It ends when the agent is silent for `lease_s`, when the
  orders have taken `seconds`, or when the letter names another one; then other agents get what is not answered, under
  other ids. What signs an answer (`lease_key`) and the place that it goes to (`Leased`) belong to the id and the order,
  so that an agent which comes back late cannot replace the answer of its successor, nor one order's answer another's.
  One order of several may be taken back while the agent goes on with the others: what it answers is not looked at.
- Silence is measured on the clock of who waits: a beat, or a letter, with another number is a sign of life. No two
  clocks are compared.
- Both are signed with the device's key. The coordinator changes the key whenever it starts and the device has the one
  before: a letter says a nonce from which, with the old key, the new one follows. So a copy of an old key is worth
  nothing without all the letters since. Each letter has new URLs, which a store signs for seven days at most.
- All that an agent says is a stranger's: its length, its numbers and its texts are bounded, and its claims decide only
  about itself: who gets an order next. Whether an answer counts is decided as for any client (`exchange.updates`).
- Requests cost money, so who waits looks ever more rarely (`pause`): what comes is seen after at most a tenth more than
  the time that was waited, and an hour without orders takes about 170 looks, each further one 120.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fl_engine.core.errors import ClientError, ConfigError, IntegrityError, brief, masked
from fl_engine.exchange.assignment import Assignment
from fl_engine.storage.pieces import Value
from fl_engine.storage.store import Store, canonical
from fl_engine.storage.urls import Upload

LETTER, BEAT = "letter.json", "beat.json"
LETTER_BYTES = 2**22
"""More than a letter holds: URLs take some kB for each order, up to 20 where credentials have a session's token."""
BEAT_BYTES = 2**12
LEAST_S, MOST_S = 0.2, 30.0
"""Seconds between two looks for a letter."""
LOCAL = ("127.0.0.1", "::1", "localhost")
"""Hosts that may be called without TLS."""
MOST = 10**9
"""The largest count that a device can claim."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){8,64}$")]
BeatUpload = Annotated[Upload, AfterValidator(lambda upload: _no_larger(upload, BEAT_BYTES))]
"""A beat is filled up to the size that its upload names, which a hostile server must not choose."""
Claim = Annotated[int, Field(ge=0, le=MOST)]


def _no_larger(upload: Upload, most: int) -> Upload:
    if not 0 < upload.size <= most:
        raise ValueError(f"an upload of {upload.size} bytes, from 1 to {most} are expected")
    return upload


class Note(BaseModel):
    """JSON that two sides exchange, or that one of them keeps."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1


N = TypeVar("N", bound="Signed")


class Signed(Note):
    generation: Claim = 0
    """Which of the device's keys signs it: each new key has the next number."""
    signature: str = Field(default="", max_length=64)
    """HMAC-SHA256 of all the rest."""

    def _sum(self, key: str) -> str:
        said = canonical([type(self).__name__, self.model_dump(mode="json", exclude={"signature"})])
        return hmac.new(bytes.fromhex(key), said, "sha256").hexdigest()

    def signed(self: N, key: str) -> N:
        return self.model_copy(update={"signature": self._sum(key)})

    def is_by(self, key: str) -> bool:
        return hmac.compare_digest(self._sum(key).encode(), self.signature.encode())

    def text(self, length: int = 0) -> bytes:
        """What is written to the store; with `length`, exactly so many bytes, as `urls.Upload` by PUT asks for."""
        return self.model_dump_json().encode().ljust(length)


class Account(Note):
    """What the coordinator knows of a device's work."""

    answers: int = 0
    """Orders that it has answered."""
    lost: int = 0
    """Leases that ended without an answer."""
    last: str = ""
    """The last order that it answered."""
    at: str = ""
    """When that was, by the coordinator's clock."""


class Loan(Note):
    """Orders on loan, of one round."""

    id: Hex
    seconds: Annotated[float, Field(gt=0)]
    """How long they may take, from when they are read to when all are answered."""
    assignment: Assignment


class Letter(Signed):
    name: Name
    number: Claim
    """Rises with every letter to this device."""
    nonce: str = Field(default="", max_length=64)
    """Hexadecimal: from it and the key before, this letter's key follows."""
    run: str = ""
    """The run that the device works for; empty: none."""
    site: str = ""
    """Equal for letters of one run in one configuration: what was read for one order serves for the next."""
    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of silence after which a lease ends."""
    loan: Loan | None = None
    letter: str | None = None
    """URL of the next letter; None: in a folder."""
    beat: BeatUpload | None = None
    sign: str | None = None
    """Where the coordinator's lease is, which changes as long as it lives: a URL, or with a folder its address. None:
    only letters show that it lives."""
    revoked: bool = False
    account: Account = Account()


State = Literal["idle", "working", "failed", "gone"]


class Beat(Signed):
    name: Name
    boot: Hex
    """Drawn when the agent's process starts."""
    number: Claim
    state: State
    loan: Hex | None = None
    said: str = Field(default="", max_length=500)
    """Why it has failed."""
    requests: Claim = 0
    """How many requests it has made to the store since it was started."""
    version: str = Field(default="", max_length=40)
    at: Annotated[float, Field(ge=0, le=1e11)] = 0.0
    """Unix time, by the device's clock; to be shown only."""


class Probe(Note):
    """Leave to measure the way to the store: what the device writes there, it alone reads."""

    read: str
    """A URL."""
    write: Upload


class Invitation(Note):
    """All that a device needs to begin. It holds the device's key: whoever has the file is the device."""

    name: Name
    key: Hex
    tier: str | None
    """None: takes the orders of clients of any tier."""
    generation: Claim = 0
    letter: str | None = None
    beat: BeatUpload | None = None
    probe: Probe | None = None
    """None: in a folder."""
    folder: str | None = None
    """Where the letters are, for agents that reach the place themselves; None: at the URLs."""
    plain: bool = False
    """The worker is a pod of the coordinator's cluster: it accepts addresses without TLS, and imports the packages of
    its image that the run's configuration names."""

    @staticmethod
    def of(value: bytes, where: str) -> Invitation:
        """Raises ConfigError."""
        try:
            found = Invitation.model_validate_json(value)
        except ValidationError as error:
            raise ConfigError(f"{where} is no invitation: {brief(error)}; `flexfleet invite` writes them") from error
        if found.folder is None and (found.letter is None or found.beat is None):
            raise ConfigError(f"{where} names neither URLs nor a folder: have `flexfleet invite` write another one")
        probe = () if found.probe is None else (found.probe.read, found.probe.write.url)
        try:  # before the device remembers it
            if found.letter is not None:
                safe(found.letter, found.plain)
            for address in (*probe, *(() if found.beat is None else (found.beat.url,))):
                check_own(address, found.letter, found.folder)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return found


def check_own(address: str, letter: str | None, folder: str | None) -> None:
    """Raise ConfigError unless an address is in the device's own store: on the server of `letter`, the URL of its
    letters, or in the place that holds `folder`, the folder of its letters. A device calls nothing else, whatever its
    coordinator names."""
    if folder is not None:
        own = folder.rsplit("/", 2)[0]
        found, is_own = address, f"{address}/".startswith(f"{own}/") and ".." not in address.split("/")
    else:
        found, own = _server(address), _server(letter or "")
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
        raise ConfigError(f"not an address ({error}); an https address is expected") from None
    return f"{parts.scheme}://{parts.hostname}:{port}"


def safe(url: str, plain: bool = False) -> str:
    """The address. Raises ConfigError for what is none, and for one that would send keys in the clear, unless `plain`
    allows that."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"not an address ({error}); an https address is expected") from None
    if parts.scheme == "https" or (parts.scheme == "http" and (plain or parts.hostname in LOCAL)):
        return url
    raise ConfigError(
        f"{parts.scheme}://{parts.hostname} is no https address: letters hold keys, which others would read; "
        "let the server write invitations for an S3 server with TLS (agents.endpoint)"
    )


def next_key(key: str, nonce: str) -> str:
    return hmac.new(bytes.fromhex(key), b"key " + nonce.encode(), "sha256").hexdigest()


def read_letter(value: bytes, key: str, generation: int) -> tuple[Letter, str]:
    """The letter, and the key that has signed it: the device's own, or the next. Raises IntegrityError for what is not
    obeyed, ClientError where this device has missed too many letters."""
    try:
        letter = Letter.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"what lies in the letter's place is none: {brief(error)}") from error
    if letter.generation == generation + 1:
        key = next_key(key, letter.nonce)
    elif letter.generation > generation:
        raise ClientError(
            f"the letter is signed with key {letter.generation}, this device has key {generation}: it needs another "
            "invitation (`flexfleet invite` on the server)"
        )
    elif letter.generation < generation:
        raise IntegrityError(f"the letter is signed with key {letter.generation}, this device has {generation} already")
    if not letter.is_by(key):
        raise IntegrityError("the letter is not signed with this device's key: it is not obeyed")
    return letter, key


def read_beat(value: bytes, name: str, keys: tuple[str, ...]) -> Beat:
    """Raises IntegrityError unless the device of this name has signed it with one of its keys."""
    try:
        beat = Beat.model_validate_json(value)
        good = beat.name == name and any(beat.is_by(key) for key in keys)
    except (ValidationError, ValueError) as error:
        said = brief(error) if isinstance(error, ValidationError) else str(error)
        raise IntegrityError(f"what {name} left is no beat: {said[:300]}") from error
    if not good:
        raise IntegrityError(f"what {name} left is not signed with its key")
    return beat


def pause(waited_s: float, most_s: float = MOST_S, least_s: float = LEAST_S) -> float:
    """Seconds until the next look, after so many of waiting: looks are a tenth apart of what was waited."""
    return min(max(least_s, waited_s / 10), max(most_s, least_s))


def lease_key(key: bytes, site: str, loan: str) -> bytes:
    """What signs the answer to an order under one lease. `key`: the order's (`updates.KeyOf`), which does not say how
    the run is configured; `site` does (`Letter.site`), so that no answer counts that was trained otherwise."""
    return hmac.new(key, f"lease {site} {loan}".encode(), hashlib.sha256).digest()


ANSWERS, LEASES = "/updates/", "/leases/"


@dataclass(frozen=True)
class Leased:
    """A store in which a round's answers lie apart, for one lease."""

    store: Store
    loan: str

    @property
    def at_once(self) -> int:
        return getattr(self.store, "at_once", 1)

    def key(self, key: str) -> str:
        """Where a key's value really lies."""
        return key.replace(ANSWERS, f"{LEASES}{self.loan}/", 1)

    def put(self, key: str, value: Value) -> None:
        self.store.put(self.key(key), value)

    def create(self, key: str, value: bytes) -> bool:
        return self.store.create(self.key(key), value)

    def get(self, key: str, limit: int | None = None) -> bytes:
        return self.store.get(self.key(key), limit)

    def list(self, prefix: str) -> list[str]:
        here = f"{LEASES}{self.loan}/"
        return sorted(key.replace(here, ANSWERS, 1) for key in self.store.list(self.key(prefix)))

    def delete(self, *keys: str) -> None:
        self.store.delete(*map(self.key, keys))

    def sweep(self, prefix: str) -> None:
        self.store.sweep(self.key(prefix))

    def uri(self, key: str = "") -> str:
        return self.store.uri(self.key(key))
