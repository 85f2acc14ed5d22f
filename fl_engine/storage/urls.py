"""The run store on S3 for devices without credentials, which use presigned URLs. A URL is valid for one key and a
limited time. `s3.S3Store` signs the URLs.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal, NamedTuple, NoReturn

import urllib3

from fl_engine.core.errors import IntegrityError, TooLarge, Unreachable, printable
from fl_engine.core.records import Strict
from fl_engine.storage import proxies
from fl_engine.storage.proxies import pool_of
from fl_engine.storage.store import Pieces, Value, digest

logging.getLogger("urllib3.connection").setLevel(logging.ERROR)
"""Suppress urllib3's warning for an invalid response, because the warning contains a URL with a secret query."""
logging.getLogger("urllib3.connectionpool").addFilter(lambda record: "Signature=" not in record.getMessage())

TRIES = 7
"""Maximum number of attempts, which take 13 seconds in total if the server refuses each connection."""
BUSY = (429, 500, 502, 503, 504)
"""HTTP statuses that cause a retry."""
PIECE = 2**20
"""Maximum bytes per read from a response's body."""
AT_ONCE = 8
"""Maximum number of overlapping requests of a device (`overlapping`). urllib3 keeps this number of connections."""
ANSWER_BYTES = 2**16
"""Maximum bytes of an error response that are read, because a hostile server may send an endless response."""
REFUSED = "CERTIFICATE_VERIFY_FAILED"
"""Substring of urllib3's error message for an untrusted certificate."""
CERTIFICATE_HINT = ". Check the clock, or set SSL_CERT_FILE to a PEM file of the server's authority"
FIXED = {
    # By default, Amazon's buckets accept only this ACL. The ACL is equivalent to `private`, but the bucket's
    # owner can also read objects that were uploaded with other credentials.
    "acl": "bucket-owner-full-control",
    "Content-Type": "application/octet-stream",
}
"""Form fields of an upload that a client cannot change, in addition to the key."""

Verb = Literal["POST", "PUT"]


class Upload(Strict):
    """The permission to write one key. For POST, `fields` is a form whose policy fixes the key, ACL and content type,
    and limits the size to `size` bytes. For PUT, `url` is signed for exactly `size` bytes and a content type. The
    module `probe` tests whether a server enforces these limits."""

    verb: Verb
    url: str
    fields: dict[str, str]
    """Form fields for POST, or headers for PUT."""
    size: int
    """Maximum size in bytes for POST, or exact size in bytes for PUT."""


class Answer(NamedTuple):
    status: int
    data: bytes


class Requests:
    """Sends HTTP requests, through a proxy if the environment specifies a proxy (`proxies`). Retries a request if the
    response is incomplete or has a status in BUSY. Does not follow redirects to other servers. Raises urllib3's
    HTTPError if the last attempt gets no complete response, and ConfigError if the proxy's address is malformed."""

    def __init__(self, tries: int = TRIES, connect_s: float = 10.0, read_s: float = 120.0) -> None:
        self._tries, timeout = tries, urllib3.Timeout(connect=connect_s, read=read_s)
        self._pool_of = cache(partial(pool_of, maxsize=AT_ONCE, retries=False, timeout=timeout))
        """Function that maps the scheme, host and port of a server to its connections."""

    def ask(self, verb: str, url: str, read: Callable[[Any], bytes] | None = None, **sent: Any) -> Answer:
        """Return the response. `read` reads the body of a successful response. The body of an error is truncated."""
        for attempt in range(1, self._tries + 1):
            is_last = attempt == self._tries
            try:
                pool = self._pool_of("/".join(url.split("/", 3)[:3]))
                response = pool.request(verb, url, redirect=False, preload_content=False, **sent)
                try:
                    if response.status == 407:
                        raise urllib3.exceptions.ProxyError("HTTP 407", OSError("the proxy requires a password"))
                    data = (read if read is not None and response.status < 300 else _beginning)(response)
                finally:
                    response.release_conn()
                if is_last or response.status not in BUSY:
                    return Answer(response.status, data)
            except urllib3.exceptions.HTTPError as error:
                lacks_password = isinstance(error, urllib3.exceptions.ProxyError) and "407" in str(error)
                if is_last or lacks_password or REFUSED in str(error):
                    raise
            time.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable")

    def send(self, upload: Upload, value: Value, headers: Mapping[str, str] | None = None) -> Answer:
        """Upload a value and return the response. `headers` contains additional headers."""
        body, given = value, {**upload.fields, "Content-MD5": md5(value)} if upload.verb == "PUT" else {}
        if upload.verb == "POST":
            body, given["Content-Type"] = _form(upload.fields, value)
        given = {**given, "Content-Length": str(len(body)), **(headers or {})}
        return self.ask(upload.verb, upload.url, body=body, headers=given)


class UrlStore:
    """A store for a client without credentials, which gets a URL for each permitted key. Raises EnvironmentFailure if
    the server does not respond after all attempts, and IntegrityError if the server rejects a request.

    `within_s` limits requests to two attempts with this timeout in seconds, for values that are soon outdated."""

    at_once = AT_ONCE

    def __init__(self, reads: Mapping[str, str], writes: Mapping[str, Upload], within_s: float | None = None) -> None:
        self._reads, self._writes = reads, writes
        self._requests = Requests() if within_s is None else Requests(2, within_s, within_s)

    def put(self, key: str, value: Value) -> None:
        if (upload := self._writes.get(key)) is None:
            raise IntegrityError(f"No upload URL was issued for {key}")
        self._answer(upload.verb, key, upload.url, lambda: self._requests.send(upload, value))

    def get(self, key: str, limit: int | None = None) -> bytes:
        if (url := self._reads.get(key)) is None:
            raise IntegrityError(f"No URL was issued to read {key}")
        read = partial(whole, name=self.uri(key), limit=limit)
        return self._answer("GET", key, url, lambda: self._requests.ask("GET", url, read)).data

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._reads if key.startswith(prefix))

    def _refuse(self, *keys: Any, **_: Any) -> NoReturn:
        raise IntegrityError(f"a client without credentials cannot create or delete {keys}")

    create = delete = sweep = _refuse

    def uri(self, key: str = "") -> str:
        return f"the run store's {key}"

    def _answer(self, verb: str, key: str, url: str, ask: Callable[[], Answer]) -> Answer:
        try:
            answer = ask()
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"{verb} {self.uri(key)}: {why(error, url)}") from None
        if answer.status >= 300:
            text = printable(answer.data[:300].decode(errors="replace"))
            kind = Unreachable if answer.status >= 500 or answer.status == 429 else IntegrityError
            raise kind(f"{verb} {self.uri(key)}: HTTP {answer.status} {text}")
        return answer


def _beginning(response: urllib3.BaseHTTPResponse) -> bytes:
    data = response.read(ANSWER_BYTES + 1)
    if len(data) > ANSWER_BYTES:
        response.close()
    return data[:ANSWER_BYTES]


def _form(fields: Mapping[str, str], value: Value) -> tuple[Pieces, str]:
    """Return a tuple (form, content type). The file is the last field, because servers ignore later fields."""
    boundary = secrets.token_hex(16)
    parts: dict[str, str | tuple[str, bytes, str]] = {**fields, "file": ("value", b"", FIXED["Content-Type"])}
    empty, kind = urllib3.encode_multipart_formdata(parts, boundary)
    end = f"\r\n--{boundary}--\r\n".encode()
    return Pieces((empty.removesuffix(end), *(value.parts if isinstance(value, Pieces) else (value,)), end)), kind


def whole(body: Any, name: str, limit: int | None) -> bytes:
    """Return the body of a response. Read at most one byte more than `limit`."""
    value = bytearray()
    while piece := body.read(PIECE if limit is None else min(PIECE, limit + 1 - len(value))):
        value += piece
        if limit is not None and len(value) > limit:
            body.close()
            raise TooLarge(f"{name} must have at most {limit} bytes, got more")
    return bytes(value)


def md5(value: Value) -> str:
    return base64.b64encode(digest("md5", value)).decode()


def why(error: urllib3.exceptions.HTTPError, url: str = "") -> str:
    """Return the cause of an error as one line. Remove the query of a presigned URL, because the query is secret."""
    text, query = printable(str(error)), url.partition("?")[2]
    is_proxy = isinstance(error, urllib3.exceptions.ProxyError)
    hint = CERTIFICATE_HINT if REFUSED in text else f". {proxies.HINT}" if is_proxy else ""
    return (text.replace(query, "...") if query else text) + hint
