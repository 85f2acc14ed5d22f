"""An S3 server that errs, hangs, breaks off or takes the keys away, in the middle of a run."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.storage import s3
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store

MODE: dict[str, Any] = {"keep_updates": True, "stop": 3}
SAID = {
    403: b"<Error><Code>AccessDenied</Code><Message>the key was revoked</Message></Error>",
    429: b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>",
}


@dataclass
class Proxy:
    """Between the store and the server. `fault` says of each request what befalls it: None, an HTTP status, `cut` (no
    answer), `lost` (done, but no answer), `half` (of the answer's body), `slow`."""

    address: str = ""
    fault: Callable[[], int | str | None] = field(default=lambda: None)
    met: list[int | str] = field(default_factory=list)


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    if server != "moto":
        pytest.skip("a signature holds for one address: only moto can be met through another")
    import os

    there = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    found = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = found.fault()
            if fault is not None:
                found.met.append(fault)
            if fault == "slow":
                time.sleep(0.2)
            if isinstance(fault, int):
                self._answer(fault, {}, SAID.get(fault, b""))
                return
            if fault == "cut":
                self.close_connection = True
                return
            connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            value = answer.read()
            connection.close()
            if fault == "lost":
                self.close_connection = True
                return
            self._answer(answer.status, dict(answer.getheaders()), value, fault == "half" and self.command == "GET")

        def _answer(self, status: int, headers: dict[str, str], value: bytes, half: bool = False) -> None:
            self.send_response(status)
            for name, text in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, text)
            self.send_header("Content-Length", headers.get("Content-Length", str(len(value))))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(value[: len(value) // 2] if half else value)
            self.close_connection = self.close_connection or half

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        def log_message(self, *_: object) -> None:
            """Quiet."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
    found.address = f"http://127.0.0.1:{listener.server_port}"
    yield found
    listener.shutdown()


def quick_retries(patch: pytest.MonkeyPatch) -> None:
    """As many as ever, but without waiting seconds in between."""
    from botocore.retries.standard import ExponentialBackoff

    patch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.01)


def test_run_survives_errors_timeouts_and_broken_answers(
    job: Any, proxy: Proxy, new_store: Callable[[], Store], timeless: Callable[[Store], list[Any]],
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One request in eight goes wrong, in all ways; the run ends as if none had."""
    quick_retries(monkeypatch)
    undisturbed = new_store()
    expected, rng = job.federate(undisturbed, **MODE), random.Random(7)
    ways: list[int | str] = [500, 503, 429, "cut", "lost", "half", "slow"]
    proxy.fault = lambda: rng.choice(ways) if rng.random() < 1 / 8 else None
    store = S3Store("s3://runs/flaky", proxy.address)
    assert job.federate(store, **MODE) == expected
    assert timeless(store) == timeless(undisturbed)
    assert len(proxy.met) > 10 and len(set(proxy.met)) >= 5


@pytest.mark.parametrize("after", [3, 11, 24, 40])
def test_a_revoked_key_stops_the_run_and_a_new_one_goes_on(
    job: Any, proxy: Proxy, new_store: Callable[[], Store], timeless: Callable[[Store], list[Any]], after: int
) -> None:
    undisturbed = new_store()
    expected, left = job.federate(undisturbed, **MODE), [after]

    def revoked() -> int | None:
        left[0] -= 1
        return 403 if left[0] < 0 else None

    proxy.fault = revoked
    store = S3Store(f"s3://runs/revoked-{after}", proxy.address)
    said = r"AccessDenied the key was revoked\. The credentials may not do this.* then go on with --resume"
    with pytest.raises(EnvironmentFailure, match=said):
        job.federate(store, **MODE)
    proxy.fault = lambda: None
    assert job.federate(store, **MODE) == expected
    assert timeless(store) == timeless(undisturbed)


def test_a_server_that_hangs_is_given_up_after_a_bounded_time(
    job: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_retries(monkeypatch)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    proxy.fault = lambda: "cut"
    with pytest.raises(EnvironmentFailure, match=r"cannot be reached.* then go on with --resume"):
        job.federate(S3Store("s3://runs/hanging", proxy.address), **MODE)
    assert len(proxy.met) == 2
