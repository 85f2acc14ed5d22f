"""A device and an HTTPS server: which certificates it accepts, and an invitation at an address."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import HEARTBEAT, HEARTBEAT_BYTES, MESSAGE, Heartbeat
from fl_engine.remote.registry import Registry
from fl_engine.storage.urls import Upload
from flexfleet.worker import server as worker
from flexfleet.worker.mailbox import FILE
from tests.conftest import MemoryStore
from tests.harness.tls import Values, certificates, serving_values

SECRET = "X-Amz-Signature=planted"


@dataclass(frozen=True)
class AtUrls(Mailboxes):
    """Mailboxes that devices reach at an address."""

    base: str = ""

    def urls(self, name: str) -> tuple[str | None, Upload | None]:
        url = f"{self.base}/{name}/{HEARTBEAT}?{SECRET}"
        return f"{self.base}/{name}/{MESSAGE}?{SECRET}", Upload(verb="PUT", url=url, fields={}, size=HEARTBEAT_BYTES)


class Server:
    """Has the mailbox of a device, weak-1, and its invitation."""

    def __init__(self, values: Values, folder: Path, run: Callable[..., Any]) -> None:
        self.values, self.asked, self.folder, self._run = values, values.asked, folder, run
        self.invitation = f"{values.url}/invitation?{SECRET}"
        mailboxes = AtUrls(MemoryStore(values.files), base=values.url)
        invited = mailboxes.invite(Registry(MemoryStore()), "weak", None)
        values.files["invitation"] = invited.model_dump_json().encode()

    def agent(self, where: str = "") -> Any:
        return self._run("agent", "--invite", where or self.invitation, "--folder", str(self.folder))

    def heartbeat(self) -> Heartbeat:
        return Heartbeat.model_validate_json(self.values.files[f"weak-1/{HEARTBEAT}"])


@pytest.fixture(params=[(0, 1)])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flexfleet: Callable[..., Any]
) -> Iterator[Server]:
    """The parameters are the first and the last day of its certificate."""
    monkeypatch.setattr(worker, "SILENCE_S", 0.5)
    monkeypatch.setenv(worker.PROCESS, "00" * 8)
    _, own = certificates(tmp_path, days=request.param)
    with serving_values(own) as values:
        yield Server(values, tmp_path / "device", flexfleet)


@pytest.fixture
def trusted(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))


def test_invitation_at_an_address_is_needed_once(server: Server, trusted: None) -> None:
    done = server.agent()
    assert done.code == 0, done.err
    assert server.asked[:2] == ["invitation", f"weak-1/{MESSAGE}"]
    first = server.heartbeat()
    assert first.name == "weak-1" and first.state == "gone"
    server.values.statuses["invitation"] = 404
    assert server.agent().code == 0
    again = server.heartbeat()
    assert again.id == first.id and again.number != first.number
    (server.folder / FILE).unlink()
    done = server.agent()
    assert done.code == 2 and "HTTP 404" in done.err and "planted" not in done.err


@pytest.mark.parametrize(("status", "body"), [(302, b""), (200, b"<html>log in</html>"), (200, b"{" * 100_000)])
def test_address_without_an_invitation_is_refused(server: Server, trusted: None, status: int, body: bytes) -> None:
    server.values.statuses["invitation"], server.values.files["invitation"] = status, body
    done = server.agent()
    assert done.code == 2 and "planted" not in done.err
    assert server.asked == ["invitation"], "no other address is requested"


def test_untrusted_server_is_refused_at_once(server: Server) -> None:
    began = time.monotonic()
    done = server.agent()
    assert time.monotonic() - began < 10, "another try would not help"
    assert done.code == 6 and server.asked == [], "nothing was sent"
    assert "SSL_CERT_FILE" in done.err and "planted" not in done.err


def test_messages_of_an_untrusted_server_are_not_read(server: Server, tmp_path: Path, caplog: Any) -> None:
    """The invitation is a file. The device continues to poll, because the server may be fixed."""
    (tmp_path / "weak-1.json").write_bytes(server.values.files["invitation"])
    done = server.agent(str(tmp_path / "weak-1.json"))
    assert done.code == 0 and server.asked == []
    assert "SSL_CERT_FILE" in caplog.text and "planted" not in caplog.text


def test_certificate_of_another_host_is_refused(server: Server, trusted: None) -> None:
    done = server.agent(server.invitation.replace("127.0.0.1", "localhost"))
    assert done.code == 6 and server.asked == [] and "SSL_CERT_FILE" not in done.err


@pytest.mark.parametrize("server", [(1, 2), (-2, -1)], indirect=True, ids=["not yet", "not any more"])
def test_wrong_clock_is_named(server: Server, trusted: None) -> None:
    """A Raspberry Pi starts in 1970 if it finds no time server."""
    done = server.agent()
    assert done.code == 6 and server.asked == [] and "clock" in done.err
