"""Test whether an S3 server enforces presigned URLs and forms, before clients get URLs.

Many servers verify only the key of an upload. On such a server, a client can add headers that copy another object or
make the uploaded object public. The probe uploads test objects with each of these headers. The server passes the test
if it rejects the request or ignores the header. The probe tries POST policies first, because they limit the size, and
then PUT requests that are signed for an exact size. The probe deletes its test objects.

POST was tested on Ceph radosgw 16, and POST and PUT were tested on SeaweedFS 4.34. According to their documentation,
Amazon S3 also supports POST, and SeaweedFS supports PUT since version 4.20.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

import urllib3

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, Refused
from fl_engine.storage.s3 import REGION, S3Store
from fl_engine.storage.urls import Answer, Requests, Upload, Verb, why

log = logging.getLogger("flexfleet")

SCRATCH = "rounds/probe/"
"""Key prefix of test objects. The prefix begins with `rounds/`, because the signing credentials may be valid only
there. No round is named `probe`."""
VALUE = bytes(range(64))
SECONDS = 600
VERBS: tuple[Verb, ...] = ("POST", "PUT")
EVERYBODY = 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'
UNCHECKED = "FLEXFLEET_S3_UNCHECKED"
RIGHTS = (
    "Check the rights of the credentials that sign (FLEXFLEET_SIGNING_AWS_*; without them, the coordinator's) and this "
    "machine's clock"
)


def upload_verb(store: S3Store) -> Verb:
    """Return the HTTP verb for clients' uploads. Raises EnvironmentFailure if the server rejects valid uploads or does
    not enforce signatures. If FLEXFLEET_S3_UNCHECKED=1, unenforced signatures cause only a warning."""
    name = secrets.token_hex(8)
    try:
        return _upload_verb(_Scratch(store, f"{SCRATCH}assignments/{name}", f"{SCRATCH}updates/{name}"))
    except urllib3.exceptions.HTTPError as error:
        raise EnvironmentFailure(f"{store.uri()} cannot be reached with the URLs for clients: {why(error)}") from None
    finally:
        store.delete(*store.list(SCRATCH))


@dataclass(frozen=True)
class _Scratch:
    store: S3Store
    source: str
    """Key of an object that clients may read."""
    target: str
    """Key of an object that clients may write."""
    requests: Requests = field(default_factory=Requests)

    def upload(self, verb: Verb) -> Upload:
        return self.store.upload(self.target, len(VALUE), SECONDS, verb)

    def takes(self, upload: Upload, value: bytes = VALUE, headers: Mapping[str, str] | None = None) -> bool:
        return self.requests.send(upload, value, headers).status < 300

    def reads(self, url: str) -> bool:
        return self.requests.ask("GET", url).status < 300

    def found(self) -> bytes | None:
        """Return the uploaded value; None if the coordinator cannot read it."""
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
            log.info("clients will upload with %s requests, because %s enforces their signatures", verb, uri)
            return verb
        seen += [f"{verb} accepts {trick}" for trick in tricks]
    if not works:
        raise EnvironmentFailure(f"{uri}: clients cannot upload ({'; '.join(seen)}). {RIGHTS}")
    why = f"{uri} does not enforce signatures ({'; '.join(seen)})"
    if os.environ.get(UNCHECKED) != "1":
        raise EnvironmentFailure(
            f"{why}, so a client could read or replace other objects. Use Amazon S3, Ceph radosgw "
            f"16 or newer, or SeaweedFS 4.20 or newer. If all clients are trusted, set {UNCHECKED}=1"
        )
    log.warning("%s=1 is only for tests and trusted clients, because %s", UNCHECKED, why)
    return works[0]


def _open_reads(scratch: _Scratch) -> Iterator[str]:
    url = scratch.store.presign(scratch.source, SECONDS)
    answer = scratch.requests.ask("GET", url)
    if answer.status >= 300:
        reason, hint = _reason(answer), REGION if b"region" in answer.data.lower() else RIGHTS
        raise EnvironmentFailure(f"{scratch.store.uri()}: a newly signed URL cannot be read ({reason}). {hint}")
    if scratch.reads(url.partition("?")[0]):
        yield "GET works without a signature"
    if scratch.reads(_forged(url)):
        yield "GET works with a wrong signature"


def _refused(scratch: _Scratch, verb: Verb) -> str | None:
    """Return the reason why a valid upload fails; None if it succeeds."""
    answer = scratch.requests.send(scratch.upload(verb), VALUE)
    if answer.status < 300:
        return None if scratch.found() == VALUE else "the coordinator cannot read what was uploaded"
    return _reason(answer)


def _reason(answer: Answer) -> str:
    """Return a string with the status and the error code of a response."""
    code = re.search(rb"<Code>(\w+)</Code>", answer.data)
    return f"HTTP {answer.status} {code[1].decode() if code else ''}".rstrip()


def _tricks(scratch: _Scratch, verb: Verb) -> Iterator[str]:
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
        # Some servers read these values from form fields, and others read them from headers.
        fields = {name.replace("x-amz-acl", "acl"): value for name, value in headers.items()}
        as_field = verb == "POST" and _matters(scratch, _with(honest, fields))
        if as_field or _matters(scratch, honest, headers):
            yield what


def _additions(scratch: _Scratch) -> dict[str, dict[str, str]]:
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


def _matters(scratch: _Scratch, upload: Upload, headers: Mapping[str, str] | None = None) -> bool:
    """Return whether the server accepts the upload and stores an object that is public or has another value. With POST,
    an object that the coordinator cannot read is ignored, because it harms only the client itself."""
    scratch.store.delete(scratch.target)
    if not scratch.takes(upload, headers=headers):
        return False
    if scratch.reads(scratch.store.presign(scratch.target, SECONDS).partition("?")[0]):
        return True
    found = scratch.found()
    return found != VALUE and (found is not None or upload.verb == "PUT")


def _with(upload: Upload, fields: Mapping[str, str]) -> Upload:
    return upload.model_copy(update={"fields": {**upload.fields, **fields}})


def _forged(url: str) -> str:
    return re.sub("(?<=X-Amz-Signature=)[0-9a-f]+", "0" * 64, url)
