"""Messages, heartbeats and enrollment: signatures are required, and each claim of a device is bounded."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

import fl_engine
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.types import Device
from fl_engine.remote import messages
from fl_engine.remote.messages import (
    HEARTBEAT,
    HEARTBEAT_BYTES,
    MESSAGE,
    AssignmentMessage,
    Heartbeat,
    Invitation,
    Lease,
    Message,
    enrolled_key,
    read_heartbeat,
    read_message,
)
from fl_engine.remote.provisioner import Enrolled
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.remote.settings import AgentsConfig
from fl_engine.remote.workers import Held, Worker, Workers
from tests.harness.played import played_clock
from tests.harness.stores import MemoryStore
from tests.laws.test_overlapping import Waiting

INVITED, ID = "ab" * 32, "1d" * 16
KEY = enrolled_key(INVITED, ID)
HONEST: dict[str, Any] = {"name": "weak-1", "id": ID, "worker": "00" * 8, "number": 1, "state": "idle"}
LEASE = Lease(id="11" * 8, seconds=60, assignment=AssignmentMessage(round=0, clients=(0,), store="x"))


class Coordinator:
    """A coordinator with one invited device, weak-1."""

    def __init__(self, home: Any = None) -> None:
        self.mailboxes, self.registry = Mailboxes(home or MemoryStore()), Registry(MemoryStore())
        self.key = self.mailboxes.invite(self.registry, "weak", None).key
        devices = Enrolled([Device(0, "weak", 100.0, 0.0)], self.registry, self.mailboxes, AgentsConfig())
        self.workers = Workers(devices, print)

    def meet(self) -> Worker:
        self.workers.refresh()
        return self.workers.by_name["weak-1"]

    def send(self, lease: Lease | None) -> int:
        self.workers.send(self.meet(), lease)
        return self.workers.by_name["weak-1"].message.number

    def accepts(self, known: Worker, value: bytes | None = None, id: str = ID, **claims: Any) -> bool:
        """Whether it accepts this heartbeat."""
        told = Heartbeat(**{**HONEST, "id": id, **claims}).signed(enrolled_key(self.key, id))
        before = known.heartbeat
        self.mailboxes.home.put(f"weak-1/{HEARTBEAT}", told.text() if value is None else value)
        self.workers.poll([known])
        return known.heartbeat is not before


@pytest.mark.parametrize(("starts", "reports"), [("010", 1), ("01010", 1), ("0123", 0)])
def test_two_processes_of_a_device_are_reported_once(
    caplog: pytest.LogCaptureFixture, starts: str, reports: int
) -> None:
    coordinator = Coordinator()
    worker = coordinator.meet()
    for number, start in enumerate(starts):
        coordinator.accepts(worker, worker=start * 16, number=number)
    assert caplog.text.count("invite --revoke weak-1") == reports


def test_message_is_obeyed_only_with_the_device_key() -> None:
    message = Message(name="weak-1", number=3, run="a", lease=LEASE).signed(KEY)
    assert read_message(message.text(), KEY, INVITED) == message
    unsigned = message.model_copy(update={"run": "b"})
    for wrong in (unsigned, unsigned.signed(enrolled_key(INVITED, "2d" * 16)), unsigned.signed(INVITED)):
        with pytest.raises(IntegrityError):
            read_message(wrong.text(), KEY, INVITED)
    first = Message(name="weak-1", number=0).signed(INVITED)
    assert read_message(first.text(), KEY, INVITED) == first, "nobody has enrolled yet"


@pytest.mark.parametrize(
    "lie",
    [
        {"name": "weak-2"}, {"name": "../weak-1"}, {"number": -1}, {"number": 10**15 + 1}, {"state": "dead"},
        {"error": "x" * 501}, {"version": "x" * 41}, {"numerics": "x" * 301}, {"requests": 10**9 + 1}, {"at": math.nan},
        {"at": -1.0}, {"lease": "../../other"}, {"worker": "x"}, {"id": "x"}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_heartbeat_that_claims_too_much_is_refused(lie: dict[str, Any]) -> None:
    good = Heartbeat(**HONEST)
    assert read_heartbeat(good.text(HEARTBEAT_BYTES), "weak-1") == good
    with pytest.raises(IntegrityError):
        read_heartbeat(json.dumps(good.model_dump() | lie).encode(), "weak-1")


def test_device_with_invalid_heartbeats_counts_as_away() -> None:
    coordinator = Coordinator()
    worker = coordinator.meet()
    assert worker.away, "it has not come yet"
    forged = Heartbeat(**HONEST).signed("cd" * 32).text()
    for bad in (b"", b"{", b" " * (HEARTBEAT_BYTES + 1), forged):
        assert not coordinator.accepts(worker, bad) and worker.away
    assert coordinator.accepts(worker) and not worker.away
    assert not coordinator.accepts(worker), "the same heartbeat is not another sign of life"


@pytest.mark.parametrize(("lease", "worker"), [("22" * 8, "00" * 8), ("11" * 8, "99" * 8), (None, "00" * 8)])
def test_only_the_holder_of_a_lease_prolongs_it(lease: str | None, worker: str) -> None:
    coordinator = Coordinator()
    known = coordinator.meet()
    known.held = held = Held("11" * 8, "00" * 8, [3], alone=True, since=0.0, heartbeat_at=0.0)
    assert coordinator.accepts(known, lease=lease, worker=worker) and not held.taken and held.heartbeat_at == 0.0
    assert coordinator.accepts(known, lease="11" * 8, number=2) and held.taken and held.heartbeat_at > 0.0


def test_first_heartbeat_enrolls_the_device() -> None:
    coordinator = Coordinator()
    worker = coordinator.meet()
    assert coordinator.accepts(worker)
    assert coordinator.registry.member("weak-1").id == ID
    coordinator.send(LEASE)
    value = coordinator.mailboxes.home.get(f"weak-1/{MESSAGE}")
    message = read_message(value, enrolled_key(coordinator.key, ID), coordinator.key)
    assert message.lease == LEASE and message.enrolled == messages.short(ID) and message.worker == "00" * 8


def test_revoked_device_reads_so_and_its_name_is_not_reused() -> None:
    coordinator = Coordinator()
    mailboxes, registry = coordinator.mailboxes, coordinator.registry
    assert mailboxes.invite(registry, "weak", "weak").name == "weak-2"
    mailboxes.revoke(registry, "weak-1")
    assert registry.names() == ["weak-2"]
    assert read_message(mailboxes.home.get(f"weak-1/{MESSAGE}"), KEY, coordinator.key).revoked
    assert mailboxes.invite(registry, "weak", "weak").name == "weak-3"
    with pytest.raises(ConfigError):
        mailboxes.revoke(registry, "weak-1")


def test_message_numbers_rise_if_the_last_message_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device does not obey a message with a lower number than the one before."""
    clock, coordinator, numbers = played_clock(monkeypatch), Coordinator(), list[int]()
    for _ in range(3):
        numbers += [coordinator.send(None) for _ in range(5)]
        clock.sleep(60)
        coordinator.mailboxes.home.delete(f"weak-1/{MESSAGE}")
        coordinator.workers.by_name.clear()
    assert numbers == sorted({*numbers})


@pytest.mark.parametrize("value", [b"{}", Invitation(name="a-1", key=INVITED, tier=None).model_dump_json().encode()])
def test_invitation_without_a_way_to_the_mailbox_is_refused(value: bytes) -> None:
    with pytest.raises(ConfigError):
        Invitation.of(value, "x.json")


def test_second_device_with_an_invitation_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator()
    worker = coordinator.meet()
    assert coordinator.accepts(worker)
    for number in (5, 6):
        assert not coordinator.accepts(worker, id="2d" * 16, number=number)
    assert coordinator.registry.member("weak-1").id == ID
    assert [record.getMessage().count("invite --revoke weak-1") for record in caplog.records] == [1]
    assert coordinator.accepts(worker, number=2), "the first one is still obeyed"


@pytest.mark.parametrize("is_valid", [True, False])
def test_device_of_another_version_gets_no_assignments(caplog: pytest.LogCaptureFixture, is_valid: bool) -> None:
    coordinator = Coordinator()
    known = coordinator.meet()
    more = {} if is_valid else {"state": "of a later version"}
    told = Heartbeat.model_construct(**{**HONEST, "version": "9.8.7", **more})
    for _ in range(2):
        assert not coordinator.accepts(known, told.model_dump_json().encode())
    (text,) = (record.getMessage() for record in caplog.records if "9.8.7" in record.getMessage())
    assert known.away and fl_engine.__version__ in text and "weak-1" in text


def test_devices_are_greeted_and_checked_together() -> None:
    """The store responds only if requests for three devices have arrived."""
    coordinator = Coordinator(Waiting(together=3))
    for _ in range(2):
        coordinator.mailboxes.invite(coordinator.registry, "weak", None)
    coordinator.workers.refresh()
    assert list(coordinator.workers.by_name) == ["weak-1", "weak-2", "weak-3"]
    coordinator.workers.poll(list(coordinator.workers.by_name.values()))
