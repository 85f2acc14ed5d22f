"""The run store on S3, for processes with credentials. The module `urls` is for devices without credentials.

boto3 reads the credentials and the region from variables, files or the pod's role. Set AWS_ENDPOINT_URL to use a server
other than Amazon's. Devices without credentials get presigned URLs. Each URL allows reading or uploading one key, and
expires. To sign these URLs with credentials that have fewer rights, set FLEXFLEET_SIGNING_AWS_*.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import urllib3

from fl_engine.core.errors import Busy, ConfigError, EnvironmentFailure, IntegrityError, Refused, Unreachable, masked
from fl_engine.core.text import is_address
from fl_engine.storage import proxies
from fl_engine.storage.outage import waiting
from fl_engine.storage.s3_settings import AT_ONCE, OWN, SIGNING, connect, endpoint_of
from fl_engine.storage.store import FolderStore, Value, check_size, sha256
from fl_engine.storage.urls import FIXED, Upload, Verb, md5, whole

R = TypeVar("R")

ATTEMPTS = 6
"""Maximum number of attempts if the server does not respond, or responds with 429 or 5xx."""
HASTY_S = 5
"""Timeout of a request in seconds if `hasty` is True."""
MOST_AT_ONCE = 5 * 2**30
PAGE = 1000
"""Maximum number of keys in one listing or deletion."""
CONNECTING = threading.Lock()
"""Lock that prevents two threads from creating the same boto3 client, because a client needs 20 MB."""
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
BUCKET_RULE = "The name of a bucket has 3 to 63 lowercase letters, digits, '-' and '.'"
MISSING = ("NoSuchKey", "404", "NotFound")
REGION = "Set AWS_REGION, or `region` in ~/.aws/config, to the region of the server"
HINTS = {
    "NoSuchBucket": "Create the bucket, or correct run.remote",
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "The credentials lack a permission. Check the bucket's policy",
    "RequestTimeTooSkewed": "Set this machine's clock",
    "AuthorizationHeaderMalformed": REGION,
    "407": proxies.HINT,
}


def open_store(uri: str, hasty: bool = False, patience_s: float = 0.0) -> S3Store | FolderStore:
    """Open `s3://bucket/prefix` or a folder. `hasty` and `patience_s` are options of `S3Store`. Raises ConfigError if
    `uri` has a scheme other than s3, because such a `uri` is probably not a folder."""
    return S3Store(uri, hasty=hasty, patience_s=patience_s) if is_address(uri) else FolderStore(uri)


def check_place(name: str, uri: str | None) -> None:
    """Raise ConfigError if `uri` is neither a store's address nor None. `name` is the name of the parameter."""
    if uri is not None and uri != uri.strip():
        raise ConfigError(f"{name} must not begin or end with a space, got {masked(uri)!r}")
    try:
        open_store(uri or "")
    except ConfigError:
        got = masked(uri or "")
        hint = f". {BUCKET_RULE}" if got.startswith("s3://") else f". Write ./{got} for a folder" * ("/" not in got)
        raise ConfigError.at(f"{name} must be s3://bucket/prefix or a folder, got {got!r}{hint}") from None


def patient(method: Callable[..., R]) -> Callable[..., R]:
    """Retry a method of `S3Store` for at most `patience_s` seconds while the server is unreachable."""

    @functools.wraps(method)
    def call(self: S3Store, *args: Any) -> R:
        return waiting(functools.partial(method, self, *args), self._patience_s)

    return call


class S3Store:
    """A store under `s3://bucket/prefix`. The metadata of each object contains the value's SHA-256, which is verified
    on reading. Objects that were uploaded with a URL do not have this metadata. The SHA-256 of these objects is in a
    manifest.

    All methods that send or sign a request raise:
        EnvironmentFailure: The server rejects the request, its certificate is invalid, or credentials are missing.
        Unreachable: The server does not respond after all attempts.
        ConfigError: The address is invalid.
    """

    at_once = AT_ONCE

    def __init__(
        self, uri: str, endpoint: str | None = None, settings: str = OWN, hasty: bool = False, patience_s: float = 0.0
    ) -> None:
        """`settings` is the prefix of the variables with this store's address and credentials. If a variable is not
        set, the variable with the prefix OWN is used, and then the variable without a prefix. `hasty` limits requests
        to two attempts of a few seconds. `patience_s` is the maximum time to wait for an unreachable server, in
        seconds."""
        scheme, _, rest = uri.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not BUCKET.fullmatch(self._bucket) or masked(uri) != uri:
            got = masked(uri)
            raise ConfigError(f"the address of an S3 store must be s3://bucket/prefix, got {got!r}. {BUCKET_RULE}")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._settings = settings
        self._tries, self._timeouts = (2, (HASTY_S, HASTY_S)) if hasty else (ATTEMPTS, (10, 120))
        self._patience_s = patience_s
        self._clients: dict[tuple[str | None, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}  # connections cannot be sent to another process

    @property
    def _client(self) -> Any:
        return self._client_of(self._endpoint, self._settings)

    def _client_of(self, endpoint: str | None, settings: str) -> Any:
        key = endpoint, settings
        with CONNECTING:
            if key not in self._clients:
                self._clients[key] = connect(endpoint, settings, self._tries, self._timeouts)
        return self._clients[key]

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @patient
    def put(self, key: str, value: Value) -> None:
        with self._explained(key):
            self._put(key, value)

    def _put(self, key: str, value: Value, **given: str) -> None:
        given |= {"ContentMD5": md5(value), **self._where(key)}
        self._client.put_object(Body=bytes(value), Metadata={"sha256": sha256(value)}, **given)

    def create(self, key: str, value: bytes) -> bool:
        from botocore.exceptions import ClientError

        for attempt in range(self._tries):
            try:
                with self._explained(key, passed=(409, 412)):
                    self._put(key, value, IfNoneMatch="*")
                    return True
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 412:
                    return False
                # 409 means that another request for this key is in progress, possibly an earlier attempt.
                time.sleep(0.2 * 2**attempt)
        if key in self.list(key):
            return False
        raise Busy(f"{self.uri(key)}: the server is still processing another request for this key. Try again later")

    @patient
    def get(self, key: str, limit: int | None = None) -> bytes:
        from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

        def read() -> bytes:
            found = self._client.get_object(**self._where(key))
            check_size(self.uri(key), found.get("ContentLength", 0), limit)
            value = whole(found["Body"], self.uri(key), limit)
            expected = found["Metadata"].get("sha256")
            if expected not in (None, sha256(value)):
                raise IntegrityError(f"{self.uri(key)} is damaged: its SHA-256 is not {expected}")
            return value

        with self._explained(key):
            for attempt in range(self._tries - 1):
                # botocore retries if there is no response, but not if the response's body is incomplete.
                with suppress(IncompleteReadError, ReadTimeoutError, ResponseStreamingError):
                    return read()
                time.sleep(0.2 * 2**attempt)
            return read()

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    @patient
    def sizes(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return the same as `FolderStore.sizes`."""
        where = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "PaginationConfig": {"PageSize": PAGE}}
        with self._explained(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(**where)
            found = [item for page in pages for item in page.get("Contents", ())]
        return {f["Key"].removeprefix(self._prefix): (f["Size"], f["LastModified"].timestamp()) for f in found}

    @patient
    def delete(self, *keys: str) -> None:
        with self._explained(keys[0] if keys else ""):
            for start in range(0, len(keys), PAGE):
                objects = [{"Key": self._prefix + key} for key in keys[start : start + PAGE]]
                found = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
                if failed := found.get("Errors"):
                    code = failed[0]["Code"]
                    raise EnvironmentFailure(f"{self.uri()}: {failed[0]['Key']} cannot be deleted: {code}")

    def sweep(self, prefix: str) -> None:
        """Do nothing, because an interrupted upload leaves no data."""

    def uri(self, key: str = "") -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}".rstrip("/")

    def presign(self, key: str, seconds: int, endpoint: str | None = None) -> str:
        """Return a URL for reading `key`, valid for `seconds`. `endpoint` is the server's address for devices."""
        with self._explained(key):
            url: str = self._signer(endpoint).generate_presigned_url(
                "get_object", Params=self._where(key), ExpiresIn=seconds
            )
        return url

    def upload(self, key: str, size: int, seconds: int, verb: Verb, endpoint: str | None = None) -> Upload:
        """Return a permission to upload `key` that is valid for `seconds`. The value must have at most `size` bytes
        with POST, and exactly `size` bytes with PUT. Raises ConfigError if `size` exceeds the limit of S3."""
        if size > MOST_AT_ONCE:
            raise ConfigError(f"{self.uri(key)}: an upload must be at most 5 GiB, got {size} B. Set codec.up.name=half")
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
    def _explained(self, key: str, passed: Collection[int] = ()) -> Iterator[None]:
        """Convert boto3's errors to errors of the run store. Do not convert errors with a status in `passed`."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
        from botocore.exceptions import ConnectionError as NoConnection
        from botocore.parsers import ResponseParserError

        try:
            yield
        except (ResponseParserError, RecursionError) as error:  # botocore follows a redirect without a region forever
            raise self._foreign("a web page or a redirect") from error
        except ClientError as error:
            code, status = error.response["Error"].get("Code", ""), error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in passed:
                raise
            if _is_foreign(error.response):
                raise self._foreign("a web page" if status == 500 else f"HTTP {code} instead of an S3 error") from error
            if code in MISSING:
                raise IntegrityError(f"{self.uri(key)} is missing from the run store") from None
            if status >= 500 or status in (408, 429):
                raise Busy(f"{self.uri(key)}: the server responds with {status} {code}. Try again later") from error
            message = error.response["Error"].get("Message") or ""
            reason = f"{code} {message}".rstrip(" .")  # radosgw may omit the message; Amazon ends it with a full stop
            hint = HINTS.get(code, "Check AWS_ENDPOINT_URL and the credentials")
            text = f"{self.uri(key)}: the server rejects {error.operation_name} with {reason}. {hint}"
            raise Refused(text) from error
        except (BotoCoreError, urllib3.exceptions.HTTPError) as error:
            gone = isinstance(error, HTTPClientError | NoConnection | urllib3.exceptions.HTTPError)
            refused = isinstance(error, SSLError | urllib3.exceptions.SSLError)
            raise (Unreachable if gone and not refused else EnvironmentFailure)(
                f"{self.uri(key)} cannot be reached: {error}. Check AWS_ENDPOINT_URL, the credentials and the network"
            ) from error

    def _foreign(self, answer: str) -> EnvironmentFailure:
        named = masked(self._endpoint or endpoint_of(self._settings) or "Amazon S3")
        return EnvironmentFailure(
            f"AWS_ENDPOINT_URL must be the address of an S3 server, such as http://minio:9000, but {named} responds "
            f"with {answer}"
        )


def _is_foreign(response: Mapping[str, Any]) -> bool:
    """Return whether an error is from a web server or proxy. An S3 server adds the name of the error or a header.
    botocore reports a page with the status 200 as an error with the status 500."""
    about = response["ResponseMetadata"]
    status, headers = about["HTTPStatusCode"], about.get("HTTPHeaders", {})
    if response["Error"].get("Code") != str(status) or any(name.startswith("x-amz") for name in headers):
        return False
    is_page = status == 500 and headers.get("content-type", "").startswith("text/html")
    return is_page or (status < 500 and status not in (407, 408, 429))
