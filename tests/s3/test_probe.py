"""The start check of a server: what a client can do with its signed URLs."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import urllib3

from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Upload, UrlStore, send
from tests.s3.conftest import Proxy

GUIDE = Path(__file__).parents[2] / "docs/guides/kubernetes/server-and-images.md"
UNSIGNED = (
    "another object as its source", "an ACL", "a grant", "a grant that takes the owner's", "a customer's key",
)  # fmt: skip


@pytest.fixture
def store(server: str, request: pytest.FixtureRequest) -> S3Store:
    return S3Store(f"s3://runs/Möbel 中 x/{request.node.name.replace('[', '-').rstrip(']')}")


@pytest.fixture
def real(server: str) -> None:
    if server != "radosgw":
        pytest.skip("moto holds nobody to anything")


def unsigned(verb: str, headers: Any) -> int | None:
    """As servers do that have no POST, and check that every `x-amz-` header of a presigned request is signed."""
    more = verb == "PUT" and any(name.lower().startswith("x-amz-") for name in headers)
    return 403 if "Authorization" not in headers and (verb == "POST" or more) else None


def test_a_server_is_trusted_with_what_it_was_seen_to_enforce(
    server: str, store: S3Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("rounds/probe/updates/left", b"by a coordinator that was killed")
    if server == "radosgw":
        assert probe.upload_verb(store) == "POST"
    else:
        with pytest.raises(EnvironmentFailure, match="FLEXFLEET_S3_UNCHECKED=1") as told:
            probe.upload_verb(store)
        holes = ("another key", "a wrong signature", "more bytes", "an ACL")
        for hole in (*(f"{verb} accepts {hole}" for verb in ("POST", "PUT") for hole in holes),
                     "GET works with a wrong signature", "PUT accepts another object as its source",
                     "PUT accepts a storage class"):  # fmt: skip
            assert hole in str(told.value)
        assert store.list("") == []
        monkeypatch.setenv("FLEXFLEET_S3_UNCHECKED", "1")
        assert probe.upload_verb(store) == "POST"
        assert "does not enforce signatures" in caplog.text
    assert store.list("") == []


def test_put_stays_for_servers_that_refuse_what_is_not_signed(real: None, proxy: Proxy, store: S3Store) -> None:
    behind = S3Store(store.uri(), proxy.address)
    proxy.fault = unsigned
    assert probe.upload_verb(behind) == "PUT"
    proxy.fault = lambda verb, headers: 403 if verb == "POST" and "Authorization" not in headers else None
    with pytest.raises(EnvironmentFailure) as told:
        probe.upload_verb(behind)
    for hole in UNSIGNED:
        assert f"PUT accepts {hole};" in str(told.value) or f"PUT accepts {hole})" in str(told.value)
    assert "wrong signature" not in str(told.value) and "more bytes" not in str(told.value)
    proxy.fault = lambda verb, headers: 403 if verb in ("POST", "PUT") and "Authorization" not in headers else None
    with pytest.raises(EnvironmentFailure, match="cannot upload"):
        probe.upload_verb(behind)
    assert store.list("") == []


def test_a_bucket_that_anybody_reads_is_refused(real: None, store: S3Store) -> None:
    client = boto3.session.Session(region_name="us-east-1").client("s3")
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::runs/*"}
    client.put_bucket_policy(Bucket="runs", Policy=json.dumps({"Version": "2012-10-17", "Statement": [allowed]}))
    try:
        with pytest.raises(EnvironmentFailure, match=r"GET works without a signature"):
            probe.upload_verb(store)
    finally:
        client.delete_bucket_policy(Bucket="runs")


def test_a_form_is_good_for_one_key_and_so_many_bytes(real: None, store: S3Store) -> None:
    upload = store.upload("update", 10, 60, "POST")
    pool = urllib3.PoolManager()
    assert send(pool, upload, b"0123456789").status == 201 and store.get("update") == b"0123456789"
    assert send(pool, upload, b"0123456789+").status == 400
    assert send(pool, upload, b"").status == 400
    for changed in ({"key": "runs/other"}, {"acl": "public-read"}, {"x-amz-meta-sha256": "0"}, {"tagging": "<x/>"}):
        other = upload.model_copy(update={"fields": upload.fields | changed})
        assert send(pool, other, b"x").status == 403, changed
    assert store.get("update") == b"0123456789"


def test_a_put_is_good_for_one_length(real: None, store: S3Store) -> None:
    urls = UrlStore({}, {"update": store.upload("update", 10, 60, "PUT")})
    urls.put("update", b"0123456789")
    assert store.get("update") == b"0123456789"
    for value in (b"0123456789+", b"012345678", b""):
        with pytest.raises(IntegrityError, match="HTTP 403"):
            urls.put("update", value)


def narrow() -> str:
    """The guide's policy, for a user `signer` and runs under s3://runs/signed."""
    blocks = re.findall(r"^```json\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (policy,) = (block for block in blocks if "flexfleet-signer" in block)
    for said, meant in {"123456789012:user/flexfleet-signer": ":user/signer", ":bucket/runs/": ":runs/signed/"}.items():
        assert said in policy
        policy = policy.replace(said, meant)
    return str(policy)


def test_narrower_credentials_sign_what_clients_get(real: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store("s3://runs/signed/a")
    store.put("secret/key", b"secret")
    store.put("site/run.json", b"told")
    monkeypatch.setenv("FLEXFLEET_SIGNING_AWS_ACCESS_KEY_ID", "signer")
    with pytest.raises(ConfigError, match="FLEXFLEET_SIGNING_AWS_SECRET_ACCESS_KEY"):
        probe.upload_verb(store)
    monkeypatch.setenv("FLEXFLEET_SIGNING_AWS_SECRET_ACCESS_KEY", "signers-secret")
    given = ("--uid=signer", "--display-name=signer", "--access-key=signer", "--secret=signers-secret")
    subprocess.run(["radosgw-admin", "user", "create", *given], check=True, capture_output=True)
    store = S3Store("s3://runs/signed/a")
    with pytest.raises(EnvironmentFailure, match="cannot be read"):
        probe.upload_verb(store)
    client = boto3.session.Session(region_name="us-east-1").client("s3")
    client.put_bucket_policy(Bucket="runs", Policy=narrow())
    try:
        assert probe.upload_verb(store) == "POST"
        keys = ("site/run.json", "secret/key")
        key = "rounds/00001/leases/ab/1.json"
        urls = UrlStore(
            {k: store.presign(k, 60) for k in keys},
            {k: store.upload(k, 100, 60, "POST") for k in (key, "rounds/00001/COMMITTED")},
        )
        assert urls.get("site/run.json") == b"told"
        urls.put(key, b"answer")
        assert store.get(key) == b"answer", "the coordinator reads what others have signed for"
        with pytest.raises(IntegrityError, match="HTTP 403"):
            urls.get("secret/key")
        with pytest.raises(IntegrityError, match="HTTP 403"):
            urls.put("rounds/00001/COMMITTED", b"forged")
    finally:
        client.delete_bucket_policy(Bucket="runs")


class _Stored(BaseHTTPRequestHandler):
    """Says of each upload the ETag that the plan has next."""

    plan: list[dict[str, str]] = []  # noqa: RUF012 - set by the test

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        step = dict(self.plan.pop(0))
        body = step.pop("body", "").encode()
        self.send_response(201)
        for name, text in {**step, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


VALUE = b"an update"
GOOD, BAD = hashlib.md5(VALUE).hexdigest(), "0" * 32
"""Its MD5, and another."""
KMS = {"x-amz-server-side-encryption": "aws:kms"}


@pytest.mark.parametrize(
    ("plan", "sends"),
    [
        ([{"ETag": f'"{GOOD}"'}], 1),
        ([{"body": f"<PostResponse><ETag>&quot;{GOOD}&quot;</ETag></PostResponse>"}], 1),
        ([{"ETag": f'"{BAD}"'}, {"body": f"<PostResponse><ETag>{BAD}</ETag></PostResponse>"}, {"ETag": GOOD}], 3),
        ([{"ETag": BAD}] * 3, None),
        ([{}], 1),
    ],
)
def test_an_upload_that_was_damaged_on_the_way_is_sent_again(plan: list[dict[str, str]], sends: int | None) -> None:
    _Stored.plan = list(plan)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _Stored)
    threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{listener.server_port}/"
    urls = UrlStore({}, {"update": Upload(verb="POST", url=url, fields={"key": "update"}, size=5)})
    try:
        if sends is None:
            with pytest.raises(IntegrityError):
                urls.put("update", VALUE)
        else:
            urls.put("update", VALUE)
            assert len(plan) - len(_Stored.plan) == sends
    finally:
        listener.shutdown()
