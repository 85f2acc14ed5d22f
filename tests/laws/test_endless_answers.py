"""What a device reads of a server that means it ill: bounded, whatever the server answers or asks for."""

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
from fl_engine.exchange.letters import BEAT_BYTES, Invitation, Letter, read_letter
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import manifest_bytes
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload, UrlStore, patient_pool
from fl_engine.testing.tiny import failure_of
from flexfleet.steps import agent_line

PIECE = bytes(2**20)
ENOUGH = 64
"""MiB after which the server ends its answer, so that a device that reads it all is seen, and not waited for."""
SOCKETS = 16
"""MiB that may lie between the two ends, unread."""


@dataclass
class Endless:
    url: str = ""
    status: int = 200
    sent: list[int] = field(default_factory=list)
    """By answer, MiB that the server got rid of."""


@pytest.fixture
def endless() -> Iterator[Endless]:
    found = Endless()

    class Answers(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(found.status)
            self.send_header("Location", "/more")
            self.end_headers()
            found.sent.append(0)
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
def test_an_answer_to_an_upload_is_not_read_to_its_end(endless: Endless, verb: Any, status: int) -> None:
    endless.status = status
    store = UrlStore({}, {"beat": Upload(verb=verb, url=endless.url, fields={}, size=4)}, within_s=5.0)
    if status == 200:
        store.put("beat", b"beat")  # without an ETag it is taken as arrived
    else:
        with pytest.raises((EnvironmentFailure, IntegrityError), match=f"HTTP {status}") as error:
            store.put("beat", b"beat")
        assert len(str(error.value)) < 4096
    assert endless.sent and max(endless.sent) <= SOCKETS


@pytest.mark.parametrize("status", [302, 403, 503])
def test_what_answers_instead_of_a_letter_is_not_read_to_its_end(endless: Endless, status: int) -> None:
    endless.status = status
    store = UrlStore({"letter": endless.url}, {}, within_s=5.0)
    with pytest.raises((EnvironmentFailure, IntegrityError), match=f"HTTP {status}"):
        store.get("letter", 100)
    assert endless.sent and max(endless.sent) <= SOCKETS


def test_redirections_without_end_are_not_read_either(endless: Endless) -> None:
    endless.status = 302
    with patient_pool() as pool, pytest.raises(EnvironmentFailure, match="too many redirects"):
        store = UrlStore({"file": endless.url}, {})
        store._pool = pool
        store.get("file", 100)
    assert len(endless.sent) > 2 and max(endless.sent) <= SOCKETS


@pytest.mark.parametrize("size", [-1, 0, BEAT_BYTES + 1, 10**12])
def test_no_invitation_and_no_letter_chooses_how_long_a_beat_is(size: int, tmp_path: Path) -> None:
    """With PUT a beat is filled up to this size, in the device's memory."""
    honest = Upload(verb="PUT", url="https://s3.example/beat", fields={}, size=BEAT_BYTES)
    large = honest.model_copy(update={"size": size})
    invited = Invitation(name="weak-1", key="00" * 32, tier=None, letter="https://s3.example/letter", beat=honest)
    assert Invitation.of(invited.model_dump_json().encode(), "it") == invited
    wrong = invited.model_copy(update={"beat": large}).model_dump_json().encode()
    (tmp_path / "invitation").write_bytes(wrong)
    with pytest.raises(ConfigError, match=rf"beat: .*an upload of {size} bytes, from 1 to {BEAT_BYTES} are expected"):
        agent_line.invitation_of(str(tmp_path / "invitation"))
    letter = Letter(name="weak-1", number=0, beat=honest).model_copy(update={"beat": large}).signed("00" * 32)
    with pytest.raises(IntegrityError, match=f"an upload of {size} bytes"):
        read_letter(letter.text(), "00" * 32, 0)


def test_no_loan_chooses_how_long_a_manifest_is(tmp_path: Path) -> None:
    """An update's file is bounded where it is filled up (`pieces.padded`)."""
    order = WorkOrder(0, 3, FULL, {}, 0, 0)
    plan, key = RoundPlan(0, (order,)), "rounds/00000/updates/3.json"
    most = manifest_bytes(order)
    store = FolderStore(tmp_path)
    Mailbox(store, lengths={key: most}).put_outcome(plan, replace(failure_of(order), client=3))
    assert len(store.get(key)) == most
    with pytest.raises(ClientError, match=f"a manifest of {10**12} bytes is asked for"):
        Mailbox(store, lengths={key: 10**12}).put_outcome(plan, replace(failure_of(order), client=3))
