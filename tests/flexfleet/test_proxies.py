"""Proxies and regions: everything that leaves the machine uses the settings that boto3 and requests use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3.session
import pytest

from fl_engine.core.errors import ConfigError, EnvironmentFailure, Refused, Unreachable
from fl_engine.storage import probe
from fl_engine.storage.proxies import proxy_of
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Requests, UrlStore
from flexfleet.experiments import webhook
from flexfleet.kubeflow.submit import submit
from tests.harness.moto_server import KEYS, moto
from tests.harness.web import Request, answering, forward, proxying, serving

USER = "ann:p@ss/word"
QUOTED = "ann:p%40ss%2Fword"
REGION = "eu-central-1"
ALL = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALL, *map(str.lower, ALL), "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def regional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a server that accepts only signatures for REGION, which is in the configuration file."""
    with moto() as server:

        def answer(request: Request) -> None:
            body = request.body()
            signed = f"{request.path} {request.headers.get('Authorization')}".encode() + body
            scopes = set(re.findall(rb"\d{8}(?:/|%2F)([a-z0-9-]+)(?:/|%2F)s3", signed))
            if scopes - {REGION.encode()}:
                request.respond(400, b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region is wrong"
                                b"</Message></Error>")  # fmt: skip
            else:
                request.respond(*forward(request, body, server))

        with serving(answer) as address:
            (tmp_path / "config").write_text(f"[default]\nregion = {REGION}\n")
            given = {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_CONFIG_FILE": str(tmp_path / "config")}
            for name, value in {**given, "FLEXFLEET_S3_UNCHECKED": "1"}.items():
                monkeypatch.setenv(name, value)
            place = {"LocationConstraint": REGION}
            client = boto3.session.Session().client("s3")
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):  # all of moto's servers share buckets
                client.create_bucket(Bucket="regional", CreateBucketConfiguration=place)
            yield address


def test_region_of_the_configuration_file_is_used(regional: str) -> None:
    store = S3Store("s3://regional/all")
    assert probe.upload_verb(store) == "POST"
    store.put("key", b"value")
    assert UrlStore({"key": store.presign("key", 60)}, {}).get("key") == b"value"


def test_wrong_region_is_named_by_the_probe(regional: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store("s3://regional/all")
    store.put("key", b"value")  # boto3 could correct a region by itself
    monkeypatch.setenv("FLEXFLEET_SIGNING_AWS_REGION", "us-east-1")
    with pytest.raises(EnvironmentFailure, match="AWS_REGION"):
        probe.upload_verb(S3Store("s3://regional/all"))


@pytest.fixture
def proxy(regional: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A proxy with a password, which alone knows the server store.invalid."""
    with proxying({"store.invalid": regional}, USER) as (address, accepted):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid:9000")
        monkeypatch.setenv("HTTP_PROXY", address.replace("//", f"//{QUOTED}@"))
        yield address, accepted


def test_store_urls_and_uploads_use_the_proxy(proxy: tuple[str, list[str]]) -> None:
    store = S3Store("s3://regional/all")
    assert probe.upload_verb(store) == "POST"
    for verb in ("POST", "PUT"):
        client = UrlStore({verb: store.presign(verb, 60)}, {verb: store.upload(verb, 5, 60, verb)})  # type: ignore[arg-type]
        client.put(verb, b"value")
        assert client.get(verb) == store.get(verb) == b"value"


def test_missing_proxy_password_is_named(proxy: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    url = S3Store("s3://regional/all").presign("key", 60)
    monkeypatch.setenv("HTTP_PROXY", proxy[0])
    with pytest.raises(Refused, match="HTTP_PROXY"):
        S3Store("s3://regional/all").put("key", b"value")
    with pytest.raises(Unreachable, match="HTTP_PROXY") as told:
        UrlStore({"key": url}, {}).get("key")
    assert "Signature" not in str(told.value)


def test_https_opens_a_tunnel_with_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying({}, USER) as (address, accepted):
        monkeypatch.setenv("HTTPS_PROXY", address.replace("//", f"//{QUOTED}@"))
        with pytest.raises(Unreachable):
            UrlStore({"key": "https://store.invalid/key"}, {}, within_s=1).get("key")
    assert set(accepted) == {"CONNECT store.invalid:443"}


def test_submit_and_webhook_use_the_proxy(kubeflow: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with answering() as hook, proxying({"kfp.invalid": kubeflow[1], "hook.invalid": hook.url}, USER) as (address, _):
        monkeypatch.setenv("http_proxy", address.replace("//", f"//{QUOTED}@"))
        assert submit("train", {}, host="http://kfp.invalid").run_id == "r1"
        monkeypatch.setenv("FLEXFLEET_WEBHOOK", "http://hook.invalid/x")
        webhook.call("text")
        assert len(hook.seen) == 1


@pytest.mark.parametrize(
    ("excluded", "host", "is_used"),
    [
        ("", "a.org", True),
        ("*", "a.org", False),
        ("a.org", "b.a.org", False),
        (".a.org", "b.a.org", False),
        ("a.org:81", "a.org", True),
        ("b.org, a.org:80", "a.org:80", False),
        ("10.0.0.0/8", "10.1.2.3", False),
        ("10.0.0.0/8", "11.1.2.3", True),
    ],
)
def test_no_proxy_excludes_servers(excluded: str, host: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", excluded)
    assert proxy_of(f"http://{host}/x") == ({"proxy_url": "http://proxy:3128", "proxy_headers": {}} if is_used else {})


@pytest.mark.parametrize("address", ["socks5://proxy:1", "http://", "http://proxy:port"])
def test_malformed_proxy_is_rejected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)
    with pytest.raises(ConfigError) as told:
        Requests().ask("GET", "https://a.org")
    assert told.value.path == "HTTPS_PROXY"
