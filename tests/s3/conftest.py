"""S3 servers to test against: moto and, where it is installed, a real one (Ceph's radosgw)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3.session
import pytest
from moto.server import ThreadedMotoServer

SCRIPT = Path(__file__).with_name("radosgw")
BUCKET = "runs"


@pytest.fixture(scope="module", params=["moto", "radosgw"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its kind; the environment points to it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "moto":
            moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
            moto.start()
            host, port = moto.get_host_and_port()
            given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
            given |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
            stop = moto.stop
        else:
            if shutil.which("radosgw") is None:
                pytest.skip("radosgw is not installed (tests/s3/radosgw says how)")
            folder = tmp_path_factory.mktemp("rgw")
            port = 7000 + os.getpid() % 400 * 2
            told = subprocess.run([SCRIPT, "start", folder, str(port)], capture_output=True, text=True, check=True)
            given = dict(pair.split("=", 1) for pair in told.stdout.removeprefix("export ").split())
            given["CEPH_CONF"] = str(folder / "ceph.conf")  # for radosgw-admin

            def stop() -> None:
                subprocess.run([SCRIPT, "stop", folder], check=True)

        for name, value in given.items():
            patch.setenv(name, value)
        try:
            boto3.session.Session(region_name="us-east-1").client("s3").create_bucket(Bucket=BUCKET)
            yield str(request.param)
        finally:
            stop()
