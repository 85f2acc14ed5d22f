"""moto's S3 server, in threads of this process. All that are started here share what they hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import boto3.session
import pytest
from moto.moto_server.threaded_moto_server import MotoRequestHandler
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


@contextmanager
def moto() -> Iterator[str]:
    """Gives its address. It ends within 20 ms; moto's own ThreadedMotoServer takes half a second."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


@contextmanager
def opened(patch: pytest.MonkeyPatch, bucket: str, variables: Mapping[str, str] = KEYS) -> Iterator[str]:
    """A server with a bucket, to which the environment points. Give its address."""
    # moto does not check signatures.
    given = {"AWS_DEFAULT_REGION": "us-east-1", "FLEXFLEET_S3_UNCHECKED": "1", **variables}
    with moto() as endpoint:
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **given}.items():
            patch.setenv(name, value)
        boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
        yield endpoint


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a run store, which the environment's credentials open."""
    with opened(monkeypatch, "runs"):
        yield "s3://runs/all"
