"""A device reads a bounded part of an answer that does not end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.core.types import FULL, Assignment, RoundPlan
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import manifest_bytes
from fl_engine.remote.messages import HEARTBEAT_BYTES, Invitation, Message, read_message
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload, UrlStore
from fl_engine.testing.tiny import failure_of
from flexfleet.worker.mailbox import read_invitation
from tests.harness.web import Request, serving

PIECE = bytes(2**20)
ENOUGH = 64
"""MiB after which the server ends its answer, so that a device that reads it all is seen, and not waited for."""
SOCKETS = 16
"""MiB that may lie between the two ends, unread."""


@dataclass
class Endless:
    url: str = ""
    status: int = 200
    length: int | None = None
    """What an answer announces, of which not a byte comes."""
    sent: list[int] = field(default_factory=list)
    """By answer, MiB that the server got rid of."""


@pytest.fixture
def endless() -> Iterator[Endless]:
    found = Endless()

    def answer(request: Request) -> None:
        request.body()
        found.sent.append(0)
        length = None if found.length is None else str(found.length)
        request.respond(found.status, headers={"Location": "/more", "Content-Length": length})
        if found.length is not None:
            return
        mine = len(found.sent) - 1
        with suppress(OSError):
            for _ in range(ENOUGH):
                request.wfile.write(PIECE)
                found.sent[mine] += 1

    with serving(answer) as found.url:
        yield found


@pytest.mark.parametrize("verb", ["PUT", "POST"])
@pytest.mark.parametrize("status", [200, 302, 403, 503])
def test_endless_answer_to_an_upload_is_not_read(endless: Endless, verb: Any, status: int) -> None:
    endless.status = status
    store = UrlStore({}, {"heartbeat": Upload(verb=verb, url=endless.url, fields={}, size=4)}, within_s=5.0)
    if status == 200:
        store.put("heartbeat", b"beat")
    else:
        with pytest.raises((EnvironmentFailure, IntegrityError), match=f"HTTP {status}") as error:
            store.put("heartbeat", b"beat")
        assert len(str(error.value)) < 4096
    assert endless.sent and max(endless.sent) <= SOCKETS


@pytest.mark.parametrize("verb", ["put", "get"])
def test_request_whose_answer_breaks_off_is_repeated(endless: Endless, verb: str) -> None:
    endless.length = 100
    store = UrlStore({"key": endless.url}, {"key": Upload(verb="PUT", url=endless.url, fields={}, size=4)}, 5.0)
    with pytest.raises(EnvironmentFailure):
        store.put("key", b"beat") if verb == "put" else store.get("key", 200)
    assert len(endless.sent) == 2


@pytest.mark.parametrize("status", [302, 403, 503])
def test_endless_answer_without_a_message_is_not_read(endless: Endless, status: int) -> None:
    endless.status = status
    store = UrlStore({"message": endless.url}, {}, within_s=5.0)
    with pytest.raises((EnvironmentFailure, IntegrityError), match=f"HTTP {status}"):
        store.get("message", 100)
    assert endless.sent and max(endless.sent) <= SOCKETS


@pytest.mark.parametrize("size", [-1, 0, HEARTBEAT_BYTES + 1, 10**12])
def test_server_does_not_choose_the_length_of_a_heartbeat(size: int, tmp_path: Path) -> None:
    honest = Upload(verb="PUT", url="https://s3.example/heartbeat", fields={}, size=HEARTBEAT_BYTES)
    large, key = {"heartbeat": honest.model_copy(update={"size": size})}, "00" * 32
    way = {"message": "https://s3.example/message", "heartbeat": honest}
    invited = Invitation(name="weak-1", key=key, tier=None, **way)  # type: ignore[arg-type]
    assert Invitation.of(invited.model_dump_json().encode(), "it") == invited
    (tmp_path / "invitation").write_bytes(invited.model_copy(update=large).model_dump_json().encode())
    with pytest.raises(ConfigError):
        read_invitation(str(tmp_path / "invitation"))
    message = Message(name="weak-1", number=0, heartbeat=honest).model_copy(update=large).signed(key)
    with pytest.raises(IntegrityError):
        read_message(message.text(), key, key)


def test_lease_does_not_choose_the_length_of_a_manifest(tmp_path: Path) -> None:
    assignment = Assignment(0, 3, FULL, {}, 0, 0)
    plan, key = RoundPlan(0, (assignment,)), "rounds/00000/updates/3.json"
    most = manifest_bytes(assignment)
    store = FolderStore(tmp_path)
    Mailbox(store, lengths={key: most}).put_result(plan, replace(failure_of(assignment), client=3))
    assert len(store.get(key)) == most
    with pytest.raises(ClientError):
        Mailbox(store, lengths={key: 10**12}).put_result(plan, replace(failure_of(assignment), client=3))
