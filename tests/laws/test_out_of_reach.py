"""An S3 server that nobody reaches is worth another try; one whose address is none is not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, Unreachable
from fl_engine.storage import s3
from fl_engine.storage.s3 import S3Store

SIGN: dict[str, Callable[[S3Store], Any]] = {
    "presign": lambda store: store.presign("key", 60),
    "form": lambda store: store.upload("key", 5, 60, "POST"),
    "put by URL": lambda store: store.upload("key", 5, 60, "PUT"),
}
ASK: dict[str, Callable[[S3Store], Any]] = {
    "get": lambda store: store.get("key"),
    "put": lambda store: store.put("key", b"x"),
    "create": lambda store: store.create("key", b"x"),
    "list": lambda store: store.list("lease/"),
    "delete": lambda store: store.delete("key"),
    "sweep": lambda store: store.sweep("rounds/"),
}
NO_HOST = "http://s3.nowhere.invalid:8333"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    monkeypatch.setattr(s3, "READS", 1)
    for name in ("http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")


@pytest.fixture(scope="module")
def closed() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *more: Any, **given: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *more, **given)

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", unknown)


@pytest.mark.parametrize("act", ASK)
@pytest.mark.parametrize("why", ["the connection is refused", "the name does not resolve", "the proxy is gone"])
def test_a_server_that_nobody_reaches_may_answer_the_next_try(
    closed: str, no_names: None, monkeypatch: pytest.MonkeyPatch, why: str, act: str
) -> None:
    if "proxy" in why:
        monkeypatch.setenv("http_proxy", closed)
    with pytest.raises(Unreachable, match=r"s3://runs/x.* cannot be reached: .*\. Check AWS_ENDPOINT_URL"):
        ASK[act](S3Store("s3://runs/x", closed if "refused" in why else NO_HOST))


@pytest.mark.parametrize("act", SIGN)
def test_role_without_fresh_credentials_is_unreachable(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "token").write_text("token")
    role = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": f"{tmp_path}/token"}
    for name, value in {**role, "AWS_ENDPOINT_URL_STS": closed, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unreachable, match=r"s3://runs/x/key cannot be reached"):
        SIGN[act](S3Store("s3://runs/x", "http://s3"))


@pytest.mark.parametrize("act", ASK | SIGN)
@pytest.mark.parametrize("address", ["s3.flexfleet:8333", "s3.flexfleet", "ftp://s3", "http://:80", "http://s3:port"])
def test_an_address_that_is_none_is_a_wrong_parameter(monkeypatch: pytest.MonkeyPatch, address: str, act: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    said = f" is http://host:port or https://host:port, got '{address}'"
    with pytest.raises(ConfigError, match=f"^AWS_ENDPOINT_URL{said}"):
        (ASK | SIGN)[act](S3Store("s3://runs/x"))
    with pytest.raises(ConfigError, match=f"^endpoint{said}"):
        (ASK | SIGN)[act](S3Store("s3://runs/x", address))
