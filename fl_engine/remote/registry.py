"""The registry of enrolled devices and their keys.

    <name>.json      an invited device (`Member`)
    revoked/<name>   a revoked device, whose name is not used again

A registry holds keys, so it is never stored in a place for which workers have URLs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.types import Device
from fl_engine.data.local_data import natural
from fl_engine.remote.messages import Heartbeat, Hex, Name, Note, enrolled_key, short
from fl_engine.storage.run_files import Record, parsed
from fl_engine.storage.store import Store

KEY_BYTES = 32
REVOKED = "revoked/"
CLIENTS = "site/devices.json"
"""Key of `DeviceClients` in the run's store."""


class Member(Note):
    """A worker with a mailbox."""

    name: Name
    tier: str | None
    """Its pool; None: any."""
    invited: Hex
    """The key of the invitation."""
    id: Hex | None = None
    """The id of the device that has enrolled."""
    pod: bool = False

    @staticmethod
    def new(name: str, tier: str | None, pod: bool = False) -> Member:
        return Member(name=name, tier=tier, invited=secrets.token_hex(KEY_BYTES), pod=pod)

    @property
    def key(self) -> str:
        return self.invited if self.pod or self.id is None else enrolled_key(self.invited, self.id)

    @property
    def enrolled(self) -> str:
        """See `Message.enrolled`."""
        return "" if self.id is None else short(self.id)

    def signed(self, heartbeat: Heartbeat) -> bool:
        """Whether a device with the invitation has signed the heartbeat, even if another one has enrolled."""
        return heartbeat.is_by(self.invited if self.pod else enrolled_key(self.invited, heartbeat.id))


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
        """Return a device. Raises IntegrityError if it is not invited."""
        return parsed(Member, self.store.get(f"{name}.json"), self.store.uri(f"{name}.json"))

    def members(self) -> Iterator[Member]:
        """Yield all invited devices, without those that are revoked meanwhile."""
        for name in self.names():
            try:
                yield self.member(name)
            except IntegrityError:
                if name in self.names():
                    raise

    def put(self, member: Member) -> None:
        self.store.put(f"{member.name}.json", member.model_dump_json().encode())

    def revoke(self, name: str) -> Member:
        """Delete a device's key, and return the device for its last message. Raises ConfigError if it is not
        invited."""
        if name not in (names := self.names()):
            raise ConfigError(f"no device {name!r} is invited, only: {', '.join(names) or 'none'}")
        member = self.member(name)
        self.store.put(f"{REVOKED}{name}", b"")
        self.store.delete(f"{name}.json")
        return member


class DeviceClients(Record):
    """The client that each device is, if devices hold their own data."""

    clients: dict[str, int]


def assign_clients(before: Mapping[str, int], members: Iterable[Member], fleet: Sequence[Device]) -> dict[str, int]:
    """Map each device to a client.

    Devices in `before` keep their client. The others get, in the order of their names (weak-2 before weak-10), the
    first free client of their tier. Devices without a tier come last, and get any free client. A device without a free
    client gets none.
    """
    by_name = {member.name: member for member in members}
    found = {name: client for name, client in before.items() if name in by_name and client < len(fleet)}
    free = [device for device in fleet if device.client not in found.values()]
    new = [member for name, member in by_name.items() if name not in found]
    for member in sorted(new, key=lambda m: (m.tier is None, natural(m.name))):
        own = next((device for device in free if member.tier in (None, device.tier)), None)
        if own is not None:
            found[member.name] = own.client
            free.remove(own)
    return found


def clients_of_devices(store: Store, members: Iterable[Member], fleet: Sequence[Device]) -> dict[str, int]:
    """Return and store the clients of devices (`assign_clients`). A device is the same client for the whole run."""
    known = dict[str, int]()
    if CLIENTS in store.list(CLIENTS):
        known = parsed(DeviceClients, store.get(CLIENTS), store.uri(CLIENTS)).clients
    found = assign_clients(known, members, fleet)
    if found != known:
        store.put(CLIENTS, DeviceClients(clients=found).model_dump_json().encode())
    return found
