"""Which certificates of an HTTPS server a device accepts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.remote.messages import HEARTBEAT, HEARTBEAT_BYTES, MESSAGE, Heartbeat
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload
from flexfleet.worker import server as worker_program
from flexfleet.worker.mailbox import WorkerMailbox, device_of, read_invitation
from tests.harness.stores import MemoryStore
from tests.harness.tls import certificates
from tests.harness.web import Values, serving_values

SECRET = "X-Amz-Signature=planted"


@dataclass(frozen=True)
class AtUrls(Mailboxes):
    """Mailboxes that devices reach at an address."""

    base: str = ""

    def urls(self, name: str) -> tuple[str | None, Upload | None]:
        url = f"{self.base}/{name}/{HEARTBEAT}?{SECRET}"
        return f"{self.base}/{name}/{MESSAGE}?{SECRET}", Upload(verb="PUT", url=url, fields={}, size=HEARTBEAT_BYTES)


class Server:
    """Has the mailbox of a device, weak-1."""

    def __init__(self, values: Values, folder: Path) -> None:
        self.values, self.asked = values, values.asked
        mailboxes = AtUrls(MemoryStore(values.files), base=values.url)
        invited = mailboxes.invite(Registry(MemoryStore()), "weak", None)
        self.folder, self.file = folder / "device", folder / "weak-1.json"
        self.file.write_text(invited.model_dump_json())

    def agent(self) -> None:
        """Run the device until the server has been silent for half a second."""
        device, folder = device_of(str(self.file), self.folder)
        worker: Any = worker_program.Server(WorkerMailbox(FolderStore(folder), device, "00" * 8), sys.exit)
        worker.serve(0.5, False)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat.model_validate_json(self.values.files[f"weak-1/{HEARTBEAT}"])


@pytest.fixture(params=[(0, 1)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """The parameters are the first and the last day of its certificate."""
    _, own = certificates(tmp_path, days=request.param)
    with serving_values(own) as values:
        yield Server(values, tmp_path)


@pytest.fixture
def trusted(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))


def test_restarted_device_has_its_id(server: Server, trusted: None) -> None:
    server.agent()
    first = server.heartbeat()
    assert first.name == "weak-1" and first.state == "idle"
    server.agent()
    again = server.heartbeat()
    assert again.id == first.id and again.number != first.number


def test_invitation_is_read_from_an_https_address_only(server: Server, trusted: None) -> None:
    server.values.files["weak-1.json"] = server.file.read_bytes()
    assert read_invitation(f"{server.values.url}/weak-1.json").name == "weak-1"
    for where in (f"{server.values.url}/redirected.json", "http://example.org/weak-1.json"):
        with pytest.raises(ConfigError):
            read_invitation(where)


def test_messages_of_an_untrusted_server_are_not_read(server: Server, caplog: Any) -> None:
    """The device continues to poll, because the server may be fixed."""
    server.agent()
    assert server.asked == []
    assert "SSL_CERT_FILE" in caplog.text and "planted" not in caplog.text


def test_certificate_of_another_host_is_refused(server: Server, trusted: None) -> None:
    server.file.write_text(server.file.read_text().replace("127.0.0.1", "localhost"))
    server.agent()
    assert server.asked == []


@pytest.mark.parametrize("server", [(1, 2), (-2, -1)], indirect=True, ids=["not yet", "not any more"])
def test_wrong_clock_is_named(server: Server, trusted: None, caplog: Any) -> None:
    """A Raspberry Pi starts in 1970 if it finds no time server."""
    server.agent()
    assert server.asked == [] and "clock" in caplog.text
