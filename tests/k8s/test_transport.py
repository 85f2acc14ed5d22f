"""Requests to an API server: tokens, retries, and the errors of refused requests."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes
import pytest
import yaml

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.remote.kubernetes import cluster
from tests.harness import tls

SLEEP = "tenacity.nap.time"
JOBS = {"items": [{"kind": "Job"}], "metadata": {}}


@dataclass
class Server:
    """An API server that accepts certain tokens."""

    port: int = 0
    tokens: set[str] = field(default_factory=lambda: {"good"})
    answers: list[tuple[int, Any]] = field(default_factory=list)
    """Status and body of the next responses; bytes are sent as they are. The status 0 breaks the connection. After the
    last one, all are 200."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    known: list[str] = field(default_factory=list)
    """Token of each request."""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.asked.append((handler.command, handler.path))
        self.known.append(handler.headers.get("Authorization", "").partition(" ")[2])
        status, value = self.answers.pop(0) if self.answers else (200, JOBS)
        if self.known[-1] not in self.tokens:
            status, value = 401, {"message": "unauthorized"}
        if status == 0:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            found.respond(self)

        do_GET = do_POST = do_PATCH = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(cluster, "FIRST_WAIT_S", 0.0)
    _, own = tls.certificates(tmp_path)
    with tls.serving(Handler, own) as found.port:
        yield found


Configure = Callable[..., cluster.Cluster]


@pytest.fixture
def configure(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """`configure(user)`: a Cluster for the server, by a KUBECONFIG with these credentials."""

    def write(user: dict[str, Any]) -> cluster.Cluster:
        address = {"server": f"https://127.0.0.1:{server.port}", "certificate-authority": str(tmp_path / "ca.pem")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": address}],
            "users": [{"name": "somebody", "user": user}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "somebody"}}],
            "current-context": "here",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        return cluster.Cluster("clients")

    return write


@pytest.fixture
def api(configure: Configure) -> cluster.Cluster:
    return configure({"token": "good"})


def test_token_file_may_end_with_a_newline(server: Server, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("good\n")
    assert configure({"tokenFile": str(tmp_path / "token")}).get("jobs", "a") == JOBS
    assert server.asked == [("GET", "/apis/batch/v1/namespaces/clients/jobs/a")]


def test_expired_token_of_a_plug_in_is_fetched_again(server: Server, configure: Configure, tmp_path: Path) -> None:
    server.tokens = {"1", "2"}
    script = tmp_path / "plugin.py"
    script.write_text(
        "import json, pathlib\n"
        f"said = pathlib.Path({str(tmp_path / 'said')!r})\n"
        "token = str(int(said.read_text()) + 1) if said.exists() else '1'\n"
        "said.write_text(token)\n"
        "status = {'token': token, 'expirationTimestamp': '2020-01-01T00:00:00Z'}\n"
        "version = 'client.authentication.k8s.io/v1'\n"
        "print(json.dumps({'apiVersion': version, 'kind': 'ExecCredential', 'status': status}))\n"
    )
    plug_in = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": [str(script)]}
    api = configure({"exec": plug_in | {"interactiveMode": "Never"}})
    api.get("jobs", "a")
    server.tokens = {str(number) for number in range(3, 20)}
    api.get("jobs", "a")
    assert server.known == ["2", "3"], "each request finds the last token expired"


def test_refused_token_of_a_pods_account_is_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet can be late with the next token."""
    token, waited = tmp_path / "token", list[float]()
    token.write_text("good\n")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    api = cluster.Cluster("clients")
    api.get("jobs", "a")
    server.tokens = {"new"}

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 3:
            token.write_text("new\n")

    monkeypatch.setattr(SLEEP, SimpleNamespace(sleep=sleep))
    api.get("jobs", "a")
    assert server.known == ["good"] * 5 + ["new"]


def test_credentials_that_were_never_accepted_fail_at_once(server: Server, configure: Configure) -> None:
    with pytest.raises(EnvironmentFailure, match="401"):
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


def test_labels_select_objects_and_expired_list_is_read_again(server: Server, api: cluster.Cluster) -> None:
    page = {"items": [{"kind": "Pod"}], "metadata": {"continue": "more"}}
    server.answers = [(200, page), (410, {"reason": "Expired"}), (200, page), (200, JOBS)]
    assert api.select("jobs", {"flexfleet.io/run": "a b", "round": "1"}) == [{"kind": "Pod"}, {"kind": "Job"}]
    assert ["continue=more" in path for _, path in server.asked] == [False, True, False, True]
    assert server.asked[0][1].endswith("/jobs?labelSelector=flexfleet.io%2Frun%3Da+b%2Cround%3D1&limit=500")
