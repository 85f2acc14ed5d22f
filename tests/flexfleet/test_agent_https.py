"""A device and an HTTPS server: whose certificates it takes, and an invitation by address."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Roster
from fl_engine.exchange.letters import BEAT, BEAT_BYTES, LETTER, Beat
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import Upload
from tests.harness.tls import certificates, serving

SECRET = "X-Amz-Signature=planted"


@dataclass(frozen=True)
class Served(Post):
    """Letters that devices reach at an address."""

    base: str = ""

    def ways(self, name: str) -> tuple[str | None, Upload | None]:
        beat = Upload(verb="PUT", url=f"{self.base}/{name}/{BEAT}?{SECRET}", fields={}, size=BEAT_BYTES)
        return f"{self.base}/{name}/{LETTER}?{SECRET}", beat


@dataclass
class Server:
    post: Post
    invitation: str
    authority: Path
    asked: list[str] = field(default_factory=list)
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By path, a status and a body: of what is no letter."""


@pytest.fixture(params=[(0, 1)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Holds the letters of a device, weak-1, and its invitation at an address."""
    letters = FolderStore(tmp_path / "letters")
    authority, own = certificates(tmp_path, days=request.param)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            found.asked.append(path)
            status, body = found.answers.get(path) or (200, letters.get(path))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            found.asked.append(path)
            letters.put(path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with serving(Answer, own) as port:
        base = f"https://127.0.0.1:{port}"
        post = Served(letters, Roster(FolderStore(tmp_path / "roster")), base=base)
        found = Server(post, f"{base}/invitation?{SECRET}", authority)
        found.answers["invitation"] = 200, post.invite("weak", None).model_dump_json().encode()
        yield found


@pytest.fixture
def agent(flexfleet: Callable[..., Any], tmp_path: Path) -> Callable[[str], Any]:
    return lambda where: flexfleet("agent", "--invite", where, "--folder", str(tmp_path / "device"), "--silence", "0.5")


def beat_of(server: Server) -> Beat:
    return Beat.model_validate_json(server.post.home.get("weak-1/beat.json"))


def test_an_invitation_by_address_makes_a_device(
    server: Server, agent: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads its letter, beats, says good-bye; and does so again when the invitation is not there any more."""
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
    done = agent(server.invitation)
    assert done.code == 0, done.err
    assert server.asked[:2] == ["invitation", "weak-1/letter.json"]
    first = beat_of(server)
    assert first.name == "weak-1" and first.state == "gone"
    server.answers["invitation"] = 404, b"gone"
    done = agent(server.invitation)
    assert done.code == 0, done.err
    assert beat_of(server).boot != first.boot
    (tmp_path / "device" / "agent.json").unlink()
    done = agent(server.invitation)
    assert done.code == 2 and "answers with HTTP 404: an invitation is expected" in done.err
    assert "planted" not in done.err


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (302, b"", "answers with HTTP 302: an invitation is expected"),
        (200, b"<html>log in</html>", "is no invitation"),
        (200, b"{" * 100_000, "is no invitation"),
    ],
)
def test_an_address_that_has_no_invitation_is_told(
    server: Server, agent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, said: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
    server.answers["invitation"] = status, body
    done = agent(server.invitation)
    assert done.code == 2 and said in done.err and "planted" not in done.err
    assert server.asked == ["invitation"], "no other address is asked"


# ------------------------------------------------------------------------------------------------- certificates
def test_a_server_whose_certificate_is_not_trusted_is_refused_at_once(
    server: Server, agent: Callable[[str], Any]
) -> None:
    began = time.monotonic()
    done = agent(server.invitation)
    assert time.monotonic() - began < 10, "asking again would not help"
    assert done.code == 6 and server.asked == [], "nothing was sent"
    assert "/invitation cannot be reached: its certificate is refused: unable to get local issuer" in done.err
    assert "let SSL_CERT_FILE name a file with its authority's certificate (PEM)" in done.err
    assert "planted" not in done.err


def test_letters_of_a_server_that_is_not_trusted_are_not_read(
    server: Server, agent: Callable[[str], Any], tmp_path: Path, caplog: Any
) -> None:
    """An invitation that came as a file. The device goes on asking: whoever serves may mend it."""
    (tmp_path / "weak-1.json").write_bytes(server.answers["invitation"][1])
    done = agent(str(tmp_path / "weak-1.json"))
    assert done.code == 0 and server.asked == []
    assert "no letter: GET the run store's letter.json" in caplog.text and "let SSL_CERT_FILE name" in caplog.text
    assert "no beat: PUT the run store's beat.json" in caplog.text and "planted" not in caplog.text


def test_a_certificate_of_another_host_is_refused(
    server: Server, agent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
    done = agent(server.invitation.replace("127.0.0.1", "localhost"))
    assert done.code == 6 and server.asked == []
    assert "Hostname mismatch" in done.err and "SSL_CERT_FILE" not in done.err


@pytest.mark.parametrize("server", [(1, 2), (-2, -1)], indirect=True, ids=["not yet", "not any more"])
def test_a_certificate_of_another_time_is_refused_and_the_clock_is_named(
    server: Server, agent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Raspberry Pi begins in 1970 where it finds no time server."""
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
    done = agent(server.invitation)
    assert done.code == 6 and server.asked == []
    assert "its certificate is refused" in done.err and "Is this machine's clock right?" in done.err
