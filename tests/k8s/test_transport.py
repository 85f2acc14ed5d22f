"""How requests reach an API server: over TLS, by a certificate or a token, through a proxy, again after a fault.

The same file runs with the oldest and the newest package `kubernetes` that pyproject.toml admits
(`make test-kubernetes-clients`), in environments that have nothing else.
"""

from __future__ import annotations

import base64
import importlib.util
import ipaddress
import json
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fl_engine.core.errors import EnvironmentFailure

# By its path: the package around it imports torch, which those environments lack.
_spec = importlib.util.spec_from_file_location(
    "cluster_alone", Path(__file__).parents[2] / "fl_engine/backends/kubernetes/cluster.py"
)
assert _spec is not None and _spec.loader is not None
cluster = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = cluster
_spec.loader.exec_module(cluster)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority; `strict=False` leaves out what RFC 5280 asks for, as some clusters' do."""

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        folder.mkdir(parents=True)
        self.folder, self.strict = folder, strict
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
        builder = self._builder(self.name, self.key).add_extension(x509.BasicConstraints(True, None), critical=True)
        if strict:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        self.pem = self._write("authority", builder, self.key).certificate

    def issue(self, name: str, *hosts: str) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
        names: list[x509.GeneralName] = []
        for host in hosts:
            numeric = host.replace(".", "").isdigit()
            names.append(x509.IPAddress(ipaddress.ip_address(host)) if numeric else x509.DNSName(host))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return self._write(name, builder, key)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now, public = datetime.now(UTC), self.key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        )

    def _write(self, name: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> Pair:
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        made = builder.sign(self.key, hashes.SHA256())
        pair.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        pair.key.write_bytes(key.private_bytes(*plain))
        return pair


@dataclass
class Server:
    """An API server that asks for a client certificate of its authority, or a token that it knows."""

    authority: Authority
    port: int = 0
    tokens: set[str] = field(default_factory=set)
    answers: list[tuple[int, list[tuple[str, str]]]] = field(default_factory=list)
    """Status and headers of the next answers; 0 breaks the connection. After them: 200."""
    values: list[Any] = field(default_factory=list)
    """Of the next answers, in place of what their status says; bytes: as they are."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    known: list[str] = field(default_factory=list)
    """Who each request came from: its certificate's name or its header Authorization."""
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


def listen(server: Server, hosts: tuple[str, ...]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            respond(server, self)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Quiet."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that refuses the certificate hangs up."""

    pair = server.authority.issue("server", *hosts)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    context.load_verify_locations(server.authority.pem)
    context.verify_mode = ssl.CERT_OPTIONAL
    listening = Quiet(("127.0.0.1", 0), Handler)
    # The handshake belongs into the connection's own thread.
    listening.socket = context.wrap_socket(listening.socket, server_side=True, do_handshake_on_connect=False)
    server.port = listening.server_port
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    return listening


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(*hosts, strict=True)`: a server whose certificate is for these hosts."""
    listening: list[ThreadingHTTPServer] = []
    for name in ("KUBERNETES_SERVICE_HOST", *(f"{p}_PROXY" for p in ("HTTPS", "HTTP", "NO", "ALL"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(cluster, "FIRST_WAIT_S", 0.0)

    def begin(*hosts: str, strict: bool = True) -> Server:
        server = Server(Authority(tmp_path / "authority", strict=strict))
        listening.append(listen(server, hosts or ("127.0.0.1",)))
        return server

    yield begin
    for each in listening:
        each.shutdown()
        each.server_close()


Configure = Callable[..., Any]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """`configure(server, user, **more of the cluster)`: a Cluster that KUBECONFIG leads to that server."""

    def write(server: Server, user: dict[str, Any], **more: Any) -> Any:
        authority = base64.b64encode(server.authority.pem.read_bytes()).decode()
        address = {"server": f"https://127.0.0.1:{server.port}", "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": address | more}],
            "users": [{"name": "somebody", "user": user}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "somebody"}}],
            "current-context": "here",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(path))
        return cluster.Cluster("clients")

    return write


def encoded(pair: Pair) -> dict[str, str]:
    return {
        "client-certificate-data": base64.b64encode(pair.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(pair.key.read_bytes()).decode(),
    }


def test_a_client_certificate_of_kubeconfig_is_shown(start: Start, configure: Configure) -> None:
    server = start()
    api = configure(server, encoded(server.authority.issue("coordinator")))
    assert api.get("jobs", "a") == {"items": [{"kind": "Job"}], "metadata": {}}
    assert server.known == ["coordinator"]
    assert server.asked == [("GET", "/apis/batch/v1/namespaces/clients/jobs/a")]


def test_a_token_of_kubeconfig_is_sent(start: Start, configure: Configure) -> None:
    server = start()
    server.tokens.add("secret")
    api = configure(server, {"token": "secret"})
    api.create("secrets", {"metadata": {"name": "ä"}})
    assert server.known == ["Bearer secret"] and server.bodies == [{"metadata": {"name": "ä"}}]


@pytest.mark.parametrize("fails", ["", "3456"], ids=["gives it", "fails for a while"])
def test_a_plug_ins_token_is_fetched_again_when_it_runs_out(
    start: Start, configure: Configure, tmp_path: Path, fails: str
) -> None:
    """It may have to ask somebody who does not answer. The package `kubernetes` then goes on with the old token, and
    where it is loaded anew with none."""
    server = start()
    server.tokens = {"1", "2"}
    script = tmp_path / "plugin.py"
    script.write_text(
        "import json, pathlib, sys\n"
        f"said = pathlib.Path({str(tmp_path / 'said')!r})\n"
        "token = str(int(said.read_text()) + 1) if said.exists() else '1'\n"
        "said.write_text(token)\n"
        f"if token in {list(fails)}: sys.exit('no network')\n"
        "status = {'token': token, 'expirationTimestamp': '2020-01-01T00:00:00Z'}\n"
        "version = 'client.authentication.k8s.io/v1'\n"
        "print(json.dumps({'apiVersion': version, 'kind': 'ExecCredential', 'status': status}))\n"
    )
    plug_in = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": [str(script)]}
    api = configure(server, {"exec": plug_in | {"interactiveMode": "Never"}})
    api.get("jobs", "a")
    server.tokens = {str(number) for number in range(3, 20)}
    api.get("jobs", "a")
    if not fails:
        assert server.known == ["Bearer 2", "Bearer 3"], "each request finds the last token expired"
        return
    assert server.known[0] == "Bearer 2" and server.known[-1] not in ("Bearer 2", "")


@pytest.fixture
def token(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token of a pod's account, as a kubelet has written it."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    path = tmp_path / "token"
    path.write_text("old\n")
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_TOKEN_FILENAME", str(path))
    return path


def inside(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Cluster in a pod of that server's cluster."""
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setattr(kubernetes.config.incluster_config, "SERVICE_CERT_FILENAME", str(server.authority.pem))
    return cluster.Cluster("clients")


@pytest.mark.parametrize("late", [0, 3])
def test_a_pods_account_is_used_inside_a_cluster_and_read_again_when_refused(
    start: Start, token: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Also where the kubelet is late with the next token: it writes it when 80 % of the present one's time are over,
    and tries again where it cannot get it."""
    server, waited = start(), list[float]()
    server.tokens = {"old"}
    api = inside(server, monkeypatch)
    api.get("jobs", "a")
    server.tokens = {"new"}

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > late:
            token.write_text("new\n")

    monkeypatch.setattr(cluster.time, "sleep", sleep)
    api.get("jobs", "a")
    assert [who.split()[1] for who in server.known] == ["old", *["old"] * (late + 1), "new"]


def test_credentials_that_were_never_good_end_it_at_once_and_others_after_all_tries(
    start: Start, token: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, said = start(), r"401 that is refused\. It does not know who asks: has the token"
    with pytest.raises(EnvironmentFailure, match=said):
        configure(server, {"token": "stale"}).get("jobs", "a")
    assert len(server.asked) == 1
    monkeypatch.delenv("KUBECONFIG")
    server.tokens = {"old"}
    api = inside(server, monkeypatch)
    api.get("jobs", "a")
    server.tokens.clear()
    with pytest.raises(EnvironmentFailure, match=said):
        api.get("jobs", "a")
    assert len(server.asked) == 2 + cluster.TRIES


def test_who_comes_without_credentials_is_told_so(start: Start, configure: Configure) -> None:
    server = start()
    with pytest.raises(EnvironmentFailure, match=r"403 .*system:anonymous.* has KUBECONFIG's user none\?"):
        configure(server, {}).get("jobs", "a")


def test_a_missing_right_is_named_at_once(start: Start, configure: Configure) -> None:
    server = start()
    server.answers = [(403, [])]
    with pytest.raises(EnvironmentFailure, match=r"POST jobs : 403 that is refused. The service account needs"):
        configure(server, encoded(server.authority.issue("coordinator"))).create("jobs", {})
    assert len(server.asked) == 1


def test_a_busy_or_broken_server_is_asked_again(start: Start, configure: Configure) -> None:
    server = start()
    server.answers = [(429, [("Retry-After", "0")]), (0, []), (503, []), (504, [])]
    assert configure(server, encoded(server.authority.issue("coordinator"))).get("pods", "a") is not None
    assert len(server.asked) == 5


def test_a_server_that_says_when_it_is_to_be_asked_again_is_not_asked_before(
    start: Start, configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Priority and Fairness says so with 429, and whoever shuts down with 503. No longer than a stop may wait: what
    it says may be a proxy's."""
    server, waited = start(), list[float]()
    server.answers = [(429, [("Retry-After", "7")]), (503, [("Retry-After", "9000")]), (503, [("Retry-After", "soon")])]
    monkeypatch.setattr(cluster.time, "sleep", waited.append)
    assert configure(server, encoded(server.authority.issue("coordinator"))).get("pods", "a") is not None
    assert waited == [7.0, cluster.LONGEST_WAIT_S, 0.0]
    assert caplog.text.count("the Kubernetes API: HTTP 503") == 2, "also where what it says is no number"


def test_what_is_no_object_is_asked_for_again_and_told(start: Start, configure: Configure) -> None:
    """Half of one, or what a proxy in between answers."""
    server = start()
    api = configure(server, encoded(server.authority.issue("coordinator")))
    server.values = [b'{"items": [{"metadata": {"na', b"null", b"[]", b"<html>sign in</html>"]
    assert api.select("pods", {"a": "b"}) == [{"kind": "Job"}] and len(server.asked) == 5
    server.values = [b"<html>sign in</html>"] * cluster.TRIES
    with pytest.raises(EnvironmentFailure, match="a JSON object is expected, got '<html>sign in</html>'"):
        api.select("pods", {"a": "b"})


def test_what_is_missing_or_there_already_is_no_error(start: Start, configure: Configure) -> None:
    server = start()
    api = configure(server, encoded(server.authority.issue("coordinator")))
    server.answers = [(404, []), (409, []), (404, [])]
    server.values = [{}, {"reason": "AlreadyExists"}, {}]
    assert api.get("jobs", "a") is None
    assert api.create("jobs", {"metadata": {"name": "a"}}) is None
    api.delete("jobs", "a")
    assert [method for method, _ in server.asked] == ["GET", "POST", "DELETE"]
    assert server.bodies[-1] == {"propagationPolicy": "Background"}


def test_a_creation_that_meets_another_change_is_tried_again(start: Start, configure: Configure) -> None:
    """As of a quota that counts several creations at a time: nothing was made."""
    server = start()
    said = 'Operation cannot be fulfilled on resourcequotas "clients": the object has been modified'
    server.answers = [(409, []), (201, [])]
    server.values = [{"reason": "Conflict", "message": said}, {"kind": "Secret"}]
    made = configure(server, encoded(server.authority.issue("coordinator"))).create("secrets", {})
    assert made == {"kind": "Secret"} and len(server.asked) == 2


def test_a_quota_that_is_full_for_a_moment_is_waited_for(start: Start, configure: Configure) -> None:
    """As where a Secret is renewed: it is deleted first, and somebody else takes its place meanwhile. Or the quota
    counts what is gone a little later."""
    server = start()
    said = 'secrets "a" is forbidden: exceeded quota: clients, requested: count/secrets=1, used: count/secrets=9, ...'
    server.answers = [(403, []), (403, []), (201, [])]
    server.values = [{"reason": "Forbidden", "message": said}] * 2 + [{"kind": "Secret"}]
    made = configure(server, encoded(server.authority.issue("coordinator"))).create("secrets", {})
    assert made == {"kind": "Secret"} and len(server.asked) == 3


def test_a_list_whose_rest_is_too_old_is_asked_for_from_its_beginning(start: Start, configure: Configure) -> None:
    server = start()
    page = {"items": [{"kind": "Pod"}], "metadata": {"continue": "more"}}
    server.answers = [(200, []), (410, []), (200, []), (200, [])]
    server.values = [page, {"reason": "Expired"}, page, {"items": [{"kind": "Job"}], "metadata": {}}]
    found = configure(server, encoded(server.authority.issue("coordinator"))).select("pods", {"round": "1"})
    assert found == [{"kind": "Pod"}, {"kind": "Job"}]
    assert ["continue=more" in path for _, path in server.asked] == [False, True, False, True]


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("count/secrets", "delete what is over: of each run that gets no more rounds the Secret <run>-keys"),
        ("count/jobs.batch", "delete what is over: Jobs of runs that have stopped. With kubernetes.placement=device"),
    ],
)
def test_a_quota_that_is_used_up_says_what_may_go(start: Start, configure: Configure, what: str, hint: str) -> None:
    server = start()
    server.answers = [(403, [])] * cluster.TRIES
    full = f"exceeded quota: clients, requested: {what}=1, used: {what}=9, limited: {what}=9"
    server.values = [{"message": full}] * cluster.TRIES
    with pytest.raises(EnvironmentFailure, match=rf"{what}=9\. Raise the quota .*, or {re.escape(hint)}"):
        configure(server, encoded(server.authority.issue("coordinator"))).create("jobs", {})


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (
            403,
            "unable to create new content in namespace clients because it is being terminated",
            "deletes the namespace",
        ),
        (403, 'admission webhook "a.b" denied the request: label team is required', "a policy of the cluster's"),
        (422, "ValidatingAdmissionPolicy 'a' with binding 'b' denied request: no", "a policy of the cluster's"),
    ],
)
def test_what_no_right_would_mend_is_not_blamed_on_the_role(
    start: Start, configure: Configure, status: int, said: str, hint: str
) -> None:
    server = start()
    server.answers, server.values = [(status, [])], [{"message": said}]
    with pytest.raises(EnvironmentFailure, match=rf"{re.escape(said)}\. .*{hint}") as refused:
        configure(server, encoded(server.authority.issue("coordinator"))).create("jobs", {})
    assert "role.yaml" not in str(refused.value)


def test_what_a_server_that_fails_says_is_told(
    start: Start, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "TRIES", 1)
    server = start()
    server.answers, server.values = [(500, [])], [{"message": 'failed calling webhook "kueue": connection refused'}]
    with pytest.raises(EnvironmentFailure, match='HTTP 500 failed calling webhook "kueue": connection refused'):
        configure(server, encoded(server.authority.issue("coordinator"))).create("jobs", {})


@pytest.mark.parametrize("content", [b"- a list", b"a: [", b"\xff\xfe\x00", b"clusters: {}\ncontexts: 3"])
def test_a_kubeconfig_that_is_none_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "config").write_bytes(content)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: pytest.fail("it was asked again"))
    with pytest.raises(EnvironmentFailure, match=r"^no cluster: [^\n]*KUBECONFIG"):
        cluster.Cluster("clients").get("pods", "a")


def test_labels_are_selected_by(start: Start, configure: Configure) -> None:
    server = start()
    api = configure(server, encoded(server.authority.issue("coordinator")))
    assert api.select("jobs", {"flexfleet.io/run": "a b", "round": "1"}) == [{"kind": "Job"}]
    ((_, path),) = server.asked
    assert path.endswith("/jobs?labelSelector=flexfleet.io%2Frun%3Da+b%2Cround%3D1&limit=500")


def test_the_servers_warnings_are_logged_once_each(
    start: Start, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    first = ("Warning", '299 - "unknown field \\"spec.a\\"", 299 - "would violate PodSecurity, as always"')
    server.answers = [(201, [first, ("Warning", '299 - "another"')]), (200, [first])]
    api = configure(server, encoded(server.authority.issue("coordinator")))
    with caplog.at_level(logging.WARNING, "flexfleet"):
        api.create("jobs", {})
        api.get("jobs", "a")
    assert [record.getMessage().removeprefix("the Kubernetes API warns: ") for record in caplog.records] == [
        'unknown field "spec.a"', "would violate PodSecurity, as always", "another",
    ]  # fmt: skip


def test_a_server_of_another_authority_is_refused_at_once(start: Start, configure: Configure, tmp_path: Path) -> None:
    server = start()
    other = Authority(tmp_path / "other").pem.read_bytes()
    api = configure(server, {}, **{"certificate-authority-data": base64.b64encode(other).decode()})
    with pytest.raises(EnvironmentFailure, match=r"certificate is refused: .*certificate-authority-data in KUBECONFIG"):
        api.get("jobs", "a")
    assert server.asked == []


def test_a_certificate_that_python_3_13_refuses_is_explained(
    start: Start, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ssl.create_default_context

    def strictly(**given: Any) -> ssl.SSLContext:
        context = make(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from 3.13
        return context

    server = start(strict=False)
    api = configure(server, encoded(server.authority.issue("coordinator")))
    monkeypatch.setattr(ssl, "create_default_context", strictly)
    with pytest.raises(EnvironmentFailure, match=r"does not include key usage.*Python 3\.13 and newer .*anew.*3\.12"):
        api.get("jobs", "a")


def test_a_certificate_for_another_name_is_taken_where_kubeconfig_says_that_name(
    start: Start, configure: Configure
) -> None:
    server = start("kubernetes.example")
    user = encoded(server.authority.issue("coordinator"))
    with pytest.raises(EnvironmentFailure, match="certificate is refused"):
        configure(server, user).get("jobs", "a")
    assert configure(server, user, **{"tls-server-name": "kubernetes.example"}).get("jobs", "a") is not None


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_nothing_is_checked_where_kubeconfig_says_so(start: Start, configure: Configure) -> None:
    server = start("kubernetes.example")
    user = encoded(server.authority.issue("coordinator"))
    api = configure(server, user, **{"insecure-skip-tls-verify": True})
    assert api.get("jobs", "a") is not None and server.known == ["coordinator"]


def test_certificates_that_cannot_be_read_are_named(start: Start, configure: Configure, tmp_path: Path) -> None:
    server = start()
    pair = server.authority.issue("coordinator")
    pair.key.write_text("no key")
    user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
    with pytest.raises(EnvironmentFailure, match=r"certificates cannot be read: .*coordinator\.key"):
        configure(server, user).get("jobs", "a")


def proxy() -> tuple[socket.socket, list[str]]:
    """A proxy that makes one tunnel, and what it was asked for."""
    listening, asked = socket.create_server(("127.0.0.1", 0)), list[str]()

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)

    def serve() -> None:
        client, _ = listening.accept()
        head = client.makefile("rb", buffering=0)
        asked.append(head.readline().decode())
        while head.readline() not in (b"\r\n", b""):
            pass
        host, _, port = asked[0].split()[1].partition(":")
        upstream = socket.create_connection((host, int(port)))
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        threading.Thread(target=pump, args=(upstream, client), daemon=True).start()
        pump(client, upstream)

    threading.Thread(target=serve, daemon=True).start()
    return listening, asked


@pytest.mark.parametrize("bypass", ["", "127.0.0.0/8"])
def test_the_configurations_proxy_is_taken_unless_it_is_bypassed(
    start: Start, configure: Configure, monkeypatch: pytest.MonkeyPatch, bypass: str
) -> None:
    server = start()
    listening, asked = proxy()
    make = kubernetes.client.Configuration

    def through(*given: Any) -> Any:
        config = make(*given)
        config.proxy, config.no_proxy = f"http://127.0.0.1:{listening.getsockname()[1]}", bypass
        return config

    monkeypatch.setattr(kubernetes.client, "Configuration", through)
    api = configure(server, encoded(server.authority.issue("coordinator")))
    assert api.get("jobs", "a") is not None and server.known == ["coordinator"]
    assert bool(asked) is not bool(bypass)
    listening.close()
