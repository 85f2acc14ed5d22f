"""Which device is which client, where devices hold their own data (`partition.rule: local`).

    site/devices.json    in the run's store: by the device's name, its client

A device stays the same client for the whole run, whatever starts again. One that is revoked gives its place up, and the
next device of the tier that is invited takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_engine.backends.agents.roster import Member
from fl_engine.core.types import Device
from fl_engine.data.local import natural
from fl_engine.storage.records import Record, parsed
from fl_engine.storage.store import Store

KEY = "site/devices.json"


class Seats(Record):
    clients: dict[str, int]
    """By device, the client that it is."""


def seated(before: Mapping[str, int], members: Iterable[Member], fleet: Sequence[Device]) -> dict[str, int]:
    """By device, its client. Devices that have one keep it. The others get, in the order of their names (weak-2 before
    weak-10), the first client of their tier that has no device; those of no tier come last, and get one of any tier.
    A device for which there is none has no work."""
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


def kept(store: Store, members: Iterable[Member], fleet: Sequence[Device]) -> dict[str, int]:
    """The same, with what is known of the run, which is written where it has changed. Raises IntegrityError."""
    known = parsed(Seats, store.get(KEY), store.uri(KEY)).clients if KEY in store.list(KEY) else {}
    found = seated(known, members, fleet)
    if found != known:
        store.put(KEY, Seats(clients=found).model_dump_json().encode())
    return found
