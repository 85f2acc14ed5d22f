"""A nightly regression run that fails, or ends without a verdict, calls the webhook."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from fl_engine.core.errors import GateFailed, Stopped, UnreachableAddress
from flexfleet.experiments import webhook
from tests.harness.web import Server, answering


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with answering(Location="/elsewhere/pl4nted") as server:
        monkeypatch.setenv(webhook.VARIABLE, f"{server.url}/hooks/pl4nted")
        yield server


def texts(listener: Server) -> list[str]:
    return [json.loads(body)["text"] for _, _, body in listener.seen]


def test_webhook_gets_no_password(listener: Server) -> None:
    webhook.call("failed: see http://me:pl4nted@mlflow:5000/#/1\nand postgresql://host/db?password=pl4nted")
    assert texts(listener) == ["failed: see http://mlflow:5000/#/1\nand postgresql://host/db?password=..."]


@pytest.mark.parametrize("how", ["refused", "gone", "no address"])
def test_webhook_failure_is_a_warning_without_the_address(
    how: str, listener: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener.status = 403
    if how != "refused":
        monkeypatch.setenv(webhook.VARIABLE, "http://127.0.0.1:9/pl4nted" if how == "gone" else "pl4nted")
    with caplog.at_level(logging.WARNING, "flexfleet"):
        webhook.call("failed", backoff_s=(0.0, 0.0))
    (line,) = caplog.messages
    assert "pl4nted" not in line
    assert len(listener.seen) == (3 if how == "refused" else 0)


def test_webhook_does_not_follow_redirects(listener: Server, caplog: pytest.LogCaptureFixture) -> None:
    listener.status = 307
    webhook.call("failed", backoff_s=())
    assert [path for path, *_ in listener.seen] == ["/hooks/pl4nted"] and "HTTP 307" in caplog.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            UnreachableAddress("http://m: gone"),
            "has no verdict: UnreachableAddress: http://m: gone",
        ),
        (ZeroDivisionError("of http://me:pl4nted@host\nand"), "has no verdict: ZeroDivisionError: of http://host"),
        (GateFailed("full is worse"), "failed: GateFailed: full is worse"),
        (Stopped("on request"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_webhook_gets_the_error_that_ends_a_run(listener: Server, error: Exception, said: str | None) -> None:
    with pytest.raises(type(error)), webhook.reported_errors("n"):
        raise error
    assert texts(listener) == ([] if said is None else [f"n {said}"])


def test_regress_reports_an_error_to_the_webhook(listener: Server, flexfleet: Any, own_folder: None) -> None:
    assert flexfleet("regress", "--suite", "nope", "--id", "n").code == 2
    assert texts(listener)[0].startswith("n has no verdict: ConfigError: ")
