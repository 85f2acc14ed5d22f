"""A device calls its own store and no other address, whatever its coordinator names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.exchange.assignment import Assignment
from fl_engine.exchange.letters import BEAT_BYTES, Beat, Invitation, Letter, Loan, Probe, check_own
from fl_engine.storage.urls import Upload
from flexfleet.steps import agent

KEY = "0b" * 32


@dataclass
class Server:
    """Answers GET with `values`, or with a redirect to `elsewhere`, and stores what is sent."""

    url: str = ""
    values: dict[str, bytes] = field(default_factory=dict)
    elsewhere: str | None = None
    asked: list[str] = field(default_factory=list)
    sent: dict[str, bytes] = field(default_factory=dict)


@pytest.fixture
def serve() -> Iterator[Callable[[], Server]]:
    with ExitStack() as stack:

        def started() -> Server:
            found = Server()

            class Answers(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    found.asked.append(self.path)
                    value = found.values.get(self.path)
                    away = found.elsewhere if value is None else None
                    self.send_response(302 if away else 404 if value is None else 200)
                    if away:
                        self.send_header("Location", away)
                    self.send_header("Content-Length", str(len(value or b"")))
                    self.end_headers()
                    self.wfile.write(value or b"")

                def do_PUT(self) -> None:
                    found.asked.append(self.path)
                    found.sent[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

                def log_message(self, *_: Any) -> None:
                    pass

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Answers))
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            stack.callback(server.shutdown)
            found.url = f"http://127.0.0.1:{server.server_port}"
            return found

        yield started


def beat_at(url: str) -> Upload:
    return Upload(verb="PUT", url=f"{url}/beat", fields={}, size=BEAT_BYTES)


def loan(url: str, **lie: Any) -> Loan:
    keys = ("site/run.json", "site/pool.json")
    told = {"reads": {key: f"{url}/{key}" for key in keys}, "site": dict.fromkeys(keys, f"{'0' * 64}:9"), **lie}
    told["site"] = {key.removeprefix("site/"): told["site"][key] for key in keys}
    return Loan(id="1f" * 8, seconds=60, assignment=Assignment(round=0, clients=(3,), keys={3: KEY}, **told))


LIES: dict[str, Callable[[Server, str], dict[str, Any]]] = {
    "the next letter": lambda own, evil: {"letter": f"{evil}/letter"},
    "the heartbeat": lambda own, evil: {"beat": beat_at(evil)},
    "the lease": lambda own, evil: {"sign": f"{evil}/lease"},
    "the lease in a store": lambda own, evil: {"sign": "s3://evil/lease"},
    "a download": lambda own, evil: {"loan": loan(evil)},
    "a download without a port": lambda own, evil: {"loan": loan("http://127.0.0.1")},
    "an upload": lambda own, evil: {"loan": loan(own.url, writes={"rounds/00000/updates/3.json": beat_at(evil)})},
    "a store": lambda own, evil: {"loan": loan(own.url, store="s3://evil/runs")},
    "a folder": lambda own, evil: {"loan": loan(own.url, store="/etc")},
    "a redirect": lambda own, evil: {"loan": loan(own.url)},
}


@pytest.mark.parametrize("lie", LIES)
def test_device_calls_no_other_server_than_its_stores(
    lie: str, serve: Callable[[], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, evil = serve(), serve()
    monkeypatch.setenv("AWS_ENDPOINT_URL", evil.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    if lie == "a redirect":
        own.elsewhere = f"{evil.url}/site/run.json"
    at = {"letter": f"{own.url}/letter", "beat": beat_at(own.url)}
    (tmp_path / "invitation").write_text(Invitation(name="weak-1", key=KEY, tier=None, **at).model_dump_json())
    letter = Letter(name="weak-1", number=0, **{**at, **LIES[lie](own, evil.url)})  # type: ignore[arg-type]
    own.values["/letter"] = letter.signed(KEY).text()
    options = ["--once", "--silence=0.5", f"--invite={tmp_path / 'invitation'}", f"--folder={tmp_path / 'device'}"]
    assert agent.main(options) == 0
    assert evil.asked == []
    assert "/letter" in own.asked
    if letter.loan is not None:
        assert any("/site" in path for path in own.asked) == (lie == "a redirect")
        assert Beat.model_validate_json(own.sent["/beat"]).state == "gone"


@pytest.mark.parametrize("other", ["https://evil.example", "http://s3.example", "https://s3.example:8443"])
@pytest.mark.parametrize("part", ["beat", "probe"])
def test_invitation_names_one_server(part: str, other: str) -> None:
    good, bad = beat_at("https://s3.example"), beat_at(other)
    probe = Probe(read="https://s3.example/probe", write=good)
    invited = Invitation(name="a", key=KEY, tier=None, letter="https://s3.example:443/a", beat=good, probe=probe)
    assert Invitation.of(invited.model_dump_json().encode(), "it") == invited
    lie = {"beat": bad, "probe": probe.model_copy(update={"write": bad})}[part]
    with pytest.raises(ConfigError):
        Invitation.of(invited.model_copy(update={part: lie}).model_dump_json().encode(), "it")


@pytest.mark.parametrize("folder", ["/home/pi/läufe/.agents/weak-1", "s3://bucket/some/prefix/.agents/weak-1"])
def test_device_with_a_folder_stays_in_its_place(folder: str) -> None:
    place = folder.removesuffix("/.agents/weak-1")
    for own in (place, f"{place}/run", f"{place}/compared/run-s0", f"{place}/.agents/lease"):
        check_own(own, None, folder)
    for other in (f"{place}2/run", f"{place}/../other", "s3://bucket/other", "https://evil.example", "/etc", ""):
        with pytest.raises(ConfigError):
            check_own(other, None, folder)
