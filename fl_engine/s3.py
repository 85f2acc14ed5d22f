"""The run store on S3, and what a device sees of it.

The coordinator speaks to the bucket with ambient credentials (boto3's: environment, files, the pod's role);
AWS_ENDPOINT_URL names a server that is not Amazon's. A client that holds no keys gets URLs, each good for one key, one
verb and a limited time.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import urllib3

from fl_engine.errors import ConfigError, EnvironmentFailure, IntegrityError, masked
from fl_engine.store import check_size, sha256

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

T = TypeVar("T")

PART = 64 * 2**20
"""Larger values go up in parts of so many bytes."""
ATTEMPTS = 6
"""So often a request is made that the server does not answer, or answers with 429 or 5xx."""
READS = 4
"""A body that breaks off is asked for so many times."""
PAGE = 1000
"""Keys of one listing or deletion."""
MISSING = ("NoSuchKey", "404", "NotFound")


class S3Store:
    """A store under `s3://bucket/prefix`. Every value carries its sha256 as metadata, verified when it is read; one
    that came through a presigned URL has none, and is vouched for by what names it (a manifest).

    `get`, `put`, `list` and `delete` raise EnvironmentFailure where the server refuses or cannot be reached, after
    retries; `ca_bundle` and region come from the environment too.
    """

    def __init__(self, uri: str, endpoint: str | None = None, settings: str = "") -> None:
        """`settings` is what the environment has in front of this store's address and credentials; empty: OWN, or
        nothing."""
        scheme, _, rest = uri.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not self._bucket or masked(uri) != uri:
            raise ConfigError(f"an S3 store is s3://bucket/prefix, got {masked(uri)!r}")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._settings = settings
        self._made: dict[str | None, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}  # a connection is not for another process

    @property
    def _client(self) -> Any:
        return self._client_of(self._endpoint)

    def _client_of(self, endpoint: str | None) -> Any:
        if endpoint not in self._made:
            self._made[endpoint] = _connect(endpoint, self._settings)
        return self._made[endpoint]

    def put(self, key: str, value: bytes) -> None:
        given = {"Bucket": self._bucket, "Key": self._prefix + key, "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            if len(value) <= PART:
                self._client.put_object(Body=value, ContentMD5=_md5(value), **given)
            else:
                self._put_parts(value, given)

    def create(self, key: str, value: bytes) -> bool:
        from botocore.exceptions import ClientError

        given = {"Bucket": self._bucket, "Key": self._prefix + key, "Metadata": {"sha256": sha256(value)}}
        with self._explained(key):
            try:
                self._client.put_object(Body=value, ContentMD5=_md5(value), IfNoneMatch="*", **given)
            except ClientError as error:
                # 409: somebody else is at it this very moment.
                if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
                    return False
                raise
        return True

    def _put_parts(self, value: bytes, given: Mapping[str, Any]) -> None:
        """The object appears whole when the upload is completed, or never."""
        where = {"Bucket": given["Bucket"], "Key": given["Key"]}
        upload = {**where, "UploadId": self._client.create_multipart_upload(**given)["UploadId"]}
        try:
            parts = []
            for number, start in enumerate(range(0, len(value), PART), 1):
                body = value[start : start + PART]
                sent = self._client.upload_part(Body=body, ContentMD5=_md5(body), PartNumber=number, **upload)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)
        except BaseException:
            self._client.abort_multipart_upload(**upload)
            raise

    def get(self, key: str, limit: int | None = None) -> bytes:
        def read() -> bytes:
            found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            check_size(self.uri(key), found["ContentLength"], limit)
            value: bytes = found["Body"].read()
            expected = found["Metadata"].get("sha256", sha256(value))
            if len(value) != found["ContentLength"] or sha256(value) != expected:
                raise IntegrityError(f"{self.uri(key)} is damaged: {len(value)} bytes whose sha256 is not {expected}")
            return value

        with self._explained(key):
            return _again(read)

    def list(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._explained(prefix):
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
                objects = [{"Key": self._prefix + key} for key in keys[start : start + PAGE]]
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
                for error in answer.get("Errors", ()):
                    raise EnvironmentFailure(f"{self.uri()}: {error['Key']} cannot be deleted: {error['Code']}")

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

    def presign(self, key: str, verb: str, seconds: int, endpoint: str | None = None) -> str:
        """A URL for one `get` or `put` of `key`, good for `seconds`; `endpoint` is what devices call the server, where
        that differs."""
        client = self._client_of(endpoint or self._endpoint)
        method = {"get": "get_object", "put": "put_object"}[verb]
        url: str = client.generate_presigned_url(
            method, Params={"Bucket": self._bucket, "Key": self._prefix + key}, ExpiresIn=seconds
        )
        return url

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in MISSING:
                raise IntegrityError(f"{self.uri(key)} is missing from the run store") from None
            raise EnvironmentFailure(_why(error, self.uri(key))) from error
        except (BotoCoreError, urllib3.exceptions.HTTPError) as error:
            raise EnvironmentFailure(
                f"{self.uri(key)} cannot be reached: {error}. Check AWS_ENDPOINT_URL, the credentials and the network"
            ) from error


class UrlStore:
    """What a client without keys sees of a store: for each key that it may read or write, a URL. Raises
    EnvironmentFailure where the server does not answer, after retries, and IntegrityError where it refuses."""

    def __init__(self, reads: Mapping[str, str], writes: Mapping[str, str]) -> None:
        self._urls = {"GET": reads, "PUT": writes}
        retry = urllib3.Retry(
            6, backoff_factor=0.5, backoff_jitter=0.5, status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=None, raise_on_status=False,
        )  # fmt: skip
        self._pool = urllib3.PoolManager(retries=retry, timeout=urllib3.Timeout(connect=10, read=120))

    def put(self, key: str, value: bytes) -> None:
        self._ask("PUT", key, body=value, headers={"Content-MD5": _md5(value)})

    def get(self, key: str, limit: int | None = None) -> bytes:
        def read() -> bytes:
            value: bytes = self._ask("GET", key).data
            check_size(self.uri(key), len(value), limit)
            return value

        return _again(read)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._urls["GET"] if key.startswith(prefix))

    def create(self, key: str, value: bytes) -> bool:
        raise IntegrityError(f"a client creates nothing that others may, asked for {key}")

    def delete(self, *keys: str) -> None:
        raise IntegrityError(f"a client deletes nothing, asked for {', '.join(keys)}")

    def sweep(self, prefix: str) -> None:
        raise IntegrityError(f"a client deletes nothing, asked to sweep {prefix}")

    def uri(self, key: str = "") -> str:
        return f"the run store's {key}"

    def _ask(self, method: str, key: str, **more: Any) -> urllib3.BaseHTTPResponse:
        url = self._urls[method].get(key)
        if url is None:
            raise IntegrityError(f"no URL was given to {method} {key}")
        try:
            answer = self._pool.request(method, url, **more)
        except urllib3.exceptions.HTTPError as error:
            raise EnvironmentFailure(f"{method} {self.uri(key)}: {_without_query(str(error), url)}") from None
        if answer.status >= 400:
            said = answer.data[:300].decode(errors="replace")
            kind = EnvironmentFailure if answer.status >= 500 or answer.status == 429 else IntegrityError
            raise kind(f"{method} {self.uri(key)}: HTTP {answer.status} {said}")
        return answer


def _connect(endpoint: str | None, settings: str) -> Any:
    import boto3.session
    from botocore.config import Config

    named = endpoint or endpoint_of(settings)
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        connect_timeout=10,
        read_timeout=120,
        s3={"addressing_style": "path"} if named else {},
        # Other servers than Amazon's do not know the newer checksums; sha256 and MD5 are sent and checked here.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    region = setting("AWS_REGION", settings) or setting("AWS_DEFAULT_REGION", settings) or "us-east-1"
    session = boto3.session.Session(  # without own ones: wherever boto3 finds them
        os.environ.get(f"{settings or OWN}AWS_ACCESS_KEY_ID"),
        os.environ.get(f"{settings or OWN}AWS_SECRET_ACCESS_KEY"),
        os.environ.get(f"{settings or OWN}AWS_SESSION_TOKEN"),
    )
    return session.client("s3", endpoint_url=named, region_name=region, config=config)


OWN = "FLEXFLEET_"
"""In front of a variable that boto3 reads: for this alone, where something else of the process reads the other."""


def setting(name: str, settings: str = "") -> str | None:
    return os.environ.get(f"{settings}{name}") or os.environ.get(f"{OWN}{name}") or os.environ.get(name)


def endpoint_of(settings: str = "") -> str | None:
    """The server's address; None: Amazon's."""
    return setting("AWS_ENDPOINT_URL_S3", settings) or setting("AWS_ENDPOINT_URL", settings)


def _again(read: Callable[[], T]) -> T:
    """Repeats a read whose body broke off; what is damaged on every try is damaged."""
    from botocore.exceptions import BotoCoreError

    for attempt in range(READS - 1):
        try:
            return read()
        except (BotoCoreError, urllib3.exceptions.HTTPError, IntegrityError):
            time.sleep(0.2 * 2**attempt)
    return read()


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


def _md5(value: bytes) -> str:
    return base64.b64encode(hashlib.md5(value, usedforsecurity=False).digest()).decode()


def _without_query(text: str, url: str) -> str:
    """A presigned URL's query is a secret."""
    query = url.partition("?")[2]
    return text.replace(query, "...") if query else text
