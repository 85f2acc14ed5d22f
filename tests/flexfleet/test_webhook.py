"""A night that has failed, or has ended without a verdict, tells whoever listens."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, UnreachableAddress
from flexfleet.experiments import nightly, webhook
from flexfleet.experiments.compare import RunsFailed


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What was posted, and the status that is answered."""
    found: dict[str, Any] = {"posted": [], "status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found["posted"].append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(found["status"])
            self.send_header("Location", "/elsewhere/pl4nted")
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


def test_no_password_is_posted(listener: dict[str, Any]) -> None:
    webhook.call("failed: see http://me:pl4nted@mlflow:5000/#/1\nand postgresql://host/db?password=pl4nted")
    ((_, _, posted),) = listener["posted"]
    assert posted == {"text": "failed: see http://mlflow:5000/#/1\nand postgresql://host/db?password=..."}


@pytest.mark.parametrize("how", ["refused", "gone", "no address"])
def test_webhook_failure_is_a_warning_without_the_address(
    how: str, listener: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener["status"] = 403
    if how != "refused":
        monkeypatch.setenv(webhook.VARIABLE, "http://127.0.0.1:9/pl4nted" if how == "gone" else "pl4nted")
    monkeypatch.setattr(webhook, "AGAIN_S", (0.0, 0.0))
    with caplog.at_level(logging.WARNING, "flexfleet"):
        webhook.call("failed")
    (line,) = caplog.messages
    assert "pl4nted" not in line
    assert len(listener["posted"]) == (3 if how == "refused" else 0)


def test_a_redirection_is_not_followed(
    listener: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener["status"] = 307
    monkeypatch.setattr(webhook, "AGAIN_S", ())
    webhook.call("failed")
    assert [path for path, *_ in listener["posted"]] == ["/hooks/pl4nted"] and "HTTP 307" in caplog.text


# ------------------------------------------------------------------------------------------ without a verdict
ENDS: dict[str, tuple[str, Exception, str]] = {
    "the suite is wrong": ("prepare", ConfigError("no such suite"), "ConfigError: no such suite"),
    "MLflow is away": ("prepare", UnreachableAddress("MLflow at http://m: gone"), "MLflow at http://m: gone"),
    "a run has failed": ("regress", RunsFailed("all_large-s0 failed", 1), "RunsFailed: all_large-s0 failed"),
    "a crash": ("regress", ZeroDivisionError("of http://me:pl4nted@host\nand more"), "ZeroDivisionError: of http://host"),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_night_that_ends_without_a_verdict_tells_why(
    how: str, listener: dict[str, Any], flexfleet: Any, monkeypatch: pytest.MonkeyPatch, own_folder: None
) -> None:
    name, error, said = ENDS[how]

    def ends(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(nightly, "prepare", lambda *_, **__: SimpleNamespace(folder="runs/n"))
    monkeypatch.setattr(nightly, name, ends)
    with suppress(ZeroDivisionError):
        assert flexfleet("regress", "--id", "n").code == getattr(error, "exit_code", None)
    ((_, _, posted),) = listener["posted"]
    assert posted["text"].startswith("n has no verdict: ") and posted["text"].endswith(said)
