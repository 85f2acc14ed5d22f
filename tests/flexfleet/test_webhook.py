"""A failed night tells whoever listens."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from flexfleet.nightly import webhook


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What was posted, and the status that is answered."""
    found: dict[str, Any] = {"posted": [], "status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found["posted"].append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(found["status"])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv(webhook.VARIABLE, f"http://127.0.0.1:{server.server_port}/hooks/pl4nted")
    yield found
    server.shutdown()


def test_the_text_is_posted_as_chats_take_it(listener: dict[str, Any]) -> None:
    webhook.call("failed: 1 of 4 figures")
    assert listener["posted"] == [("/hooks/pl4nted", "application/json", {"text": "failed: 1 of 4 figures"})]


def test_without_an_address_nothing_is_called(listener: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(webhook.VARIABLE)
    webhook.call("failed")
    assert listener["posted"] == []


@pytest.mark.parametrize("how", ["refused", "gone", "no address"])
def test_what_goes_wrong_is_a_warning_that_does_not_say_the_address(
    how: str, listener: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener["status"] = 403
    if how != "refused":
        monkeypatch.setenv(webhook.VARIABLE, "http://127.0.0.1:9/pl4nted" if how == "gone" else "pl4nted")
    monkeypatch.setattr(webhook, "AGAIN_S", (0.0, 0.0))
    with caplog.at_level(logging.WARNING, "flexfleet"):
        webhook.call("failed")
    (line,) = caplog.messages
    assert "was not told" in line and "pl4nted" not in line
    assert len(listener["posted"]) == (3 if how == "refused" else 0)
