"""A certificate authority, and local HTTPS servers with its certificates."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certificates(
    folder: Path, good: bool = True, days: tuple[float, float] = (0, 1), host: str = "127.0.0.1"
) -> tuple[Path, Path]:
    """Write the certificate of a new authority, and the certificate of `host` with its key.

    Args:
        good: Whether the authority's certificate has the key usage that RFC 5280 requires.
        days: Begin and end of the validity, in days from now.
        host: An IPv4 address or a host name.
    """
    now, name = datetime.datetime.now(datetime.timezone.utc), x509.Name([_named("ours")])
    begin, end = (now + datetime.timedelta(days=each) for each in days)
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def made(subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        whose = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        return builder.add_extension(whose, False)

    root = made(name, authority).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    if good:
        usage = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
                               "key_agreement", "crl_sign", "encipher_only", "decipher_only"), False)  # fmt: skip
        root = root.add_extension(x509.KeyUsage(key_cert_sign=True, **usage), True)
    leaf = made(x509.Name([_named("server")]), own)
    numeric = host.replace(".", "").isdigit()
    whom = x509.IPAddress(ipaddress.ip_address(host)) if numeric else x509.DNSName(host)
    leaf = leaf.add_extension(x509.SubjectAlternativeName([whom]), False)
    pem = serialization.Encoding.PEM
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(root.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "own.pem").write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(pem) + key)
    return folder / "ca.pem", folder / "own.pem"


def _named(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(x509.NameOID.COMMON_NAME, name)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], own: Path | None) -> Iterator[int]:
    """The port of an HTTPS server on 127.0.0.1, or of an HTTP server if there is no certificate."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if own is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own)
        http.socket = context.wrap_socket(http.socket, server_side=True)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield http.server_port
    finally:
        http.shutdown()
        http.server_close()


@dataclass
class Values:
    """What a server answers to GET, by path, and what was stored by PUT. Other paths are redirected to `elsewhere`."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    elsewhere: str = "/elsewhere"
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving_values(own: Path | None = None) -> Iterator[Values]:
    found = Values()

    class Answer(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            found.asked.append(path)
            if self.command == "PUT":
                found.files[path] = self.rfile.read(int(self.headers["Content-Length"]))
            value = found.files.get(path)
            self.send_response(found.statuses.get(path, 302 if value is None else 200))
            self.send_header("Location", found.elsewhere)
            body = b"" if self.command == "PUT" or value is None else value
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = answer

        def log_message(self, *_: object) -> None:
            pass

    with serving(Answer, own) as port:
        found.url = f"http{'' if own is None else 's'}://127.0.0.1:{port}"
        yield found
