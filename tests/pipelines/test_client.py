"""Errors of a Kubeflow server at each call of submit and nightly: one line, with the exit code and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexfleet.kubeflow import client, schedule, submit
from tests.pipelines.kubeflow import Spoil, drops, hangs, refuses, says

PAGE = b"<!doctype html><title>Log in to Your Account</title><form action=/dex/auth>"
SUBMIT = ("GET healthz", "GET pipelines", "POST pipelines/upload", "GET pipelines/*/versions",
          "POST pipelines/upload_version", "GET experiments", "POST experiments", "GET runs", "POST runs")  # fmt: skip
NIGHTLY = ("GET recurringruns", "POST recurringruns", "DELETE recurringruns/*")
FAULTS: dict[str, tuple[Spoil, int, str]] = {
    "401": (says(401, b"Jwt is expired", "text/plain"), 6, "Jwt is expired"),
    "403": (refuses(403, 7, "User 'x' is not authorized"), 6, "--namespace"),
    "404": (says(404, b"404 page not found", "text/plain"), 6, "path in --host"),
    "400": (refuses(400, 3, "Invalid input error: namespace is empty"), 2, "namespace is empty"),
    "503": (says(503, b"no healthy upstream", "text/plain"), 6, "not ready: 503"),
    "reset": (drops, 6, "cannot be reached"),
    "password": (refuses(400, 3, "postgresql://me:pl4nted@host/db"), 2, "postgresql://"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Any]) -> None:
    for module in (submit, schedule):
        monkeypatch.setattr(module, "checked", checked)
    monkeypatch.setattr(submit, "LOST_ANSWER_S", 0.0)


@pytest.mark.parametrize("call", (*SUBMIT, *NIGHTLY))
@pytest.mark.parametrize("fault", FAULTS)
def test_submit_reports_a_fault_of_a_call_in_one_line(
    kubeflow: tuple[Any, str], flexfleet: Any, call: str, fault: str
) -> None:
    server, host = kubeflow
    spoil, code, said = FAULTS[fault]
    if call == "DELETE recurringruns/*":
        server.experiments.append({"experiment_id": "e0", "display_name": "flexfleet"})
        server.recurring.append({"recurring_run_id": "old", "display_name": "flexfleet-nightly", "mode": "ENABLE"})
    server.spoils[call] = [spoil]
    argv = ("nightly",) if call in NIGHTLY else ("submit", "train")
    done = flexfleet(*argv, "--host", host)
    assert call in server.heard and done.code == code, done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and said in done.err
    assert "pl4nted" not in done.err and not server.runs
    posts = [each for each in server.heard if each.startswith("POST")]
    assert len(posts) == len(set(posts)), "nothing is created twice"


def test_submit_refuses_a_login_page(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    server, host = kubeflow
    server.spoils["GET healthz"] = [says(200, PAGE, "text/html")]
    done = flexfleet("submit", "train", "--host", host)
    assert done.code == 6 and "does not answer as the API" in done.err and "log in again" in done.err


def test_submit_ends_if_the_server_never_answers(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.setattr(client, "TIMEOUT_S", (1.0, 0.2))
    server.spoils["GET pipelines"] = [hangs]
    done = flexfleet("submit", "train", "--host", host)
    assert done.code == 6 and "timed out" in done.err


@pytest.mark.parametrize(
    "address",
    ["http://", "ftp://kubeflow", "http://host:99999", "http://ho st", "http://localhost/#/runs", "http://[::1"],
)
@pytest.mark.parametrize("name", ["KF_PIPELINES_ENDPOINT", "--host"])
def test_submit_refuses_a_malformed_address(
    flexfleet: Any, monkeypatch: pytest.MonkeyPatch, address: str, name: str
) -> None:
    if name == "KF_PIPELINES_ENDPOINT":
        monkeypatch.setenv(name, address)
    done = flexfleet("submit", "train", *([] if name == "KF_PIPELINES_ENDPOINT" else ["--host", address]))
    assert done.code == 2 and f"{name} must be the address" in done.err
