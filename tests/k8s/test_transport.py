"""Requests to an API server: certificates, tokens, retries, and the messages of refused requests."""

from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@dataclass
class Server:
    """An API server that requires a client certificate of its authority, or a token that it knows."""

    authority: Path
    own: Path
    """The server's certificate and key, which clients show as theirs too. Its name is `server`."""
    port: int = 0
    tokens: set[str] = field(default_factory=set)
    answers: list[tuple[int, list[tuple[str, str]]]] = field(default_factory=list)
    """Status and headers of the next responses. The status 0 breaks the connection; after the last one, all are 200."""
    values: list[Any] = field(default_factory=list)
    """Bodies of the next responses, which replace the default body of the status. Bytes are sent as they are."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    known: list[str] = field(default_factory=list)
    """The name in the client certificate of each request, or its header Authorization."""
    bodies: list[Any] = field(default_factory=list)


def respond(server: Server, handler: BaseHTTPRequestHandler) -> None:
    length = int(handler.headers.get("Content-Length") or 0)
    server.bodies.append(json.loads(handler.rfile.read(length)) if length else None)
    server.asked.append((handler.command, handler.path))
    certificate = handler.connection.getpeercert() or {}  # type: ignore[attr-defined]
    names = [value for part in certificate.get("subject", ()) for _, value in part]
    authorization = handler.headers.get("Authorization", "")
    kind, _, token = authorization.partition(" ")
    known = kind.lower() == "bearer" and token in server.tokens
    server.known.append(names[0] if names else authorization)
    status, headers = server.answers.pop(0) if server.answers else (200, [])
    if not names and not known:
        status = 401 if authorization else 403
    if status == 0:
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True
        return
    who = 'User "system:anonymous"' if not authorization and not names else "that"
    value: Any = {"items": [{"kind": "Job"}], "metadata": {}} if status == 200 else {"message": f"{who} is refused"}
    if server.values and status != 401:
        value = server.values.pop(0)
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    for header in headers:
        handler.send_header(*header)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def listen(server: Server) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            respond(server, self)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Ignore that a client which refuses the certificate hangs up."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.own)
    context.load_verify_locations(server.authority)
    context.verify_mode = ssl.CERT_OPTIONAL
    listening = Quiet(("127.0.0.1", 0), Handler)
    # The handshake must run in the connection's own thread.
    listening.socket = context.wrap_socket(listening.socket, server_side=True, do_handshake_on_connect=False)
    server.port = listening.server_port
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    return listening


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(host="127.0.0.1", good=True)`: a server whose certificate is for this host (see `tls.certificates`)."""
    listening: list[ThreadingHTTPServer] = []
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(cluster, "FIRST_WAIT_S", 0.0)

    def begin(**given: Any) -> Server:
        server = Server(*tls.certificates(tmp_path, **given))
        listening.append(listen(server))
        return server

    yield begin
    for each in listening:
        each.shutdown()
        each.server_close()


@pytest.fixture
def server(start: Start) -> Server:
    return start()


Configure = Callable[..., cluster.Cluster]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """`configure(server, user=None, **more)`: a Cluster for that server, by a KUBECONFIG with `more` fields of the
    cluster. Without a user, it shows a client certificate."""

    def write(server: Server, user: dict[str, Any] | None = None, **more: Any) -> cluster.Cluster:
        address = {
            "server": f"https://127.0.0.1:{server.port}",
            "certificate-authority-data": encoded(server.authority),
        }
        shown = {"client-certificate-data": encoded(server.own), "client-key-data": encoded(server.own)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": address | more}],
            "users": [{"name": "somebody", "user": shown if user is None else user}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "somebody"}}],
            "current-context": "here",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(path))
        return cluster.Cluster("clients")

    return write


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def api(server: Server, configure: Configure) -> cluster.Cluster:
    """A Cluster for `server` that shows a client certificate."""
    return configure(server)


def test_a_client_certificate_of_kubeconfig_is_shown(server: Server, api: cluster.Cluster) -> None:
    assert api.get("jobs", "a") == {"items": [{"kind": "Job"}], "metadata": {}}
    assert server.known == ["server"]
    assert server.asked == [("GET", "/apis/batch/v1/namespaces/clients/jobs/a")]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_token_of_kubeconfig_is_sent(server: Server, configure: Configure, tmp_path: Path, end: str) -> None:
    server.tokens.add("secret")
    (tmp_path / "token").write_text("secret" + end)
    configure(server, {"tokenFile": str(tmp_path / "token")}).create("secrets", {"metadata": {"name": "ä"}})
    assert server.known == ["Bearer secret"] and server.bodies == [{"metadata": {"name": "ä"}}]


def test_an_expired_token_of_a_plug_in_is_fetched_again(server: Server, configure: Configure, tmp_path: Path) -> None:
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
    api = configure(server, {"exec": plug_in | {"interactiveMode": "Never"}})
    api.get("jobs", "a")
    server.tokens = {str(number) for number in range(3, 20)}
    api.get("jobs", "a")
    assert server.known == ["Bearer 2", "Bearer 3"], "each request finds the last token expired"


@pytest.fixture
def token(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token of a pod's account, which the kubelet wrote. `Cluster()` is then in a pod of `server`'s cluster."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    path = tmp_path / "token"
    path.write_text("old\n")
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_TOKEN_FILENAME", str(path))
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_CERT_FILENAME", str(server.authority))
    server.tokens = {"old"}
    return path


def test_a_refused_token_of_a_pods_account_is_read_again(
    server: Server, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet can be late with the next token, because it retries if it cannot get one."""
    waited: list[float] = []
    api = cluster.Cluster("clients")
    api.get("jobs", "a")
    server.tokens = {"new"}

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 3:
            token.write_text("new\n")

    monkeypatch.setattr(SLEEP, SimpleNamespace(sleep=sleep))
    api.get("jobs", "a")
    assert [who.split()[1] for who in server.known] == ["old"] * 5 + ["new"]


def test_credentials_that_were_never_accepted_fail_at_once(server: Server, configure: Configure) -> None:
    with pytest.raises(EnvironmentFailure, match="KUBECONFIG"):
        configure(server, {"token": "stale"}).get("jobs", "a")
    assert len(server.asked) == 1


def test_a_busy_or_broken_server_is_retried(server: Server, api: cluster.Cluster) -> None:
    server.answers = [(429, [("Retry-After", "0")]), (0, []), (503, []), (504, [])]
    assert api.get("pods", "a") is not None
    assert len(server.asked) == 5


def test_waits_double_and_add_up_to_about_a_minute(
    server: Server, api: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    server.answers = [(503, [])] * cluster.TRIES
    monkeypatch.setattr(cluster, "FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(SLEEP, SimpleNamespace(sleep=waited.append))
    with pytest.raises(EnvironmentFailure, match="503"):
        api.get("pods", "a")
    assert waited == [0.5, 1, 2, 4, 8, 15, 15, 15]


def test_a_response_without_a_json_object_is_retried(server: Server, api: cluster.Cluster) -> None:
    """The response can be cut off, or come from a proxy."""
    server.values = [b'{"items": [{"metadata": {"na', b"null", b"[]", b"<html>sign in</html>"]
    assert api.select("pods", {"a": "b"}) == [{"kind": "Job"}] and len(server.asked) == 5
    server.values = [b"<html>sign in</html>"] * cluster.TRIES
    with pytest.raises(EnvironmentFailure, match="sign in"):
        api.select("pods", {"a": "b"})


def test_a_missing_or_existing_object_is_not_an_error(server: Server, api: cluster.Cluster) -> None:
    server.answers = [(404, []), (409, []), (404, [])]
    server.values = [{}, {"reason": "AlreadyExists"}, {}]
    assert api.get("jobs", "a") is None
    assert api.create("jobs", {"metadata": {"name": "a"}}) is None
    api.delete("jobs", "a")
    assert [method for method, _ in server.asked] == ["GET", "POST", "DELETE"]
    assert server.asked[-1][1].endswith("/jobs/a?propagationPolicy=Background")


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "clients": the object has been modified'),
        (403, "Forbidden", 'secrets "a" is forbidden: exceeded quota: clients, requested: count/secrets=1, ...'),
    ],
    ids=["conflict", "quota"],
)
def test_a_create_is_retried_if_a_quota_changes_or_is_full(
    server: Server, api: cluster.Cluster, status: int, reason: str, said: str
) -> None:
    """A quota is full for a moment if it still counts a deleted Secret."""
    server.answers = [(status, []), (status, []), (201, [])]
    server.values = [{"reason": reason, "message": said}] * 2 + [{"kind": "Secret"}]
    assert api.create("secrets", {}) == {"kind": "Secret"} and len(server.asked) == 3


def test_an_expired_list_is_read_again_from_its_start(server: Server, api: cluster.Cluster) -> None:
    page = {"items": [{"kind": "Pod"}], "metadata": {"continue": "more"}}
    server.answers = [(200, []), (410, []), (200, []), (200, [])]
    server.values = [page, {"reason": "Expired"}, page, {"items": [{"kind": "Job"}], "metadata": {}}]
    assert api.select("pods", {"round": "1"}) == [{"kind": "Pod"}, {"kind": "Job"}]
    assert ["continue=more" in path for _, path in server.asked] == [False, True, False, True]


@pytest.mark.parametrize("content", [b"- a list", b"a: ["])
def test_an_invalid_kubeconfig_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "config").write_bytes(content)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(SLEEP, SimpleNamespace(sleep=lambda seconds: pytest.fail("the request was retried")))
    with pytest.raises(EnvironmentFailure, match="KUBECONFIG"):
        cluster.Cluster("clients").get("pods", "a")


def test_labels_select_objects(server: Server, api: cluster.Cluster) -> None:
    assert api.select("jobs", {"flexfleet.io/run": "a b", "round": "1"}) == [{"kind": "Job"}]
    ((_, path),) = server.asked
    assert path.endswith("/jobs?labelSelector=flexfleet.io%2Frun%3Da+b%2Cround%3D1&limit=500")


def test_each_warning_of_the_server_is_logged_once(
    server: Server, api: cluster.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first = ("Warning", '299 - "unknown field", 299 - "would violate PodSecurity, as always"')
    server.answers = [(201, [first, ("Warning", '299 - "another"')]), (200, [first])]
    with caplog.at_level(logging.WARNING, "flexfleet"):
        api.create("jobs", {})
        api.get("jobs", "a")
    assert [record.getMessage().removeprefix("the Kubernetes API warns: ") for record in caplog.records] == [
        "unknown field", "would violate PodSecurity, as always", "another",
    ]  # fmt: skip


def test_a_server_of_another_authority_is_refused_at_once(server: Server, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, _ = tls.certificates(tmp_path / "other")
    api = configure(server, {}, **{"certificate-authority-data": encoded(other)})
    with pytest.raises(EnvironmentFailure, match="certificate-authority-data"):
        api.get("jobs", "a")
    assert server.asked == []


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_kubeconfig_names_the_host_or_skips_the_check(start: Start, configure: Configure) -> None:
    server = start(host="kubernetes.example")
    with pytest.raises(EnvironmentFailure, match="certificate"):
        configure(server).get("jobs", "a")
    assert configure(server, **{"tls-server-name": "kubernetes.example"}).get("jobs", "a") is not None
    assert configure(server, **{"insecure-skip-tls-verify": True}).get("jobs", "a") is not None
    assert server.known == ["server", "server"]
