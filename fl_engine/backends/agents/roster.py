"""Which devices were invited, and the keys that they sign with.

    <name>.json      a device (`Member`)
    revoked/<name>   one that is not obeyed any more; its name is not given again

A roster holds keys, so it never lies where devices have URLs of.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.exchange.letters import Hex, Name, Note, next_key
from fl_engine.storage.records import parsed
from fl_engine.storage.store import Store

KEY_BYTES = 32
REVOKED = "revoked/"
AHEAD = 1000


class Member(Note):
    name: Name
    tier: str | None
    key: Hex
    before: Hex
    """The key before: the device signs with it until it has read a letter with the new one."""
    generation: int = 0
    nonce: str = ""
    """`key` follows from this and `before`."""
    ahead: int = AHEAD
    """No letter with this number or a higher one was written: with it letters go on where the last one is lost."""

    @staticmethod
    def new(name: str, tier: str | None) -> Member:
        key = secrets.token_hex(KEY_BYTES)
        return Member(name=name, tier=tier, key=key, before=key)

    def rotated(self) -> Member:
        """With its next key."""
        nonce = secrets.token_hex(16)
        more = {"key": next_key(self.key, nonce), "before": self.key, "nonce": nonce}
        return self.model_copy(update={**more, "generation": self.generation + 1})


@dataclass(frozen=True)
class Roster:
    """`rotates`: a coordinator that starts gives each device its next key. It cannot where devices that start again go
    back to their invitation, as pods do."""

    store: Store
    rotates: bool = True

    def revoked(self) -> set[str]:
        return {key.removeprefix(REVOKED) for key in self.store.list(REVOKED)}

    def names(self) -> list[str]:
        """The names of the devices that are invited."""
        keys = self.store.list("")
        files = {key.removesuffix(".json") for key in keys if "/" not in key and key.endswith(".json")}
        return sorted(files - {key.removeprefix(REVOKED) for key in keys if key.startswith(REVOKED)})

    def member(self, name: str) -> Member:
        """Raises IntegrityError where there is none."""
        return parsed(Member, self.store.get(f"{name}.json"), self.store.uri(f"{name}.json"))

    def members(self) -> Iterator[Member]:
        """All that are invited. One that is revoked while they are read is left out."""
        for name in self.names():
            try:
                yield self.member(name)
            except IntegrityError:
                if name in self.names():
                    raise

    def put(self, member: Member) -> None:
        self.store.put(f"{member.name}.json", member.model_dump_json().encode())

    def invite(self, stem: str, tier: str | None, but: Collection[str] = ()) -> Member:
        """A new member, called `<stem>-<number>`, but by none of these names."""
        number, taken = 1, self.revoked().union(but)
        while True:
            name = f"{stem}-{number}"
            member = Member.new(name, tier)
            if name not in taken and self.store.create(f"{name}.json", member.model_dump_json().encode()):
                return member
            number += 1

    def forget(self, name: str) -> None:
        self.store.delete(f"{name}.json")

    def revoke(self, name: str) -> Member:
        """Forgets the device's key; gives it for one last letter. Raises ConfigError where it is not invited."""
        if name not in (names := self.names()):
            known = ", ".join(names) or "none"
            raise ConfigError(f"no device {name!r} is invited; invited are: {known}")
        member = self.member(name)
        self.store.put(f"{REVOKED}{name}", b"")
        self.forget(name)
        return member
