"""The run store on S3, and what a device sees of it.

The coordinator speaks to the bucket with ambient credentials (boto3's: environment, files, the pod's role);
AWS_ENDPOINT_URL names a server that is not Amazon's. A client that holds no keys gets URLs to read and leave to upload,
each good for one key and a limited time; FLEXFLEET_SIGNING_AWS_* may name narrower credentials that sign them.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import urllib3
from pydantic import BaseModel, ConfigDict

from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    IntegrityError,
    Refused,
    Unreachable,
    certificate_hint,
    device_hint,
    masked,
    printable,
)
from fl_engine.storage.pieces import Pieces, Value, digest, in_parts
from fl_engine.storage.store import check_size, sha256

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

T = TypeVar("T")

PART = 64 * 2**20
"""Bytes. Larger values are uploaded in parts of this size."""
ATTEMPTS = 6
"""Tries of a request that the server does not answer, or answers with 429 or 5xx."""
BUSY = ("InternalError", "ServiceUnavailable", "SlowDown")
"""What a server says of a key whose deletion may be tried again."""
HASTY_S = 5
"""Seconds in which a server answers who does not want to wait."""
READS = 4
"""Tries of a download that breaks off."""
SENDS = 3
"""Tries of an upload that arrives damaged."""
MOST_AT_ONCE = 5 * 2**30
"""Bytes of the largest upload in one request, by a URL or a form."""
PIECE = 2**20
"""Bytes that are read of a body at a time."""
PAGE = 1000
"""The most keys of one listing or deletion."""
AT_ONCE = 8
"""Requests that overlap (`overlapping`); boto3 and urllib3 keep a connection for each."""
CONNECTING = threading.Lock()
"""A client takes 20 MB and credentials: threads that need the same one wait for it."""
OWN = "FLEXFLEET_"
"""Prefix of a variable that boto3 reads: the value for the run store alone, where another part of the process needs
another value."""
SIGNING = "FLEXFLEET_SIGNING_"
"""Prefix likewise: credentials that sign what clients get, so that clients can do no more than these may."""
REFUSED = "CERTIFICATE_VERIFY_FAILED"
"""What urllib3 says of a certificate that is not trusted."""
MISSING = ("NoSuchKey", "404", "NotFound")
FIXED = {
    # As good as private, and the only ACL that Amazon's buckets accept now that ACLs are off by default. It lets the
    # bucket's owner read the object where other credentials have signed.
    "acl": "bucket-owner-full-control",
    "Content-Type": "application/octet-stream",
    # The answer then has the ETag, with every server.
    "success_action_status": "201",
}
"""What the form of an upload says besides its key, and a client cannot change."""
ETAG = re.compile(rb"<ETag>(?:\"|&quot;|&#34;)?([0-9a-f]{32})(?:\"|&quot;|&#34;)?</ETag>")

Verb = Literal["POST", "PUT"]


class Upload(BaseModel):
    """Leave to write one key. POST: a form, whose policy fixes the key, ACL and type, and 1 to `size` bytes; PUT: a URL
    signed for exactly `size` bytes and a type. Which of them a server enforces, `probe` sees."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    verb: Verb
    url: str
    fields: dict[str, str]
    """Of the form; with PUT, headers."""
    size: int
    """In bytes."""


class S3Store:
    """A store under `s3://bucket/prefix`. Every value carries its sha256 as metadata, verified when it is read; one
    that came through a presigned URL has none, and is vouched for by what names it (a manifest).

    All that asks or signs raises EnvironmentFailure where the server refuses, its certificate is refused or there are
    no credentials, Unreachable where nobody answers, after retries, and ConfigError for an address that is none.
    `ca_bundle` and region come from the environment too.
    """

    at_once = AT_ONCE

    def __init__(self, uri: str, endpoint: str | None = None, settings: str = OWN, hasty: bool = False) -> None:
        """`settings` is what stands in front of the environment's variables with this store's address and credentials;
        where they are not set, those after OWN count, then boto3's. `hasty`: one try of a few seconds."""
        scheme, _, rest = uri.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not self._bucket or masked(uri) != uri:
            raise ConfigError(f"an S3 store is s3://bucket/prefix, got {masked(uri)!r}")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._settings = settings
        self._hasty = hasty
        self._made: dict[tuple[str | None, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}  # a connection is not for another process

    @property
    def _client(self) -> Any:
        return self._client_of(self._endpoint)

    def _client_of(self, endpoint: str | None, settings: str = "") -> Any:
        made = endpoint, settings or self._settings
        if made not in self._made:
            with CONNECTING:
                if made not in self._made:
                    self._made[made] = _connect(*made, self._hasty)
        return self._made[made]

    def put(self, key: str, value: Value) -> None:
        given = {"Bucket": self._bucket, "Key": self._prefix + key, "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            if len(value) <= PART:
                self._client.put_object(Body=bytes(value), ContentMD5=_md5(value), **given)
            else:
                self._put_parts(value, given)

    def create(self, key: str, value: bytes) -> bool:
        from botocore.exceptions import ClientError

        given = {"Bucket": self._bucket, "Key": self._prefix + key, "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            for pause in _pauses():
                try:
                    self._client.put_object(Body=value, ContentMD5=_md5(value), IfNoneMatch="*", **given)
                except ClientError as error:
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    if status == 412:
                        return False
                    # 409: another request for this key is under way, perhaps an earlier try of this one. Nothing says
                    # yet whether the key will be there.
                    if status != 409:
                        raise
                    if pause is None:
                        if key in self.list(key):
                            return False
                        raise
                    time.sleep(pause)
                else:
                    return True
        raise AssertionError("the last try returns or raises")

    def _put_parts(self, value: Value, given: Mapping[str, Any]) -> None:
        """The object appears whole when the upload is completed, or never."""
        where = {"Bucket": given["Bucket"], "Key": given["Key"]}
        upload = {**where, "UploadId": self._client.create_multipart_upload(**given)["UploadId"]}
        try:
            parts = []
            for number, body in enumerate(in_parts(value, PART), 1):
                sent = self._client.upload_part(Body=body, ContentMD5=_md5(body), PartNumber=number, **upload)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)
        except BaseException:
            self._client.abort_multipart_upload(**upload)
            raise

    def get(self, key: str, limit: int | None = None) -> bytes:
        def read() -> bytes:
            found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            check_size(self.uri(key), found.get("ContentLength", 0), limit)
            value = _whole(found["Body"], self.uri(key), limit)
            expected = found["Metadata"].get("sha256")
            if expected not in (None, sha256(value)):
                raise IntegrityError(f"{self.uri(key)} is damaged: {len(value)} bytes whose sha256 is not {expected}")
            return value

        with self._explained(key):
            return _again(read)

    def list(self, prefix: str) -> list[str]:
        with self._explained(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            found = [
                item["Key"].removeprefix(self._prefix)
                for page in pages.paginate(
                    Bucket=self._bucket, Prefix=self._prefix + prefix, PaginationConfig={"PageSize": PAGE}
                )
                for item in page.get("Contents", ())
            ]
        return sorted(found)

    def delete(self, *keys: str) -> None:
        with self._explained(keys[0] if keys else ""):
            for start in range(0, len(keys), PAGE):
                left = [self._prefix + key for key in keys[start : start + PAGE]]
                for pause in _pauses():
                    objects = {"Objects": [{"Key": key} for key in left], "Quiet": True}
                    failed = self._client.delete_objects(Bucket=self._bucket, Delete=objects).get("Errors", ())
                    for error in failed:
                        if pause is None or error["Code"] not in BUSY:
                            raise EnvironmentFailure(f"{self.uri()}: {error['Key']} cannot be deleted: {error['Code']}")
                    if not failed:
                        break
                    left = [error["Key"] for error in failed]
                    time.sleep(pause or 0.0)

    def sweep(self, prefix: str) -> None:
        with self._explained(prefix):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for upload in page.get("Uploads", ()):
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def uri(self, key: str = "") -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}".rstrip("/")

    def presign(self, key: str, seconds: int, endpoint: str | None = None) -> str:
        """A URL that reads `key`, good for `seconds`; `endpoint` is what devices call the server, where that
        differs. To write, there is `upload`."""
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        with self._explained(key):  # a role's credentials are renewed where they have run out
            url: str = self._signer(endpoint).generate_presigned_url("get_object", Params=where, ExpiresIn=seconds)
        return url

    def upload(self, key: str, size: int, seconds: int, verb: Verb, endpoint: str | None = None) -> Upload:
        """Leave to write `key` for `seconds`: at most `size` bytes by POST, exactly so many by PUT. Raises ConfigError
        where that is more than S3 takes at once."""
        if size > MOST_AT_ONCE:
            raise ConfigError(
                f"{self.uri(key)} may have {size / 1e9:.2f} GB, and S3 takes {MOST_AT_ONCE / 1e9:.2f} GB in one "
                "upload: set codec.up={name: half}, or take a smaller network"
            )
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        if verb == "PUT":
            headers = {"Content-Type": FIXED["Content-Type"]}
            given = {**where, "ContentType": FIXED["Content-Type"], "ContentLength": size}
            with self._explained(key):
                url = self._signer(endpoint).generate_presigned_url("put_object", Params=given, ExpiresIn=seconds)
            return Upload(verb=verb, url=url, fields=headers, size=size)
        conditions = [{name: value} for name, value in FIXED.items()]
        with self._explained(key):
            form = self._signer(endpoint).generate_presigned_post(
                **where, Fields=FIXED, Conditions=[*conditions, ["content-length-range", 1, size]], ExpiresIn=seconds
            )
        return Upload(verb=verb, url=form["url"], fields=form["fields"], size=size)

    def _signer(self, endpoint: str | None) -> Any:
        return self._client_of(endpoint or self._endpoint, SIGNING if self._settings == OWN else "")

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
        from botocore.exceptions import ConnectionError as NoConnection

        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in MISSING:
                raise IntegrityError(f"{self.uri(key)} is missing from the run store") from None
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            kind = Unreachable if status >= 500 or status in (408, 429) else Refused
            raise kind(_why(error, self.uri(key))) from error
        except (BotoCoreError, urllib3.exceptions.HTTPError) as error:
            gone = isinstance(error, HTTPClientError | NoConnection | urllib3.exceptions.HTTPError)
            refused = isinstance(error, SSLError | urllib3.exceptions.SSLError)
            raise (Unreachable if gone and not refused else EnvironmentFailure)(
                f"{self.uri(key)} cannot be reached: {error}. Check AWS_ENDPOINT_URL, the credentials and the network"
                f"{certificate_hint(str(error))}"
            ) from error


class UrlStore:
    """What a client without keys sees of a store: URLs of the keys that it may read, leave to write others. Raises
    EnvironmentFailure where the server does not answer, after retries, and IntegrityError where it refuses.

    `within_s`: for what is soon out of date and holds secrets: two tries of so many seconds, and no redirect; None:
    patient."""

    at_once = AT_ONCE

    def __init__(self, reads: Mapping[str, str], writes: Mapping[str, Upload], within_s: float | None = None) -> None:
        self._reads, self._writes = reads, writes
        self._pool = patient_pool() if within_s is None else hasty_pool(within_s)
        self._tries = READS if within_s is None else 1

    def put(self, key: str, value: Value) -> None:
        if (upload := self._writes.get(key)) is None:
            raise IntegrityError(f"no leave was given to write {key}")
        for _ in range(SENDS):
            with self._explained(upload.verb, key, upload.url):
                answer = send(self._pool, upload, value)
                self._check(answer, upload.verb, key)
            if _etag(answer) in (None, digest("md5", value).hex()):
                return
        raise IntegrityError(
            f"{upload.verb} {self.uri(key)}: {SENDS} times other bytes arrived than the {len(value)} that were sent"
        )

    def get(self, key: str, limit: int | None = None) -> bytes:
        if (url := self._reads.get(key)) is None:
            raise IntegrityError(f"no URL was given to read {key}")

        def read() -> bytes:
            answer = self._pool.request("GET", url, preload_content=False)
            try:
                self._check(answer, "GET", key)
                return _whole(answer, self.uri(key), limit)
            finally:
                answer.release_conn()

        with self._explained("GET", key, url):
            return _again(read, self._tries)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._reads if key.startswith(prefix))

    def create(self, key: str, value: bytes) -> bool:
        raise IntegrityError(f"a client creates nothing that others may, asked for {key}")

    def delete(self, *keys: str) -> None:
        raise IntegrityError(f"a client deletes nothing, asked for {', '.join(keys)}")

    def sweep(self, prefix: str) -> None:
        raise IntegrityError(f"a client deletes nothing, asked to sweep {prefix}")

    def uri(self, key: str = "") -> str:
        return f"the run store's {key}"

    @contextmanager
    def _explained(self, verb: str, key: str, url: str) -> Iterator[None]:
        try:
            yield
        except urllib3.exceptions.HTTPError as error:
            said = _without_query(str(error), url)
            raise EnvironmentFailure(f"{verb} {self.uri(key)}: {said}{device_hint(said)}") from None

    def _check(self, answer: urllib3.BaseHTTPResponse, verb: str, key: str) -> None:
        if answer.status >= 300:
            said = answer.data[:300].decode(errors="replace")
            kind = EnvironmentFailure if answer.status >= 500 or answer.status == 429 else IntegrityError
            raise kind(f"{verb} {self.uri(key)}: HTTP {answer.status} {said}")


class Retry(urllib3.Retry):
    """Does not ask again where a certificate is refused: it will be the next time too."""

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
        return super().increment(method, url, response, error, _pool, _stacktrace)


def patient_pool() -> urllib3.PoolManager:
    """Connections on which a request is made again that meets no answer, 429 or 5xx."""
    retry = Retry(
        6, backoff_factor=0.5, backoff_jitter=0.5, status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=None, raise_on_status=False,
    )  # fmt: skip
    return urllib3.PoolManager(maxsize=AT_ONCE, retries=retry, timeout=urllib3.Timeout(connect=10, read=120))


def hasty_pool(seconds: float) -> urllib3.PoolManager:
    """Connections on which a request is made twice at most, and follows no redirect."""
    retry = Retry(1, redirect=False, backoff_factor=0.1, allowed_methods=None, raise_on_status=False)
    return urllib3.PoolManager(retries=retry, timeout=urllib3.Timeout(connect=seconds, read=seconds))


def send(
    pool: urllib3.PoolManager, upload: Upload, value: Value, headers: Mapping[str, str] = MappingProxyType({})
) -> urllib3.BaseHTTPResponse:
    """The answer to an upload, whatever it is; `headers`: more of them."""
    if upload.verb == "PUT":
        given = {**upload.fields, "Content-MD5": _md5(value), "Content-Length": str(len(value)), **headers}
        return pool.request("PUT", upload.url, body=cast(Any, value), headers=given, redirect=False)
    form, kind = _form(upload.fields, value)
    given = {"Content-Type": kind, "Content-Length": str(len(form)), **headers}
    # Some servers answer a form that its policy does not allow with a redirect.
    return pool.request("POST", upload.url, body=cast(Any, form), headers=given, redirect=False)


def _form(fields: Mapping[str, str], value: Value) -> tuple[Pieces, str]:
    """A form with a file as its last field, since what follows the file is not read; and its content type."""
    boundary = secrets.token_hex(16)
    told: dict[str, str | tuple[str, bytes, str]] = {**fields, "file": ("value", b"", FIXED["Content-Type"])}
    empty, kind = urllib3.encode_multipart_formdata(told, boundary)
    end = f"\r\n--{boundary}--\r\n".encode()
    return Pieces((empty.removesuffix(end), *(value.parts if isinstance(value, Pieces) else (value,)), end)), kind


def _etag(answer: urllib3.BaseHTTPResponse) -> str | None:
    """The MD5 of what arrived; None where the server does not say it: its ETags are something else for some kinds of
    encryption and storage. What is damaged then is seen when it is read, by the manifest's sha256."""
    if answer.headers.get("x-amz-server-side-encryption", "").startswith("aws:kms"):
        return None
    said = re.fullmatch('"?([0-9a-f]{32})"?', answer.headers.get("ETag", ""))
    if said is not None:
        return said[1]
    inside = ETAG.search(answer.data)
    return None if inside is None else inside[1].decode()


def _connect(endpoint: str | None, settings: str, hasty: bool) -> Any:
    import boto3.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    named = http_address("endpoint", endpoint) if endpoint else endpoint_of(settings)
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "total_max_attempts": 1 if hasty else ATTEMPTS},
        connect_timeout=HASTY_S if hasty else 10,
        read_timeout=HASTY_S if hasty else 120,
        s3={"addressing_style": "path"} if named else {},
        # Other servers than Amazon's do not know the newer checksums; sha256 and MD5 are sent and checked here.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    region = setting("AWS_REGION", settings) or setting("AWS_DEFAULT_REGION", settings) or "us-east-1"
    given = _credentials(settings) or _credentials(OWN)
    session = boto3.session.Session(*given or ())  # without own ones: wherever boto3 finds them
    try:
        return session.client("s3", endpoint_url=named, region_name=region, config=config)
    except BotoCoreError:  # of which some are ValueErrors
        raise
    except ValueError as error:  # a host's name that botocore does not take, or an address in its own settings
        raise ConfigError(
            f"{masked(str(error))}: the S3 server's address (AWS_ENDPOINT_URL) is http://host:port or "
            "https://host:port, with letters, digits, hyphens and dots in the host's name"
        ) from None


def _credentials(prefix: str) -> tuple[str, str, str | None] | None:
    key, secret, token = (
        os.environ.get(f"{prefix}AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
    )
    if key and secret:
        return key, secret, token or None
    if key or secret or token:
        raise ConfigError(f"{prefix}AWS_ACCESS_KEY_ID and {prefix}AWS_SECRET_ACCESS_KEY go together: set both, or none")
    return None


def setting(name: str, settings: str = OWN) -> str | None:
    return os.environ.get(f"{settings}{name}") or os.environ.get(f"{OWN}{name}") or os.environ.get(name)


def endpoint_of(settings: str = OWN) -> str | None:
    """The server's address; None: Amazon's. Raises ConfigError for one that is none. Nobody is asked."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if address := setting(name, settings):
            return http_address(name, address)
    return None


def http_address(name: str, address: str) -> str:
    """The address. Raises ConfigError, which says its `name`, where it is none."""
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, a port that is no number
        good = False
    if not good:
        raise ConfigError(f"{name} is http://host:port or https://host:port, got {masked(address)!r}")
    return address


def _pauses() -> Iterator[float | None]:
    """For each try, how long to wait before the next; None: it is the last."""
    yield from (0.2 * 2**attempt for attempt in range(ATTEMPTS - 1))
    yield None


def _again(read: Callable[[], T], tries: int = READS) -> T:
    """Repeats a read whose body broke off, and no other: a body that is too large or damaged is so on every try."""
    from botocore.exceptions import BotoCoreError

    for attempt in range(tries - 1):
        try:
            return read()
        except (BotoCoreError, urllib3.exceptions.HTTPError):
            time.sleep(0.2 * 2**attempt)
    return read()


def _whole(body: Any, name: str, limit: int | None) -> bytes:
    """Reads at most one byte beyond the limit, whatever length the server has announced."""
    value = bytearray()
    while piece := body.read(PIECE if limit is None else min(PIECE, limit + 1 - len(value))):
        value += piece
        if limit is not None and len(value) > limit:
            body.close()
            raise IntegrityError(f"{name} holds more than the {limit} bytes that were expected")
    return bytes(value)


def _why(error: ClientError, uri: str) -> str:
    code, said = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
    hints = {
        "NoSuchBucket": "create the bucket, or correct run.remote",
        "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
        "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
        "AccessDenied": "the credentials may not do this: check the bucket's policy",
        "RequestTimeTooSkewed": "set this machine's clock",
    }
    return f"{uri}: the server refuses {error.operation_name} with {code} {said}. " + hints.get(
        code, "Check AWS_ENDPOINT_URL and the credentials"
    )


def _md5(value: Value) -> str:
    return base64.b64encode(digest("md5", value)).decode()


def why(error: urllib3.exceptions.HTTPError) -> str:
    """What is under an error of urllib3, in a line without the address, whose query may be a secret."""
    reason = getattr(error, "reason", None)
    under = reason.args[0] if isinstance(reason, urllib3.exceptions.SSLError) and reason.args else None
    if isinstance(under, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {under.verify_message}{device_hint(under.verify_message)}"
    return type(error).__name__ if reason is None else printable(str(reason).rpartition(": ")[2])


def _without_query(text: str, url: str) -> str:
    """A presigned URL's query is a secret."""
    query = url.partition("?")[2]
    return text.replace(query, "...") if query else text
