"""What is different in Python 3.12 to 3.14, seen without having them: how processes start, when annotations are read,
and which certificates are taken."""

from __future__ import annotations

import ast
import datetime
import ipaddress
import ssl
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3.util.ssl_
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_engine.core.errors import EnvironmentFailure, certificate_hint
from fl_engine.storage.s3 import UrlStore

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("fl_engine", "flexfleet", "components", "pipelines", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_the_classifiers_name_every_python_from_the_oldest_on() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in about["classifiers"] if line.startswith("Programming Language")]
    assert named == ["3.11", "3.12", "3.13", "3.14"] and about["requires-python"] == f">={named[0]}"
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "README.md").read_text()


# --------------------------------------------------------------------------------------- how processes start
STARTS = ("Process", "Pool", "Manager", "Queue", "SimpleQueue", "Pipe", "Lock", "Event", "Value", "Array")
METHODS = ("spawn", "fork", "forkserver")


def unnamed(source: str) -> list[str]:
    """Calls whose start method is the default one, which 3.14 has changed from fork to forkserver."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree) if isinstance(node, ast.Import)
        for alias in node.names if alias.name in ("multiprocessing", "torch.multiprocessing")
    }  # fmt: skip
    loose = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("multiprocessing", "torch.multiprocessing")
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        module, _, name = called.rpartition(".")
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if name == "get_context" and first not in METHODS:
            found.append(ast.unparse(node))
        if (module in modules and name in STARTS) or (called in loose and name in STARTS):
            found.append(ast.unparse(node))
        if name == "ProcessPoolExecutor" and not any(word.arg == "mp_context" for word in node.keywords):
            found.append(ast.unparse(node))
    return found


def test_whoever_starts_processes_says_how() -> None:
    found = {str(path.relative_to(ROOT)): unnamed(path.read_text()) for path in SOURCES}
    assert len(found) > 200 and {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import multiprocessing\nmultiprocessing.Process(target=f)",
        "import torch.multiprocessing as mp\nwith mp.Pool(2) as pool: pass",
        "from multiprocessing import Process\nProcess(target=f)",
        "import multiprocessing\nmultiprocessing.get_context().Pool(2)",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2)",
    ],
)
def test_the_look_at_start_methods_sees_them(source: str) -> None:
    assert len(unnamed(source)) == 1
    assert unnamed("import multiprocessing as m\nm.get_context('spawn').Process(target=f)") == []


# ------------------------------------------------------------------------------------- when annotations are read
def test_annotations_are_read_through_typing() -> None:
    """`__annotations__` of 3.14 is computed when it is asked for, and is in no class's `__dict__`."""
    direct = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path != Path(__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "__annotations__")
        or (isinstance(node, ast.Constant) and node.value == "__annotations__")
    ]
    assert direct == [], "typing.get_type_hints"


# ------------------------------------------------------------------------------------ which certificates are taken
@pytest.fixture(scope="module", params=[False, True], ids=["an old authority", "one of RFC 5280"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, bool]]:
    """An HTTPS server, its authority's certificate, and whether that says what its key is for."""
    folder, good = tmp_path_factory.mktemp("certificates"), bool(request.param)
    now, name = datetime.datetime.now(datetime.UTC), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ours")])
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def made(subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        whose = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        return builder.add_extension(whose, False)

    root = made(name, authority).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    if good:
        usage = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
                               "key_agreement", "crl_sign", "encipher_only", "decipher_only"), False)  # fmt: skip
        root = root.add_extension(x509.KeyUsage(key_cert_sign=True, **usage), True)
    leaf = made(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")]), own)
    leaf = leaf.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(root.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "own.pem").write_bytes(
        leaf.sign(authority, hashes.SHA256()).public_bytes(pem) + own.private_bytes(pem, *plain)
    )

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.pem")
    http.socket = context.wrap_socket(http.socket, server_side=True)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{http.server_port}/x?X-Amz-Signature=planted", folder / "ca.pem", good
    http.shutdown()
    http.server_close()


class Strict(ssl.SSLContext):
    """As urllib3 makes it from Python 3.13 on."""

    def __new__(cls, *given: Any, **named: Any) -> Strict:
        made = super().__new__(cls, *given, **named)
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        return made


def test_a_certificate_that_newer_pythons_refuse_is_told_as_that(
    server: tuple[str, Path, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, authority, good = server
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    monkeypatch.setattr(urllib3.util.ssl_, "SSLContext", Strict)
    store = UrlStore({"x": url}, {})
    store._pool = urllib3.PoolManager(retries=False)
    if good:
        assert store.get("x") == b"ok"
        return
    said = r"key usage extension.*Python 3\.13 and newer check certificates strictly"
    with pytest.raises(EnvironmentFailure, match=said):
        store.get("x")


def test_other_errors_of_certificates_have_no_hint() -> None:
    assert certificate_hint("certificate verify failed: unable to get local issuer certificate") == ""
