"""S3 servers to test against: moto and, where it is installed, a real one (Ceph's radosgw)."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3.session
import pytest

from tests.harness.moto_server import moto
from tests.harness.world import two_free_ports

SCRIPT = Path(__file__).with_name("radosgw")
BUCKET = "runs"


@pytest.fixture(scope="module", params=["moto", "radosgw"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its kind; the environment points to it."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
        if request.param == "moto":
            given = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
            given["AWS_ENDPOINT_URL"] = ends.enter_context(moto())
        else:
            if shutil.which("radosgw") is None:
                pytest.skip("radosgw is not installed (tests/s3/radosgw says how)")
            folder = tmp_path_factory.mktemp("rgw")
            port = two_free_ports(7000)
            told = subprocess.run([SCRIPT, "start", folder, str(port)], capture_output=True, text=True, check=True)
            given = dict(pair.split("=", 1) for pair in told.stdout.removeprefix("export ").split())
            ends.callback(subprocess.run, [SCRIPT, "stop", folder], check=True)
            given["CEPH_CONF"] = str(folder / "ceph.conf")  # for radosgw-admin

        for name, value in given.items():
            patch.setenv(name, value)
        boto3.session.Session(region_name="us-east-1").client("s3").create_bucket(Bucket=BUCKET)
        yield str(request.param)


REFUSALS = {
    403: b"<Error><Code>AccessDenied</Code><Message>the key was revoked</Message></Error>",
    429: b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>",
}


@dataclass
class Proxy:
    """Stands between the store and the server. `fault` maps (verb, headers) of a request to its fate: None (passed on),
    an HTTP status, `cut` (no response), `lost` (executed, but no response), `half` (of the response's body), `slow`."""

    address: str = ""
    fault: Callable[[str, Any], int | str | None] = field(default=lambda verb, headers: None)
    met: list[int | str] = field(default_factory=list)


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    there, found = urlsplit(os.environ["AWS_ENDPOINT_URL"]), Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = found.fault(self.command, self.headers)
            if fault is not None:
                found.met.append(fault)
            if fault == "slow":
                time.sleep(0.2)
            if isinstance(fault, int):
                self._respond(fault, {}, REFUSALS.get(fault, b""))
                return
            if fault == "cut":
                self.close_connection = True
                return
            connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))  # the Host too, which is signed
            response = connection.getresponse()
            value = response.read()
            connection.close()
            if fault == "lost":
                self.close_connection = True
                return
            half = fault == "half" and self.command == "GET"
            self._respond(response.status, dict(response.getheaders()), value, half)

        def _respond(self, status: int, headers: dict[str, str], value: bytes, half: bool = False) -> None:
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
            """Log nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
    found.address = f"http://127.0.0.1:{listener.server_port}"
    yield found
    listener.shutdown()
