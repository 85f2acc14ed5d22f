"""The run store on S3 for devices without credentials: they read and upload with presigned URLs. A URL is valid for one
key and a limited time. `s3.S3Store` signs them.
"""

from __future__ import annotations

import base64
import logging
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TypeVar, cast

import urllib3
from pydantic import BaseModel, ConfigDict

from fl_engine.core.errors import IntegrityError, TooLarge, Unreachable, device_hint, printable
from fl_engine.storage.serialization import Pieces, Value, digest

T = TypeVar("T")

logging.getLogger("urllib3.connection").setLevel(logging.ERROR)
"""urllib3 would log a broken answer with the URL, whose query is a secret."""

READS = 4
"""Tries of a download whose connection breaks."""
SENDS = 3
"""Tries of an upload that arrives damaged."""
PIECE = 2**20
"""Bytes of a body that are read at a time."""
AT_ONCE = 8
"""Requests that overlap (`overlapping`). boto3 and urllib3 keep a connection for each."""
ANSWER_BYTES = 2**16
"""The most bytes that are read of an answer that is not a value, because a hostile server's may have no end."""
REFUSED = "CERTIFICATE_VERIFY_FAILED"
"""A part of urllib3's error for a certificate that is not trusted."""
FIXED = {
    # As good as private, and the only ACL that Amazon's buckets accept by default. The bucket's owner can then read the
    # object if other credentials have signed.
    "acl": "bucket-owner-full-control",
    "Content-Type": "application/octet-stream",
    # Every server's answer with this status has the ETag.
    "success_action_status": "201",
}
"""The fields of an upload's form, besides its key, that a client cannot change."""
ETAG = re.compile(rb"<ETag>(?:\"|&quot;|&#34;)?([0-9a-f]{32})(?:\"|&quot;|&#34;)?</ETag>")


Verb = Literal["POST", "PUT"]


class Upload(BaseModel):
    """The permission to write one key. POST: a form whose policy fixes the key, ACL, type and 1 to `size` bytes. PUT: a
    URL signed for exactly `size` bytes and a type. `probe` finds which of them a server enforces."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    verb: Verb
    url: str
    fields: dict[str, str]
    """The fields of the form; with PUT, headers."""
    size: int
    """In bytes: the largest with POST, the only one with PUT."""


@dataclass(frozen=True)
class Answer:
    """An answer that is not a value: to an upload, or an error."""

    status: int
    headers: Mapping[str, str]
    data: bytes
    """The first ANSWER_BYTES of the body."""


class UrlStore:
    """A store of a client without credentials: URLs of the keys that it may read or write. Raises EnvironmentFailure if
    the server does not answer after all tries, and IntegrityError if it refuses. Follows no redirect, because it may
    lead to another server.

    `within_s`: two tries of so many seconds, for values that are soon out of date; None: several patient tries."""

    at_once = AT_ONCE

    def __init__(self, reads: Mapping[str, str], writes: Mapping[str, Upload], within_s: float | None = None) -> None:
        self._reads, self._writes = reads, writes
        self._pool = patient_pool() if within_s is None else hasty_pool(within_s)
        self._hasty = within_s is not None

    def put(self, key: str, value: Value) -> None:
        if (upload := self._writes.get(key)) is None:
            raise IntegrityError(f"No upload URL was issued for {key}")
        for _ in range(SENDS):
            with self._explained(upload.verb, key, upload.url):
                answer = send(self._pool, upload, value, tries=2 if self._hasty else READS)
                self._check(answer, upload.verb, key)
            if _etag(answer) in (None, digest("md5", value).hex()):
                return
        raise IntegrityError(f"{upload.verb} {self.uri(key)}: the {len(value)} bytes arrived damaged {SENDS} times")

    def get(self, key: str, limit: int | None = None) -> bytes:
        if (url := self._reads.get(key)) is None:
            raise IntegrityError(f"No URL was issued to read {key}")

        def read() -> bytes:
            answer = self._pool.request("GET", url, redirect=False, preload_content=False)
            try:
                if answer.status >= 300:
                    self._check(_cut(answer), "GET", key)
                return whole(answer, self.uri(key), limit)
            finally:
                answer.release_conn()

        with self._explained("GET", key, url):
            return again(read, (urllib3.exceptions.HTTPError,), 1 if self._hasty else READS)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._reads if key.startswith(prefix))

    def create(self, key: str, value: bytes) -> bool:
        raise IntegrityError(f"a client cannot create {key}")

    def delete(self, *keys: str) -> None:
        raise IntegrityError(f"a client cannot delete {', '.join(keys)}")

    def sweep(self, prefix: str) -> None:
        raise IntegrityError(f"a client cannot sweep {prefix}")

    def uri(self, key: str = "") -> str:
        return f"the run store's {key}"

    @contextmanager
    def _explained(self, verb: str, key: str, url: str) -> Iterator[None]:
        try:
            yield
        except urllib3.exceptions.HTTPError as error:
            said = _without_query(str(error), url)
            raise Unreachable(f"{verb} {self.uri(key)}: {said}{device_hint(said)}") from None

    def _check(self, answer: Answer, verb: str, key: str) -> None:
        if answer.status >= 300:
            said = printable(answer.data[:300].decode(errors="replace"))
            kind = Unreachable if answer.status >= 500 or answer.status == 429 else IntegrityError
            raise kind(f"{verb} {self.uri(key)}: HTTP {answer.status} {said}")


class Retry(urllib3.Retry):
    """Does not retry if a certificate is refused. Before a retry, urllib3 would read the whole answer, and this class
    reads a bounded part of it."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: urllib3.BaseHTTPResponse | None = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: TracebackType | None = None,
    ) -> Retry:
        if isinstance(error, urllib3.exceptions.SSLError) and REFUSED in str(error):
            raise urllib3.exceptions.MaxRetryError(_pool, url or "", error) from error
        left = super().increment(method, url, response, error, _pool, _stacktrace)
        if response is not None:
            with suppress(urllib3.exceptions.HTTPError, OSError):
                _cut(response)
        return left


def _without_secret(record: logging.LogRecord) -> bool:
    """False for a line of urllib3's log on a request with a signed URL. Other lines stay, such as those on MLflow's
    requests, which explain why a run waits."""
    ours = any(isinstance(each, Retry) for each in record.args or ())
    return not ours and "Signature=" not in record.getMessage()


logging.getLogger("urllib3.connectionpool").addFilter(_without_secret)


def patient_pool() -> urllib3.PoolManager:
    """Return connections that repeat a request without an answer, or with 429 or 5xx."""
    status = (429, 500, 502, 503, 504)
    retry = Retry(
        6, status_forcelist=status, backoff_factor=0.5, backoff_jitter=0.5, allowed_methods=None, raise_on_status=False
    )
    return urllib3.PoolManager(maxsize=AT_ONCE, retries=retry, timeout=urllib3.Timeout(connect=10, read=120))


def hasty_pool(seconds: float) -> urllib3.PoolManager:
    """Return connections for the two threads of a device, which try a request at most twice."""
    retry = Retry(1, backoff_factor=0.1, allowed_methods=None, raise_on_status=False)
    return urllib3.PoolManager(maxsize=2, retries=retry, timeout=urllib3.Timeout(connect=seconds, read=seconds))


def send(
    pool: urllib3.PoolManager,
    upload: Upload,
    value: Value,
    headers: Mapping[str, str] = MappingProxyType({}),
    tries: int = READS,
) -> Answer:
    """Return the answer to an upload, whatever it is. `headers` are additional ones, `tries` those of an answer whose
    body breaks off."""
    body, given = value, {**upload.fields, "Content-MD5": md5(value)} if upload.verb == "PUT" else {}
    if upload.verb == "POST":
        body, given["Content-Type"] = _form(upload.fields, value)
    given = {**given, "Content-Length": str(len(body)), **headers}

    def ask() -> Answer:
        sent = {"body": cast(Any, body), "headers": given}
        # Some servers answer a form that its policy does not allow with a redirect.
        return _cut(pool.request(upload.verb, upload.url, redirect=False, preload_content=False, **sent))

    # The pool repeats a request without an answer, but not one whose answer's body breaks off.
    return again(ask, (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError), tries)


def _cut(answer: urllib3.BaseHTTPResponse) -> Answer:
    """Read the first bytes of an answer that is not a value, and do not wait for the others."""
    try:
        data = answer.read(ANSWER_BYTES + 1)
        if len(data) > ANSWER_BYTES:
            answer.close()
        return Answer(answer.status, answer.headers, data[:ANSWER_BYTES])
    finally:
        answer.release_conn()


def _form(fields: Mapping[str, str], value: Value) -> tuple[Pieces, str]:
    """A form, with the file as its last field because servers ignore later ones, and its content type."""
    boundary = secrets.token_hex(16)
    told: dict[str, str | tuple[str, bytes, str]] = {**fields, "file": ("value", b"", FIXED["Content-Type"])}
    empty, kind = urllib3.encode_multipart_formdata(told, boundary)
    end = f"\r\n--{boundary}--\r\n".encode()
    return Pieces((empty.removesuffix(end), *(value.parts if isinstance(value, Pieces) else (value,)), end)), kind


def _etag(answer: Answer) -> str | None:
    """The MD5 of the bytes that arrived; None if the server does not report it, as with some kinds of encryption.
    Damage is then found by the manifest's sha256 when the value is read."""
    if answer.headers.get("x-amz-server-side-encryption", "").startswith("aws:kms"):
        return None
    said = re.fullmatch('"?([0-9a-f]{32})"?', answer.headers.get("ETag", ""))
    if said is not None:
        return said[1]
    inside = ETAG.search(answer.data)
    return None if inside is None else inside[1].decode()


def again(read: Callable[[], T], errors: tuple[type[Exception], ...], tries: int) -> T:
    """Repeat a read after these errors of a broken connection, at most `tries` times."""
    for attempt in range(tries - 1):
        try:
            return read()
        except errors:
            time.sleep(0.2 * 2**attempt)
    return read()


def whole(body: Any, name: str, limit: int | None) -> bytes:
    """Read at most one byte beyond the limit, whatever length the server has announced."""
    value = bytearray()
    while piece := body.read(PIECE if limit is None else min(PIECE, limit + 1 - len(value))):
        value += piece
        if limit is not None and len(value) > limit:
            body.close()
            raise TooLarge(f"{name} holds more than the {limit} bytes that were expected")
    return bytes(value)


def md5(value: Value) -> str:
    return base64.b64encode(digest("md5", value)).decode()


def why(error: urllib3.exceptions.HTTPError) -> str:
    """Return the cause of an error of urllib3 in one line, without the address, whose query may be a secret."""
    reason = getattr(error, "reason", None)
    under = reason.args[0] if isinstance(reason, urllib3.exceptions.SSLError) and reason.args else None
    if isinstance(under, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {under.verify_message}{device_hint(under.verify_message)}"
    return type(error).__name__ if reason is None else printable(str(reason).rpartition(": ")[2])


def _without_query(text: str, url: str) -> str:
    """Remove a presigned URL's query, which is a secret."""
    query = url.partition("?")[2]
    return text.replace(query, "...") if query else text
