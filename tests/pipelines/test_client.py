"""An error of a Kubeflow server in any call of submit and nightly is one line with an exit code."""

from __future__ import annotations

from typing import Any

import pytest

from fl_engine.core.errors import Unreachable
from flexfleet.kubeflow.client import connected
from tests.harness.processes import refused
from tests.pipelines.kubeflow import Spoil, drops, hangs, refuses, responds

PAGE = b"<!doctype html><title>Log in to Your Account</title><form action=/dex/auth>"
SUBMIT = ("GET healthz", "GET pipelines", "POST pipelines/upload", "GET pipelines/*/versions",
          "POST pipelines/upload_version", "GET experiments", "POST experiments", "POST runs")  # fmt: skip
NIGHTLY = ("GET recurringruns", "POST recurringruns", "POST recurringruns/*")
FAULTS: dict[str, tuple[Spoil, int, str]] = {  # response, exit code, part of the message
    "401": (responds(401, b"Jwt is expired", "text/plain"), 6, "Jwt is expired"),
    "403": (refuses(403, 7, "User 'x' is not authorized"), 6, "--namespace"),
    "404": (responds(404, b"404 page not found", "text/plain"), 6, "path in --host"),
    "400": (refuses(400, 3, "Invalid input error: namespace is empty"), 2, "namespace is empty"),
    "503": (responds(503, b"no healthy upstream", "text/plain"), 6, "not ready: 503"),
    "reset": (drops, 6, "cannot be reached"),
    "password": (refuses(400, 3, "postgresql://me:pl4nted@host/db"), 2, "postgresql://"),
}


CASES = [*((call, fault) for call in (*SUBMIT, *NIGHTLY) for fault in ("503", "reset")),
         *(("GET pipelines", fault) for fault in FAULTS if fault not in ("503", "reset"))]  # fmt: skip


@pytest.mark.parametrize(("call", "fault"), CASES)
def test_submit_reports_a_fault_of_a_call_in_one_line(
    kubeflow: tuple[Any, str], flexfleet: Any, call: str, fault: str
) -> None:
    server, host = kubeflow
    spoil, code, said = FAULTS[fault]
    if call == "POST recurringruns/*":
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
    server.spoils["GET healthz"] = [responds(200, PAGE, "text/html")]
    assert "log in again" in refused(flexfleet("submit", "train", "--host", host), 6)


def test_call_ends_if_the_server_never_answers(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    server.spoils["GET pipelines"] = [hangs]
    with pytest.raises(Unreachable, match="timed out"), connected(host, timeout_s=(1.0, 0.2)) as client:
        client.list_pipelines()


@pytest.mark.parametrize(
    "address",
    ["http://", "ftp://kubeflow", "http://host:99999", "http://ho st", "http://localhost/#/runs"],
)
@pytest.mark.parametrize("name", ["KF_PIPELINES_ENDPOINT", "--host"])
def test_submit_refuses_a_malformed_address(
    flexfleet: Any, monkeypatch: pytest.MonkeyPatch, address: str, name: str
) -> None:
    if name == "KF_PIPELINES_ENDPOINT":
        monkeypatch.setenv(name, address)
    done = flexfleet("submit", "train", *([] if name == "KF_PIPELINES_ENDPOINT" else ["--host", address]))
    assert done.code == 2 and f"{name} must be the address" in done.err
