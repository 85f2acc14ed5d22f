"""The coordinator's side of the letters: it writes them, reads beats, and knows which device holds which order."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_engine.backends.agents.roster import AHEAD, Member, Roster
from fl_engine.backends.agents.settings import URL_S
from fl_engine.core.errors import IntegrityError, Refused
from fl_engine.exchange.letters import (
    BEAT,
    BEAT_BYTES,
    LETTER,
    LETTER_BYTES,
    MOST_S,
    Beat,
    Invitation,
    Letter,
    Loan,
    Probe,
    read_beat,
    safe,
)
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from fl_engine.storage.throughput import PROBE, PROBE_BYTES
from fl_engine.storage.urls import Upload, Verb

log = logging.getLogger("flexfleet")

BOOTS = 8
"""How many of a device's earlier processes are remembered."""


@dataclass
class Held:
    """The orders that a device holds, under one loan."""

    loan: str
    clients: list[int]
    """Clients whose orders it has not answered yet."""
    alone: bool
    """It was lent a single order."""
    since: float
    """When they were lent, by this process's monotonic clock."""
    heard: float
    """When a new beat named the loan last, else `since`."""
    taken: bool = False
    """A beat has named the loan."""
    boots: set[str] = field(default_factory=set)
    """The processes whose beats have named the loan."""


@dataclass
class Agent:
    member: Member
    letter: Letter
    """The last one that was written."""
    heard: float
    """When its beat last changed, or when it was first asked for."""
    beat: Beat | None = None
    away: bool = False
    """It has never been there, has ended, or has let an order lie; it gets one when its beat changes."""
    revoked: bool = False
    rests: float = 0.0
    """It has failed, or has let an order lie, and gets none before this time."""
    failures: int = 0
    """How often in a row it has failed, or has let an order lie."""
    why: str = ""
    """Why its last order failed; empty: it has answered one since."""
    held: Held | None = None
    boot: str = ""
    """The process that gave its last answer."""
    boots: deque[str] = field(default_factory=lambda: deque(maxlen=BOOTS))
    """The processes whose beats were there before the present one's."""
    doubled: bool = False
    """A process beats again that another one had followed: both live, and both have the device's key."""
    looked: float = -math.inf
    """When its beat was last asked for."""
    written: float = 0.0
    """When its last letter was written."""
    looks_s: float = 0.0
    """Seconds within which it looks for a letter, while it may know the lease of an earlier run alone; 0: it has read
    a letter of this coordinator."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_gone(self) -> bool:
        return self.beat is not None and self.beat.state == "gone"

    @property
    def begins_again(self) -> bool:
        """Another process than the one that gave the last answer is at work on the orders of its last letter."""
        loan, beat = self.letter.loan, self.beat
        if loan is None or beat is None or beat.boot == self.boot:
            return False
        return beat.state == "working" and beat.loan == loan.id


@dataclass(frozen=True)
class Post:
    """The letters of a place, `home`. `verb`: how devices upload, None where they have the place itself. `lease`: the
    key in `home` of the lease that shows that the coordinator lives; None: its letters alone show that."""

    home: Store
    roster: Roster
    verb: Verb | None = None
    endpoint: str | None = None
    lease: str | None = None

    def _sign(self) -> str | None:
        """Where a device sees that the coordinator lives."""
        if self.lease is None:
            return None
        if self.verb is None or not isinstance(self.home, S3Store):
            return self.home.uri(self.lease)
        return self.home.presign(self.lease, URL_S, self.endpoint)

    def ways(self, name: str) -> tuple[str | None, Upload | None]:
        """The URL of a device's letters, and leave to write its beat; None where it has the place itself."""
        if self.verb is None or not isinstance(self.home, S3Store):
            return None, None
        letter = self.home.presign(f"{name}/{LETTER}", URL_S, self.endpoint)
        return letter, self.home.upload(f"{name}/{BEAT}", BEAT_BYTES, URL_S, self.verb, self.endpoint)

    def write(self, member: Member, before: Letter | None, **said: Any) -> Letter:
        """Writes the next letter; what is not `said` is as in the one before."""
        made = self._made(member, before, member.ahead if before is None else before.number + 1, said)
        self.home.put(f"{member.name}/{LETTER}", made.text())
        return made

    def _made(self, member: Member, before: Letter | None, number: int, said: Mapping[str, Any]) -> Letter:
        letter, beat = self.ways(member.name)
        fresh = {"number": number, "generation": member.generation, "nonce": member.nonce}
        fresh |= {"letter": letter, "beat": beat, "sign": self._sign(), **said}
        return (before or Letter(name=member.name, number=0)).model_copy(update=fresh).signed(member.key)

    def _reserved(self, member: Member, before: Letter | None) -> Member:
        """With numbers for letters to come, which no later coordinator gives again."""
        number = member.ahead if before is None else before.number + 1
        if before is not None and number < member.ahead:
            return member
        more = member.model_copy(update={"ahead": number + AHEAD})
        self.roster.put(more)
        return more

    def last(self, member: Member) -> Letter | None:
        """The last letter; None: it is gone, or nobody here has written it."""
        try:
            letter = Letter.model_validate_json(self.home.get(f"{member.name}/{LETTER}", LETTER_BYTES))
        except (IntegrityError, ValueError):
            return None
        return letter if any(letter.is_by(key) for key in (member.key, member.before)) else None

    def beat(self, member: Member) -> Beat | None:
        """The device's last beat; None: there is none, or what is there is not its own."""
        try:
            return self.own_beat(member)
        except IntegrityError as error:
            log.debug("%s", error)
            return None

    def own_beat(self, member: Member) -> Beat | None:
        """As `beat`, but raises IntegrityError for what is not its own."""
        try:
            value = self.home.get(f"{member.name}/{BEAT}", BEAT_BYTES)
        except (IntegrityError, Refused):  # not there, too long, or made unreadable
            return None
        return read_beat(value, member.name, (member.key, member.before))

    def invite(self, stem: str, tier: str | None) -> Invitation:
        """Raises ConfigError where the letters would travel in the clear."""
        if (url := self.ways("probe")[0]) is not None:
            safe(url)
        taken = set[str]()
        while True:
            member = self.roster.invite(stem, tier, taken)
            if self.home.create(f"{member.name}/{LETTER}", self._made(member, None, 0, {}).text()):
                break
            self.roster.forget(member.name)  # another roster's device has this name here
            taken.add(member.name)
        return self.invitation(member)

    def invitation(self, member: Member, plain: bool = False) -> Invitation:
        """`plain`: see `Invitation`; nobody measures the way to the store from there."""
        letter, beat = self.ways(member.name)
        folder = None if letter else self.home.uri(member.name)
        return Invitation(
            name=member.name,
            key=member.key,
            tier=member.tier,
            letter=letter,
            beat=beat,
            probe=None if plain else self._probe(f"{member.name}/{PROBE}"),
            folder=folder,
            plain=plain,
        )

    def _probe(self, key: str) -> Probe | None:
        if self.verb is None or not isinstance(self.home, S3Store):
            return None
        write = self.home.upload(key, PROBE_BYTES, URL_S, self.verb, self.endpoint)
        return Probe(read=self.home.presign(key, URL_S, self.endpoint), write=write)

    def revoke(self, name: str) -> None:
        """The device learns of it with its next look, and ends."""
        member = self.roster.revoke(name)
        self.write(member, self.last(member), loan=None, run="", revoked=True)
        self.home.delete(f"{name}/{BEAT}", f"{name}/{PROBE}")

    def meet(self, member: Member, **said: Any) -> Agent:
        """A device at the start of a coordinator: with a new key if it has the last one, and its letter as it is."""
        before, beat = self.last(member), self.beat(member)
        has = beat is not None and beat.is_by(member.key) and beat.generation == member.generation
        if has and self.roster.rotates:
            member = member.rotated()
            self.roster.put(member)
        reserved = self._reserved(member, before)
        letter, now = self.write(member, before, **said), time.monotonic()
        looks_s = 2 * MOST_S if before is None else min(2 * MOST_S, before.lease_s)
        away = beat is None or beat.state == "gone"
        return Agent(reserved, letter, now, beat, away=away, written=now, looks_s=looks_s)

    def say(self, agent: Agent, loan: Loan | None, **said: Any) -> None:
        agent.member = self._reserved(agent.member, agent.letter)
        agent.letter, agent.written = self.write(agent.member, agent.letter, loan=loan, **said), time.monotonic()

    def hear(self, agent: Agent) -> bool:
        """Looks for a new beat; whether there is one."""
        beat = self.beat(agent.member)
        agent.looked = time.monotonic()
        if beat is None or _count(beat) == (None if agent.beat is None else _count(agent.beat)):
            return False
        if agent.beat is not None and agent.beat.boot != beat.boot:
            self._see_doubled(agent, beat.boot)
            agent.boots.append(agent.beat.boot)
        agent.beat, agent.heard, agent.away = beat, agent.looked, beat.state == "gone"
        if beat.generation == agent.member.generation:
            agent.looks_s = 0.0
        if agent.held is not None and beat.loan == agent.held.loan:
            agent.held.taken, agent.held.heard = True, agent.looked
            agent.held.boots.add(beat.boot)
        return True

    def _see_doubled(self, agent: Agent, boot: str) -> None:
        """A pod may come back that another one has followed; of a device that was invited there is one."""
        if boot in agent.boots and not agent.doubled and self.roster.rotates:
            agent.doubled = True
            log.warning(
                "%s: two processes answer as this device, both have its invitation. If you have not started two, "
                "somebody else has the file: flexfleet invite --revoke %s, and invite the device again",
                agent.name,
                agent.name,
            )


def _count(beat: Beat) -> tuple[str, int]:
    return beat.boot, beat.number
