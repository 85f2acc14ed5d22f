"""An S3 server that cannot be reached is worth another try; an invalid address is not."""

from __future__ import annotations

import socket

import pytest

from fl_engine.core.errors import ConfigError, Unreachable
from fl_engine.storage.s3 import S3Store


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")


@pytest.mark.parametrize("is_proxy", [False, True], ids=["server", "proxy"])
def test_unreachable_server_may_answer_the_next_try(monkeypatch: pytest.MonkeyPatch, is_proxy: bool) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{found.getsockname()[1]}"
    if is_proxy:
        monkeypatch.setenv("http_proxy", closed)
    store = S3Store("s3://runs/x", "http://s3.nowhere.invalid:8333" if is_proxy else closed, hasty=True)
    for request in (lambda: store.get("key"), lambda: store.create("key", b"x"), lambda: store.list("lease/")):
        with pytest.raises(Unreachable):
            request()


@pytest.mark.parametrize("address", ["s3.flexfleet:8333", "s3.flexfleet", "ftp://s3", "http://:80", "http://s3:port"])
def test_invalid_address_is_a_wrong_parameter(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    for store in (S3Store("s3://runs/x"), S3Store("s3://runs/x", address)):
        with pytest.raises(ConfigError, match=address):
            store.get("key")
