"""S3 servers to test against: moto and, where it is installed, a real one (Ceph's radosgw)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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
