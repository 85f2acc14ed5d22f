"""The run store on S3, for processes with credentials. `urls` has the store of a device without credentials.

boto3 finds the credentials (environment, files, the pod's role), and AWS_ENDPOINT_URL names a server that is not
Amazon's. A device without credentials gets URLs that read one key or upload one key, for a limited time.
FLEXFLEET_SIGNING_AWS_* may name credentials with fewer rights to sign these URLs.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import urllib3

from fl_engine.core.errors import (
    Busy,
    ConfigError,
    EnvironmentFailure,
    IntegrityError,
    Refused,
    Unreachable,
    certificate_hint,
    masked,
)
from fl_engine.core.text import folder_hint, is_meant
from fl_engine.storage.outage import waiting
from fl_engine.storage.serialization import Value, in_parts
from fl_engine.storage.store import FolderStore, Store, check_size, sha256
from fl_engine.storage.urls import AT_ONCE, FIXED, READS, Upload, Verb, again, md5, whole

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

R = TypeVar("R")

PART = 64 * 2**20
"""Values with more bytes are uploaded in parts of this size."""
ATTEMPTS = 6
"""Tries of a request that the server does not answer, or answers with 429 or 5xx."""
BUSY = ("InternalError", "ServiceUnavailable", "SlowDown")
"""Error codes of a deletion that is tried again."""
HASTY_S = 5
"""Timeout in seconds of a store that is opened with `hasty`."""
MOST_AT_ONCE = 5 * 2**30
"""Bytes of the largest upload by a URL or a form."""
PAGE = 1000
"""The most keys of one listing or deletion."""
CONNECTING = threading.Lock()
"""Threads that need the same client wait for it, because a client takes 20 MB."""
OWN = "FLEXFLEET_"
"""Prefix of an environment variable of boto3 whose value holds for the run store only."""
SIGNING = "FLEXFLEET_SIGNING_"
"""Prefix of the variables with the credentials that sign the URLs of devices."""
MISSING = ("NoSuchKey", "404", "NotFound")
HINTS = {
    "NoSuchBucket": "Create the bucket, or correct run.remote",
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "The credentials may not do this: check the bucket's policy",
    "RequestTimeTooSkewed": "Set this machine's clock",
}


def open_store(uri: str, hasty: bool = False, patience_s: float = 0.0) -> Store:
    """Open `s3://bucket/prefix`, or a folder. `hasty` and `patience_s` are those of `S3Store`. Raises ConfigError for
    an address with another scheme, because a folder of that name is hardly meant."""
    return S3Store(uri, hasty=hasty, patience_s=patience_s) if is_meant(uri) else FolderStore(uri)


def check_place(name: str, uri: str | None) -> None:
    """Raise ConfigError unless the parameter `name` has the address of a store, or None. Sends no request."""
    if uri is not None and uri != uri.strip():
        raise ConfigError(f"{name} must not begin or end with a blank, got {masked(uri)!r}")
    try:
        open_store(uri or "")
    except ConfigError:
        got = masked(uri or "")
        raise ConfigError(f"{name} must be s3://bucket/prefix or a folder, got {got!r}{folder_hint(got)}") from None


def patient(method: Callable[..., R]) -> Callable[..., R]:
    """Repeat a method of `S3Store` for at most `patience_s` seconds while the server is unreachable."""

    @functools.wraps(method)
    def call(self: S3Store, *args: Any) -> R:
        return waiting(functools.partial(method, self, *args), self._patience_s)

    return call


class S3Store:
    """A store under `s3://bucket/prefix`. Each value has its sha256 as metadata, which is verified when it is read.
    Values that were uploaded with a URL have no such metadata; a manifest has their sha256.

    All requests and signatures raise EnvironmentFailure if the server or its certificate is refused or there are no
    credentials, Unreachable if the server does not answer after all tries, and ConfigError for an invalid address.
    """

    at_once = AT_ONCE

    def __init__(
        self,
        uri: str,
        endpoint: str | None = None,
        settings: str = OWN,
        hasty: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        """`settings`: prefix of the variables with this store's address and credentials; variables that are not set
        fall back to those with the prefix OWN, then to boto3's. `hasty`: two tries of a few seconds each.
        `patience_s`: how long to wait for an unreachable server."""
        scheme, _, rest = uri.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not self._bucket or masked(uri) != uri:
            raise ConfigError(f"an S3 store is s3://bucket/prefix, got {masked(uri)!r}")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._settings = settings
        self._hasty, self._patience_s = hasty, patience_s
        self._clients: dict[tuple[str | None, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}  # connections cannot move to another process

    @property
    def _client(self) -> Any:
        return self._client_of(self._endpoint, self._settings)

    def _client_of(self, endpoint: str | None, settings: str) -> Any:
        key = endpoint, settings
        with CONNECTING:
            if key not in self._clients:
                self._clients[key] = _connect(endpoint, settings, self._hasty)
        return self._clients[key]

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @patient
    def put(self, key: str, value: Value) -> None:
        given = {**self._where(key), "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            if len(value) <= PART:
                self._client.put_object(Body=bytes(value), ContentMD5=md5(value), **given)
            else:
                self._put_parts(value, given)

    def _put_parts(self, value: Value, given: Mapping[str, Any]) -> None:
        """The object appears when the upload is completed, never in part."""
        where = {"Bucket": given["Bucket"], "Key": given["Key"]}
        upload = {**where, "UploadId": self._client.create_multipart_upload(**given)["UploadId"]}
        try:
            parts = []
            for number, body in enumerate(in_parts(value, PART), 1):
                sent = self._client.upload_part(Body=body, ContentMD5=md5(body), PartNumber=number, **upload)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)
        except BaseException:
            self._client.abort_multipart_upload(**upload)
            raise

    def create(self, key: str, value: bytes) -> bool:
        from botocore.exceptions import ClientError

        given = {**self._where(key), "Metadata": {"sha256": sha256(value)}, "ContentMD5": md5(value)}
        with self._explained(key):
            for pause in _pauses():
                try:
                    self._client.put_object(Body=value, IfNoneMatch="*", **given)
                    return True
                except ClientError as error:
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    # 409: another request for this key is in progress, perhaps an earlier try of this one.
                    exists = status == 412 or (status == 409 and pause is None and key in self.list(key))
                    if exists:
                        return False
                    if status != 409 or pause is None:
                        raise
                    time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    @patient
    def get(self, key: str, limit: int | None = None) -> bytes:
        from botocore.exceptions import BotoCoreError

        def read() -> bytes:
            found = self._client.get_object(**self._where(key))
            check_size(self.uri(key), found.get("ContentLength", 0), limit)
            value = whole(found["Body"], self.uri(key), limit)
            expected = found["Metadata"].get("sha256")
            if expected not in (None, sha256(value)):
                raise IntegrityError(f"{self.uri(key)} is damaged: its sha256 is not {expected}")
            return value

        with self._explained(key):
            return again(read, (BotoCoreError, urllib3.exceptions.HTTPError), READS)

    @patient
    def list(self, prefix: str) -> list[str]:
        where = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "PaginationConfig": {"PageSize": PAGE}}
        with self._explained(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(**where)
            found = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return sorted(key.removeprefix(self._prefix) for key in found)

    @patient
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
                    where = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self._client.abort_multipart_upload(Bucket=self._bucket, **where)

    def uri(self, key: str = "") -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}".rstrip("/")

    # ------------------------------------------------------------------------------------------ signed URLs
    def presign(self, key: str, seconds: int, endpoint: str | None = None) -> str:
        """Return a URL that reads `key` for `seconds`. `endpoint`: the server's address as devices reach it, if it
        differs."""
        with self._explained(key):
            url: str = self._signer(endpoint).generate_presigned_url(
                "get_object", Params=self._where(key), ExpiresIn=seconds
            )
        return url

    def upload(self, key: str, size: int, seconds: int, verb: Verb, endpoint: str | None = None) -> Upload:
        """Return the permission to write `key` for `seconds`: at most `size` bytes with POST, exactly `size` bytes with
        PUT. Raises ConfigError if S3 does not accept that many bytes in one request."""
        if size > MOST_AT_ONCE:
            raise ConfigError(
                f"{self.uri(key)} may have {size / 1e9:.2f} GB, and S3 takes {MOST_AT_ONCE / 1e9:.2f} GB in one "
                "upload. Set codec.up={name: half}, or take a smaller network"
            )
        with self._explained(key):
            signer = self._signer(endpoint)
            if verb == "PUT":
                headers = {"Content-Type": FIXED["Content-Type"]}
                given = {**self._where(key), "ContentType": FIXED["Content-Type"], "ContentLength": size}
                url = signer.generate_presigned_url("put_object", Params=given, ExpiresIn=seconds)
                return Upload(verb=verb, url=url, fields=headers, size=size)
            conditions = [*({name: value} for name, value in FIXED.items()), ["content-length-range", 1, size]]
            form = signer.generate_presigned_post(
                **self._where(key), Fields=FIXED, Conditions=conditions, ExpiresIn=seconds
            )
            return Upload(verb=verb, url=form["url"], fields=form["fields"], size=size)

    def _signer(self, endpoint: str | None) -> Any:
        return self._client_of(endpoint or self._endpoint, SIGNING if self._settings == OWN else self._settings)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn the errors of boto3 into those of the run store."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
        from botocore.exceptions import ConnectionError as NoConnection

        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in MISSING:
                raise IntegrityError(f"{self.uri(key)} is missing from the run store") from None
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status >= 500 or status in (408, 429):
                raise Busy(
                    f"{self.uri(key)}: the server answers {error.operation_name} with {status} {code} after all tries. "
                    "It is overloaded or starting: try again later"
                ) from error
            raise Refused(_refusal(error, self.uri(key))) from error
        except (BotoCoreError, urllib3.exceptions.HTTPError) as error:
            gone = isinstance(error, HTTPClientError | NoConnection | urllib3.exceptions.HTTPError)
            refused = isinstance(error, SSLError | urllib3.exceptions.SSLError)
            raise (Unreachable if gone and not refused else EnvironmentFailure)(
                f"{self.uri(key)} cannot be reached: {error}. Check AWS_ENDPOINT_URL, the credentials and the network"
                f"{certificate_hint(str(error))}"
            ) from error


def _connect(endpoint: str | None, settings: str, hasty: bool) -> Any:
    import boto3.session
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    named = http_address("endpoint", endpoint) if endpoint else endpoint_of(settings)
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "total_max_attempts": 2 if hasty else ATTEMPTS},
        connect_timeout=HASTY_S if hasty else 10,
        read_timeout=HASTY_S if hasty else 120,
        s3={"addressing_style": "path"} if named else {},
        # Only Amazon's servers support the newer checksums. This file sends and checks sha256 and MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    region = setting("AWS_REGION", settings) or setting("AWS_DEFAULT_REGION", settings) or "us-east-1"
    given = _credentials(settings) or _credentials(OWN)
    core = botocore.session.Session()
    core.register_component("data_loader", _services())
    session = boto3.session.Session(*given or (), botocore_session=core)
    try:
        return session.client("s3", endpoint_url=named, region_name=region, config=config)
    except BotoCoreError:  # some of these errors are ValueErrors
        raise
    except ValueError as error:
        raise ConfigError(
            f"{masked(str(error))}: the S3 server's address (AWS_ENDPOINT_URL) is http://host:port or "
            "https://host:port, with letters, digits, hyphens and dots in the host's name"
        ) from None


@functools.cache
def _services() -> Any:
    """botocore's descriptions of services. Each session would read them again, which takes most of the time of a
    connection."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


def _credentials(prefix: str) -> tuple[str, str, str | None] | None:
    key, secret, token = (
        os.environ.get(f"{prefix}AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
    )
    if key and secret:
        return key, secret, token or None
    if key or secret or token:
        raise ConfigError(f"Set both {prefix}AWS_ACCESS_KEY_ID and {prefix}AWS_SECRET_ACCESS_KEY, or neither")
    return None


def setting(name: str, settings: str = OWN) -> str | None:
    """Return the variable with the prefix `settings`, or else OWN, or else without a prefix."""
    return os.environ.get(f"{settings}{name}") or os.environ.get(f"{OWN}{name}") or os.environ.get(name)


def endpoint_of(settings: str = OWN) -> str | None:
    """Return the server's address; None for Amazon's. Raises ConfigError for an invalid one. Sends no request."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if address := setting(name, settings):
            return http_address(name, address)
    return None


def http_address(name: str, address: str) -> str:
    """Return the address. Raises ConfigError, which says its `name`, if it is invalid."""
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{name} is http://host:port or https://host:port, got {masked(address)!r}")
    return address


def _pauses() -> Iterator[float | None]:
    """For each try the seconds before the next one; None for the last try."""
    yield from (0.2 * 2**attempt for attempt in range(ATTEMPTS - 1))
    yield None


def _refusal(error: ClientError, uri: str) -> str:
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message")
    said = f"{code} {message or ''}".rstrip(" .")  # radosgw has no message, Amazon's ends in a full stop
    hint = HINTS.get(code, "Check AWS_ENDPOINT_URL and the credentials")
    return f"{uri}: the server refuses {error.operation_name} with {said}. {hint}"
