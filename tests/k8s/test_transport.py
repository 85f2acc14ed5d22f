"""Requests to an API server: tokens, retries, and the errors of refused requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes
import pytest

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.remote.kubernetes import cluster
from fl_engine.storage import outage
from tests.harness.tls import certificates
from tests.harness.web import Request, serving
from tests.k8s.fake import kubeconfig

JOBS = {"items": [{"kind": "Job"}], "metadata": {}}


@dataclass
class Server:
    """An API server that accepts certain tokens."""

    url: str = ""
    tokens: set[str] = field(default_factory=lambda: {"good"})
    answers: list[tuple[int, Any]] = field(default_factory=list)
    """Status and body of the next responses; bytes are sent as they are. The status 0 breaks the connection. After the
    last one, all are 200."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    known: list[str] = field(default_factory=list)
    """Token of each request."""

    def respond(self, request: Request) -> None:
        request.body()
        self.asked.append((request.command, request.path))
        self.known.append(request.headers.get("Authorization", "").partition(" ")[2])
        status, value = self.answers.pop(0) if self.answers else (200, JOBS)
        if self.known[-1] not in self.tokens:
            status, value = 401, {"message": "unauthorized"}
        if status == 0:
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        request.respond(status, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    _, own = certificates(tmp_path)
    with serving(found.respond, own) as found.url:
        yield found


Configure = Callable[..., cluster.Cluster]


@pytest.fixture
def configure(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """`configure(user)`: a Cluster for the server, by a KUBECONFIG with these credentials."""

    def write(user: dict[str, Any]) -> cluster.Cluster:
        address = {"server": server.url, "certificate-authority": str(tmp_path / "ca.pem")}
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, address, user)))
        return cluster.Cluster("clients")

    return write


@pytest.fixture
def api(configure: Configure) -> cluster.Cluster:
    return configure({"token": "good"})


def test_refused_token_of_a_pods_account_is_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet can be late with the next token."""
    token, waited = tmp_path / "token", list[float]()
    token.write_text("good")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    api = cluster.Cluster("clients")
    api.get("jobs", "a")
    server.tokens = {"new"}

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 3:
            token.write_text("new")

    monkeypatch.setattr(outage.time, "sleep", sleep)
    api.get("jobs", "a")
    assert server.known == ["good"] * 5 + ["new"]


def test_credentials_that_were_never_accepted_fail_at_once(server: Server, configure: Configure) -> None:
    with pytest.raises(EnvironmentFailure):
        configure({"token": "stale"}).get("jobs", "a")
    assert len(server.asked) == 1


def test_busy_or_broken_server_is_retried(server: Server, api: cluster.Cluster) -> None:
    cut_off = [b'{"items": [{"metadata": {"na', b"null", b"<html>sign in</html>"]
    server.answers = [(429, {}), (0, {}), (503, {}), *((200, value) for value in cut_off)]
    assert api.get("pods", "a") == JOBS and len(server.asked) == 7


def test_missing_or_existing_object_is_not_an_error(server: Server, api: cluster.Cluster) -> None:
    server.answers = [(404, {}), (409, {"reason": "AlreadyExists"}), (404, {})]
    assert api.get("jobs", "a") is None
    assert api.create("jobs", {"metadata": {"name": "a"}}) is None
    api.delete("jobs", "a")
    assert [method for method, _ in server.asked] == ["GET", "POST", "DELETE"]
    assert server.asked[-1][1].endswith("/jobs/a?propagationPolicy=Background")


@pytest.mark.parametrize(
    ("status", "value"),
    [(409, {"reason": "Conflict", "message": "modified"}), (403, {"message": "exceeded quota: clients"})],
    ids=["conflict", "quota"],
)
def test_create_is_retried_if_a_quota_changes_or_is_full(
    server: Server, api: cluster.Cluster, status: int, value: dict[str, str]
) -> None:
    """A quota is full for a moment if it still counts a deleted Secret."""
    server.answers = [(status, value), (status, value), (201, {"kind": "Secret"})]
    assert api.create("secrets", {}) == {"kind": "Secret"} and len(server.asked) == 3
