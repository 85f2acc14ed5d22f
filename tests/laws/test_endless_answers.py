"""A device reads a bounded part of an answer that does not end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.core.types import FULL, RoundPlan, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import manifest_bytes
from fl_engine.remote.messages import HEARTBEAT_BYTES, Invitation, Message, read_message
from fl_engine.storage import urls
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload, UrlStore
from fl_engine.testing.tiny import failure_of
from flexfleet.worker.mailbox import invitation_of

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

    class Answers(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found.sent.append(0)
            self.send_response(found.status)
            self.send_header("Location", "/more")
            if found.length is not None:
                self.send_header("Content-Length", str(found.length))
            self.end_headers()
            if found.length is not None:
                return
            mine = len(found.sent) - 1
            try:
                for _ in range(ENOUGH):
                    self.wfile.write(PIECE)
                    found.sent[mine] += 1
            except OSError:
                pass

        do_GET = do_PUT = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()


@pytest.mark.parametrize("verb", ["PUT", "POST"])
@pytest.mark.parametrize("status", [200, 302, 403, 503])
def test_endless_answer_to_an_upload_is_not_read(endless: Endless, verb: Any, status: int) -> None:
    endless.status = status
    store = UrlStore({}, {"heartbeat": Upload(verb=verb, url=endless.url, fields={}, size=4)}, within_s=5.0)
    if status == 200:
        store.put("heartbeat", b"beat")  # without an ETag it is taken as arrived
    else:
        with pytest.raises((EnvironmentFailure, IntegrityError), match=f"HTTP {status}") as error:
            store.put("heartbeat", b"beat")
        assert len(str(error.value)) < 4096
    assert endless.sent and max(endless.sent) <= SOCKETS


@pytest.mark.parametrize(("within_s", "asked"), [(5.0, 2), (None, 4)], ids=["a heartbeat", "an update"])
def test_upload_whose_answer_breaks_off_is_repeated(
    endless: Endless, monkeypatch: pytest.MonkeyPatch, within_s: float | None, asked: int
) -> None:
    monkeypatch.setattr(urls.time, "sleep", lambda _: None)
    endless.length = 100
    store = UrlStore({}, {"key": Upload(verb="PUT", url=endless.url, fields={}, size=4)}, within_s)
    with pytest.raises(EnvironmentFailure, match="PUT"):
        store.put("key", b"beat")
    assert len(endless.sent) == asked


@pytest.mark.parametrize(("within_s", "asked"), [(5.0, 1), (None, 4)], ids=["a message", "an order"])
def test_message_that_breaks_off_is_requested_once(
    endless: Endless, monkeypatch: pytest.MonkeyPatch, within_s: float | None, asked: int
) -> None:
    monkeypatch.setattr(urls.time, "sleep", lambda _: None)
    endless.length = 100
    with pytest.raises(EnvironmentFailure, match="GET"):
        UrlStore({"key": endless.url}, {}, within_s).get("key", 200)
    assert len(endless.sent) == asked


@pytest.mark.parametrize("status", [302, 403, 503])
def test_endless_answer_without_a_message_is_not_read(endless: Endless, status: int) -> None:
    endless.status = status
    store = UrlStore({"message": endless.url}, {}, within_s=5.0)
    with pytest.raises((EnvironmentFailure, IntegrityError), match=f"HTTP {status}"):
        store.get("message", 100)
    assert endless.sent and max(endless.sent) <= SOCKETS


def test_a_redirect_is_not_followed_and_not_read(endless: Endless) -> None:
    endless.status = 302
    with pytest.raises(IntegrityError):
        UrlStore({"file": endless.url}, {}).get("file", 100)
    assert len(endless.sent) == 1 and max(endless.sent) <= SOCKETS


@pytest.mark.parametrize("size", [-1, 0, HEARTBEAT_BYTES + 1, 10**12])
def test_server_does_not_choose_the_length_of_a_heartbeat(size: int, tmp_path: Path) -> None:
    honest = Upload(verb="PUT", url="https://s3.example/heartbeat", fields={}, size=HEARTBEAT_BYTES)
    large, key = {"heartbeat": honest.model_copy(update={"size": size})}, "00" * 32
    way = {"message": "https://s3.example/message", "heartbeat": honest}
    invited = Invitation(name="weak-1", key=key, tier=None, **way)  # type: ignore[arg-type]
    assert Invitation.of(invited.model_dump_json().encode(), "it") == invited
    (tmp_path / "invitation").write_bytes(invited.model_copy(update=large).model_dump_json().encode())
    with pytest.raises(ConfigError, match="heartbeat"):
        invitation_of(str(tmp_path / "invitation"))
    message = Message(name="weak-1", number=0, heartbeat=honest).model_copy(update=large).signed(key)
    with pytest.raises(IntegrityError, match="heartbeat"):
        read_message(message.text(), key, key)


def test_lease_does_not_choose_the_length_of_a_manifest(tmp_path: Path) -> None:
    order = WorkOrder(0, 3, FULL, {}, 0, 0)
    plan, key = RoundPlan(0, (order,)), "rounds/00000/updates/3.json"
    most = manifest_bytes(order)
    store = FolderStore(tmp_path)
    Mailbox(store, lengths={key: most}).put_outcome(plan, replace(failure_of(order), client=3))
    assert len(store.get(key)) == most
    with pytest.raises(ClientError):
        Mailbox(store, lengths={key: 10**12}).put_outcome(plan, replace(failure_of(order), client=3))
