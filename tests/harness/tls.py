"""A certificate authority, and a certificate for a local HTTPS server."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certificates(folder: Path, days: tuple[float, float] = (0, 1)) -> tuple[Path, Path]:
    """Write the certificate of a new authority, and the certificate of 127.0.0.1 with its key. `days`: begin and end of
    the validity, in days from now."""
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
    usage = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
                           "key_agreement", "crl_sign", "encipher_only", "decipher_only"), False)  # fmt: skip
    root = root.add_extension(x509.KeyUsage(key_cert_sign=True, **usage), True)
    leaf = made(x509.Name([_named("server")]), own)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    leaf = leaf.add_extension(x509.SubjectAlternativeName([address]), False)
    pem = serialization.Encoding.PEM
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(root.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "own.pem").write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(pem) + key)
    return folder / "ca.pem", folder / "own.pem"


def _named(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(x509.NameOID.COMMON_NAME, name)
