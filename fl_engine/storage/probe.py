"""Tests whether an S3 server enforces presigned URLs and forms, before a client gets one.

On many servers the holder of a signature that covers only the key can add headers that copy another object into its
own, or make its own public. So the probe writes a scratch object as a client would, with each of these tricks. The
server passes if it refuses the request, or accepts it and the trick has no effect. POST policies are tried first,
because they have a largest size; then PUT, signed for one exact size. The probe reads and writes scratch objects only,
and deletes them.

Tried: POST on Ceph radosgw 16, POST and PUT on SeaweedFS 4.34. According to the documentation: POST on Amazon S3, PUT
on SeaweedFS since 4.20.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import quote

import urllib3

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, Refused
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Upload, Verb, patient_pool, send, why

log = logging.getLogger("flexfleet")

SCRATCH = "rounds/probe/"
"""The prefix of scratch objects. It looks like a round's, so that signing credentials with the rights that clients need
can write there. No round has this name."""
VALUE = bytes(range(64))
SECONDS = 600
VERBS: tuple[Verb, ...] = ("POST", "PUT")
NONE: Mapping[str, str] = MappingProxyType({})
EVERYBODY = 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'
UNCHECKED = "FLEXFLEET_S3_UNCHECKED"
RIGHTS = (
    "Check the rights of the credentials that sign (FLEXFLEET_SIGNING_AWS_*; without them, the coordinator's) and this "
    "machine's clock"
)


def upload_verb(store: S3Store) -> Verb:
    """Return how clients upload. Raises EnvironmentFailure if the server accepts no upload, or accepts what was not
    signed, which FLEXFLEET_S3_UNCHECKED=1 turns into a warning."""
    name = secrets.token_hex(8)
    try:
        with patient_pool() as pool:
            return _upload_verb(_Scratch(store, pool, f"{SCRATCH}orders/{name}", f"{SCRATCH}updates/{name}"))
    except urllib3.exceptions.HTTPError as error:  # whose text may hold a signature
        raise EnvironmentFailure(f"{store.uri()} cannot be reached as clients would: {why(error)}") from None
    finally:
        store.delete(*store.list(SCRATCH))


@dataclass(frozen=True)
class _Scratch:
    store: S3Store
    pool: urllib3.PoolManager
    source: str
    """The key of an object that clients may read."""
    target: str
    """The key of an object that clients may write."""

    def upload(self, verb: Verb) -> Upload:
        return self.store.upload(self.target, len(VALUE), SECONDS, verb)

    def takes(self, upload: Upload, value: bytes = VALUE, headers: Mapping[str, str] = NONE) -> bool:
        return send(self.pool, upload, value, headers).status < 300

    def reads(self, url: str) -> bool:
        return self.pool.request("GET", url, redirect=False).status < 300

    def found(self) -> bytes | None:
        """The value that the coordinator reads after an upload; None if it cannot read it."""
        try:
            return self.store.get(self.target, len(VALUE))
        except (IntegrityError, Refused):
            return None


def _upload_verb(scratch: _Scratch) -> Verb:
    uri = scratch.store.uri()
    scratch.store.put(scratch.source, b"another object")
    works: list[Verb] = []
    seen = list(_open_reads(scratch))
    anybody = bool(seen)
    for verb in VERBS:
        refused = _refused(scratch, verb)
        if refused:
            seen.append(f"{verb}: {refused}")
            continue
        works.append(verb)
        tricks = list(_tricks(scratch, verb))
        if not tricks and not anybody:
            log.info("clients upload by %s: %s enforces what is signed", verb, uri)
            return verb
        seen += [f"{verb} accepts {trick}" for trick in tricks]
    if not works:
        raise EnvironmentFailure(f"{uri}: clients cannot upload ({'; '.join(seen)}). {RIGHTS}")
    why = f"{uri} does not enforce signatures ({'; '.join(seen)})"
    if os.environ.get(UNCHECKED) != "1":
        raise EnvironmentFailure(
            f"{why}, so a client could read or replace what the signing credentials can. Use Amazon S3, Ceph radosgw "
            f"16 or newer, or SeaweedFS 4.20 or newer. If all clients are trusted, set {UNCHECKED}=1"
        )
    log.warning("%s=1, for tests and trusted clients: %s", UNCHECKED, why)
    return works[0]


def _open_reads(scratch: _Scratch) -> Iterator[str]:
    url = scratch.store.presign(scratch.source, SECONDS)
    if not scratch.reads(url):
        raise EnvironmentFailure(f"{scratch.store.uri()}: a URL that was just signed cannot be read. {RIGHTS}")
    if scratch.reads(_unsigned(url)):
        yield "GET works without a signature"
    if scratch.reads(_forged(url)):
        yield "GET works with a wrong signature"


def _refused(scratch: _Scratch, verb: Verb) -> str | None:
    """Return why an honest upload does not arrive; None if it does."""
    answer = send(scratch.pool, scratch.upload(verb), VALUE)
    if answer.status < 300:
        return None if scratch.found() == VALUE else "the coordinator cannot read what was uploaded"
    code = re.search(rb"<Code>(\w+)</Code>", answer.data)
    return f"HTTP {answer.status} {code[1].decode() if code else ''}".rstrip()


def _tricks(scratch: _Scratch, verb: Verb) -> Iterator[str]:
    """Yield the tricks that the server does not prevent."""
    honest = scratch.upload(verb)
    if verb == "POST":
        elsewhere = _with(honest, {"key": f"{honest.fields['key']}-other"})
        forged = _with(honest, {"x-amz-signature": "0" * 64})
    else:
        elsewhere = honest.model_copy(update={"url": honest.url.replace("?", "-other?", 1)})
        forged = honest.model_copy(update={"url": _forged(honest.url)})
    if scratch.takes(elsewhere):
        yield "another key"
    if scratch.takes(forged):
        yield "a wrong signature"
    if scratch.takes(honest, VALUE + b"+"):
        yield "more bytes"
    for what, headers in _additions(scratch).items():
        # Some servers read in a form's fields what others read in headers.
        fields = {name.replace("x-amz-acl", "acl"): value for name, value in headers.items()}
        as_field = verb == "POST" and _matters(scratch, _with(honest, fields))
        if as_field or _matters(scratch, honest, headers):
            yield what


def _additions(scratch: _Scratch) -> dict[str, dict[str, str]]:
    """Headers that do harm."""
    key, encryption = bytes(32), "x-amz-server-side-encryption-customer"
    source = quote(scratch.store.uri(scratch.source).removeprefix("s3:/"))
    md5 = hashlib.md5(key, usedforsecurity=False).digest()
    return {
        "another object as its source": {"x-amz-copy-source": source},
        "an ACL": {"x-amz-acl": "public-read"},
        "a grant": {"x-amz-grant-read": EVERYBODY},
        "a grant that takes the owner's": {"x-amz-grant-read-acp": EVERYBODY},
        "a storage class": {"x-amz-storage-class": "GLACIER"},
        "a customer's key": {
            f"{encryption}-algorithm": "AES256",
            f"{encryption}-key": base64.b64encode(key).decode(),
            f"{encryption}-key-MD5": base64.b64encode(md5).decode(),
        },
    }


def _matters(scratch: _Scratch, upload: Upload, headers: Mapping[str, str] = NONE) -> bool:
    """Whether the server accepts the upload and makes another object than of an honest upload. With POST an object that
    nobody can read does not matter, because it harms only its client."""
    scratch.store.delete(scratch.target)
    if not scratch.takes(upload, headers=headers):
        return False
    if scratch.reads(_unsigned(scratch.store.presign(scratch.target, SECONDS))):
        return True
    found = scratch.found()
    return found != VALUE and (found is not None or upload.verb == "PUT")


def _with(upload: Upload, fields: Mapping[str, str]) -> Upload:
    return upload.model_copy(update={"fields": {**upload.fields, **fields}})


def _unsigned(url: str) -> str:
    return url.partition("?")[0]


def _forged(url: str) -> str:
    return re.sub("(?<=X-Amz-Signature=)[0-9a-f]+", "0" * 64, url)
