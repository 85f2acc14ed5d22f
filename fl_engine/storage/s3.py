"""The run store on S3, for who has its keys. What a device without keys sees of it is in `urls`.

The coordinator speaks to the bucket with ambient credentials (boto3's: environment, files, the pod's role);
AWS_ENDPOINT_URL names a server that is not Amazon's. A client that holds no keys gets URLs to read and leave to upload,
each good for one key and a limited time; FLEXFLEET_SIGNING_AWS_* may name narrower credentials that sign them.
"""

from __future__ import annotations

import functools
import logging
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
from fl_engine.storage import ending
from fl_engine.storage.outage import waiting
from fl_engine.storage.serialization import Value, in_parts
from fl_engine.storage.store import FolderStore, Store, check_size, sha256
from fl_engine.storage.urls import AT_ONCE, FIXED, READS, Upload, Verb, again, md5, whole

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

log = logging.getLogger("flexfleet")

R = TypeVar("R")

PART = 64 * 2**20
"""Bytes. Larger values are uploaded in parts of this size."""
ATTEMPTS = 6
"""Tries of a request that the server does not answer, or answers with 429 or 5xx."""
BUSY = ("InternalError", "ServiceUnavailable", "SlowDown")
"""What a server says of a key whose deletion may be tried again."""
HASTY_S = 5
"""Seconds within which a server has to answer a caller that does not want to wait (`hasty`)."""
MOST_AT_ONCE = 5 * 2**30
"""Bytes of the largest upload in one request, by a URL or a form."""
PAGE = 1000
"""The most keys of one listing or deletion."""
CONNECTING = threading.Lock()
"""A client takes 20 MB and credentials: threads that need the same one wait for it."""
OWN = "FLEXFLEET_"
"""Before the name of a variable that boto3 reads: its value for the run store alone, where another part of the process
needs another one."""
SIGNING = "FLEXFLEET_SIGNING_"
"""Before the name of a variable likewise: credentials that sign what clients get, so that clients can do no more than
these may."""
MISSING = ("NoSuchKey", "404", "NotFound")


def patient(method: Callable[..., R]) -> Callable[..., R]:
    """A method of `S3Store` that is called again while the server is away, for `patience_s` at most."""

    @functools.wraps(method)
    def call(self: S3Store, *args: Any) -> R:
        return waiting(functools.partial(method, self, *args), self._patience_s)

    return call


class S3Store:
    """A store under `s3://bucket/prefix`. Every value carries its sha256 as metadata, verified when it is read; one
    that came through a presigned URL has none, and is vouched for by what names it (a manifest).

    All that asks or signs raises EnvironmentFailure where the server refuses, its certificate is refused or there are
    no credentials, Unreachable where nobody answers, after retries, and ConfigError for an address that is none.
    `ca_bundle` and region come from the environment too.
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
        """`settings` is what stands in front of the environment's variables with this store's address and credentials;
        where they are not set, those after OWN count, then boto3's. `hasty`: two tries of a few seconds. `patience_s`:
        how long to wait for a server that is away."""
        scheme, _, rest = uri.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not self._bucket or masked(uri) != uri:
            raise ConfigError(f"an S3 store is s3://bucket/prefix, got {masked(uri)!r}")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._settings = settings
        self._hasty, self._patience_s = hasty, patience_s
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

    @patient
    def put(self, key: str, value: Value) -> None:
        given = {"Bucket": self._bucket, "Key": self._prefix + key, "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            if len(value) <= PART:
                self._client.put_object(Body=bytes(value), ContentMD5=md5(value), **given)
            else:
                self._put_parts(value, given)

    def create(self, key: str, value: bytes) -> bool:
        from botocore.exceptions import ClientError

        given = {"Bucket": self._bucket, "Key": self._prefix + key, "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            for pause in _pauses():
                try:
                    self._client.put_object(Body=value, ContentMD5=md5(value), IfNoneMatch="*", **given)
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
                sent = self._client.upload_part(Body=body, ContentMD5=md5(body), PartNumber=number, **upload)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)
        except BaseException:
            self._client.abort_multipart_upload(**upload)
            raise

    @patient
    def get(self, key: str, limit: int | None = None) -> bytes:
        from botocore.exceptions import BotoCoreError

        def read() -> bytes:
            found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            size = found.get("ContentLength")
            check_size(self.uri(key), size or 0, limit)
            if size is None and limit is None:  # it may have no end
                raise EnvironmentFailure(f"{self.uri(key)}: the server does not say how long it is")
            value = whole(found["Body"], self.uri(key), limit)
            expected = found["Metadata"].get("sha256")
            if expected not in (None, sha256(value)):
                raise IntegrityError(f"{self.uri(key)} is damaged: {len(value)} bytes whose sha256 is not {expected}")
            return value

        with self._explained(key):
            return again(read, (BotoCoreError, urllib3.exceptions.HTTPError), READS)

    @patient
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
            if status >= 500 or status in (408, 429):
                raise Busy(
                    f"{self.uri(key)}: after all tries the server answers {error.operation_name} with {status} {code}: "
                    "it has too much to do, or starts; try again later"
                ) from error
            raise Refused(_why(error, self.uri(key))) from error
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
        # Other servers than Amazon's do not know the newer checksums; sha256 and MD5 are sent and checked here.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    region = setting("AWS_REGION", settings) or setting("AWS_DEFAULT_REGION", settings) or "us-east-1"
    given = _credentials(settings) or _credentials(OWN)
    core = botocore.session.Session()
    core.register_component("data_loader", _services())
    session = boto3.session.Session(*given or (), botocore_session=core)  # without own ones: wherever boto3 finds them
    try:
        client = session.client("s3", endpoint_url=named, region_name=region, config=config)
    except BotoCoreError:  # of which some are ValueErrors
        raise
    except ValueError as error:  # a host's name that botocore does not take, or an address in its own settings
        raise ConfigError(
            f"{masked(str(error))}: the S3 server's address (AWS_ENDPOINT_URL) is http://host:port or "
            "https://host:port, with letters, digits, hyphens and dots in the host's name"
        ) from None
    ending.see_to_it(client, HASTY_S if hasty else ending.ANSWER_S)
    return client


@functools.cache
def _services() -> Any:
    """What botocore's files say of services: each session would read them anew, which takes most of a connection's time
    on the processor."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


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


def _why(error: ClientError, uri: str) -> str:
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message")
    said = f"{code} {message or ''}".rstrip(" .")  # radosgw has no message, Amazon's ends in a full stop
    hints = {
        "NoSuchBucket": "Create the bucket, or correct run.remote",
        "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID",
        "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY",
        "AccessDenied": "The credentials may not do this: check the bucket's policy",
        "RequestTimeTooSkewed": "Set this machine's clock",
    }
    hint = hints.get(code, "Check AWS_ENDPOINT_URL and the credentials")
    return f"{uri}: the server refuses {error.operation_name} with {said}. {hint}"


def open_store(uri: str, hasty: bool = False, patience_s: float = 0.0) -> Store:
    """`s3://bucket/prefix`, or a folder. `hasty`: does not wait long for a server that does not answer; `patience_s`:
    waits so long for a server that is away. Raises
    ConfigError for another address, and for a text that was meant as one: a folder of that name would be a place that
    nobody looks at, and in a pod one that is gone with it."""
    return S3Store(uri, hasty=hasty, patience_s=patience_s) if is_meant(uri) else FolderStore(uri)


def check_place(name: str, uri: str | None) -> None:
    """Raises ConfigError unless the parameter of this name says an address of a store, or nothing. Nobody is asked."""
    if uri is not None and uri != uri.strip():
        raise ConfigError(f"{name}: {masked(uri)!r} begins or ends with a blank, which would be a part of the address")
    try:
        open_store(uri or "")
    except ConfigError:
        got = masked(uri or "")
        raise ConfigError(f"{name} is s3://bucket/prefix or a folder, got {got!r}{folder_hint(got)}") from None
