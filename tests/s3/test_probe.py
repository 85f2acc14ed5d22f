"""The start check of a server: what a client can do with its signed URLs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import boto3.session
import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import UrlStore
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
    with pytest.raises(EnvironmentFailure):
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
    with pytest.raises(ConfigError):
        probe.upload_verb(store)
    monkeypatch.setenv("FLEXFLEET_SIGNING_AWS_SECRET_ACCESS_KEY", "signers-secret")
    given = ("--uid=signer", "--display-name=signer", "--access-key=signer", "--secret=signers-secret")
    subprocess.run(["radosgw-admin", "user", "create", *given], check=True, capture_output=True)
    store = S3Store("s3://runs/signed/a")
    with pytest.raises(EnvironmentFailure):
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
        with pytest.raises(IntegrityError):
            urls.get("secret/key")
        with pytest.raises(IntegrityError):
            urls.put("rounds/00001/COMMITTED", b"forged")
    finally:
        client.delete_bucket_policy(Bucket="runs")
