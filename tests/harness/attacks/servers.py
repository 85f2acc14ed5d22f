"""S3 servers under attack: a run's bucket, another bucket, and the URLs that a client of one round is given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import urllib3

from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Upload, Verb
from tests.harness.world import START, s3_of

BUCKET, OTHER = "runs", "mlflow"
PREFIX = "experiments/a/"
OWN = "rounds/00000/updates/3.safetensors"
"""The key that the client may write."""
READ = "rounds/00000/assignments/3.json"
"""The key that it may read."""
VICTIMS = {
    f"{BUCKET}/{PREFIX}rounds/00000/assignments/4.json": b"the order of another client",
    f"{BUCKET}/{PREFIX}rounds/00000/closed.json": b"what the coordinator alone reads",
    f"{OTHER}/artifacts/model": b"an object of another bucket",
}
"""Objects that it may neither read nor write, by bucket and key."""
HONEST = b"an honest update, to the last byte of it"
NONE: Mapping[str, str] = MappingProxyType({})
SECONDS = 600


@dataclass(frozen=True)
class World:
    """One server. `s3`: the coordinator's boto3 client of it. `pool`: sends requests without credentials."""

    kind: str
    store: S3Store
    s3: Any
    verb: Verb
    pool: urllib3.PoolManager

    def grant(self, seconds: int = SECONDS) -> Upload:
        """Permission to write OWN, which is deleted first."""
        self.s3.delete_object(Bucket=BUCKET, Key=PREFIX + OWN)
        return self.store.upload(OWN, len(HONEST), seconds, self.verb)

    def link(self, seconds: int = SECONDS) -> str:
        """A URL that reads READ."""
        return self.store.presign(READ, seconds)

    def send(
        self,
        upload: Upload,
        value: bytes = HONEST,
        headers: Mapping[str, str] = NONE,
        fields: Sequence[tuple[str, str]] = (),
        instead: Mapping[str, str] = NONE,
        chunked: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Uploads as a client would, with more `headers` and, in a form, more `fields`; `instead` replaces fields."""
        if upload.verb == "PUT":
            body: Any = iter([value]) if chunked else value
            given = {**upload.fields, **headers}
            if chunked:
                given = {k: v for k, v in given.items() if k.lower() != "content-length"}
            return self.pool.request("PUT", upload.url, body=body, headers=given, chunked=chunked)
        own = {**upload.fields, **instead}.items()
        form = [*fields, *own, ("file", ("update", value, "application/octet-stream"))]
        encoded, kind = urllib3.encode_multipart_formdata(form)
        whole: Any = iter([encoded]) if chunked else encoded
        return self.pool.request(
            "POST", upload.url, body=whole, headers={"Content-Type": kind, **headers}, chunked=chunked
        )

    def ask(self, verb: str, url: str, body: bytes | None = None) -> urllib3.BaseHTTPResponse:
        return self.pool.request(verb, url, body=body)

    def written(self, key: str = OWN, bucket: str = BUCKET) -> bytes | None:
        """The object, read by the coordinator; None: there is none, or the coordinator cannot read it."""
        try:
            return bytes(self.s3.get_object(Bucket=bucket, Key=PREFIX + key)["Body"].read())
        except self.s3.exceptions.ClientError:
            return None

    def is_there(self, key: str = OWN) -> bool:
        return PREFIX + key in [
            o["Key"] for o in self.s3.list_objects_v2(Bucket=BUCKET, Prefix=PREFIX + key).get("Contents", ())
        ]

    def address(self, key: str = OWN) -> str:
        """The object's URL without a signature."""
        return f"{self.s3.meta.endpoint_url}/{BUCKET}/{PREFIX}{key}"


@contextmanager
def served(kind: str, folder: Path) -> Iterator[World]:
    """Starts a server with both buckets, and checks that an honest client can do what it may."""
    with START[kind](folder) as environment, mock.patch.dict(os.environ, environment):
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
            os.environ.pop(name, None)
        s3 = s3_of(environment)
        for bucket in (BUCKET, OTHER):
            s3.create_bucket(Bucket=bucket)
        for where, value in VICTIMS.items():
            bucket, _, key = where.partition("/")
            s3.put_object(Bucket=bucket, Key=key, Body=value)
        store = S3Store(f"s3://{BUCKET}/{PREFIX}")
        store.put(READ, b"its own order")
        if kind == "moto":  # which checks no signatures
            os.environ[probe.UNCHECKED] = "1"
        pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(30))
        world = World(kind, store, s3, probe.upload_verb(store), pool)
        answer = world.send(world.grant())
        assert answer.status < 300 and world.written() == HONEST, f"an honest upload fails: {answer.data[:300]!r}"
        assert world.ask("GET", world.link()).data == b"its own order", "an honest client cannot read its order"
        yield world
