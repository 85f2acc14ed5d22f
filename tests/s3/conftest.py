"""S3 servers to test against: moto and, where it is installed, a real one (Ceph's radosgw)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3.session
import pytest

from tests.harness.moto_server import moto
from tests.harness.web import Request, Server, answering, forward, serving
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
    found = Proxy()

    def pass_on(request: Request) -> None:
        body = request.body()
        fault = found.fault(request.command, request.headers)
        if fault is not None:
            found.met.append(fault)
        if fault == "slow":
            time.sleep(0.2)
        if isinstance(fault, int):
            request.respond(fault, REFUSALS.get(fault, b""))
            return
        if fault == "cut":
            request.close_connection = True
            return
        status, value, headers = forward(request, body, os.environ["AWS_ENDPOINT_URL"])
        if fault == "lost":
            request.close_connection = True
            return
        half = fault == "half" and request.command == "GET"
        request.respond(status, value[: len(value) // 2] if half else value, headers)
        request.close_connection = request.close_connection or half

    with serving(pass_on, protocol="HTTP/1.1") as found.address:
        yield found


@pytest.fixture
def scripted() -> Iterator[Server]:
    with answering(body="whole") as found:
        yield found
