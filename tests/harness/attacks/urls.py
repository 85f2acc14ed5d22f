"""What a client, or somebody who has found its URLs, can try with them. The server has to refuse all of it. Attacks
that succeed on a server without checks are reported separately."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial

from tests.harness.attacks.servers import BUCKET, HONEST, OTHER, OWN, PREFIX, READ, VICTIMS, World
from tests.harness.attacks.table import Attack

EVERYBODY = 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'
KEY = bytes(range(32))
CUSTOMER = "x-amz-server-side-encryption-customer"
ENCRYPTED = {
    f"{CUSTOMER}-algorithm": "AES256",
    f"{CUSTOMER}-key": base64.b64encode(KEY).decode(),
    f"{CUSTOMER}-key-MD5": base64.b64encode(hashlib.md5(KEY, usedforsecurity=False).digest()).decode(),
}


def copies(victim: str, world: World) -> str | None:
    for headers, fields in _both(world, {"x-amz-copy-source": f"/{victim}"}):
        world.send(world.grant(), b"", headers, fields)
        world.send(world.grant(), HONEST, headers, fields)
        if VICTIMS[victim] in (world.written() or b""):
            return f"read {VICTIMS[victim].decode()}"
    return None


def shows(given: Mapping[str, str], world: World) -> str | None:
    """Lets anybody read the update, and with it whatever a client can copy into it."""
    for headers, fields in _both(world, given):
        world.send(world.grant(), HONEST, headers, fields)
        if world.ask("GET", world.address()).status == 200:
            return "anybody can read its update"
        if any("AllUsers" in grant["Grantee"].get("URI", "") for grant in _grants(world)):
            return "anybody has a grant on its update"
    return None


def hides(given: Mapping[str, str], world: World) -> str | None:
    """Hides the update from the coordinator."""
    for headers, fields in _both(world, given):
        world.send(world.grant(), HONEST, headers, fields)
        if world.is_there() and world.written() is None:
            return "the coordinator cannot read what was uploaded"
        stored = world.s3.list_objects_v2(Bucket=BUCKET, Prefix=PREFIX + OWN).get("Contents", ())
        if any(o.get("StorageClass", "STANDARD") != "STANDARD" for o in stored):
            return "uploaded in another storage class"
    return None


def describes(world: World) -> str | None:
    """Writes metadata, which only the coordinator may write: it has the checksum."""
    for headers, fields in _both(world, {"x-amz-meta-sha256": "0" * 64}):
        world.send(world.grant(), HONEST, headers, fields)
        if world.is_there():
            found = world.s3.head_object(Bucket=BUCKET, Key=PREFIX + OWN)
            if found["Metadata"]:
                return "wrote metadata"
    return None


def _both(world: World, given: Mapping[str, str]) -> list[tuple[Mapping[str, str], Sequence[tuple[str, str]]]]:
    """The values as headers and, if the upload is a form, also as its fields, which some servers read instead."""
    found: list[tuple[Mapping[str, str], Sequence[tuple[str, str]]]] = [(given, ())]
    if world.verb == "POST":
        named = [(name.replace("x-amz-acl", "acl"), value) for name, value in given.items()]
        found.append(({}, named))
        found.append(({}, list(given.items())))
    return found


def _grants(world: World) -> list[dict[str, dict[str, str]]]:
    try:
        return list(world.s3.get_object_acl(Bucket=BUCKET, Key=PREFIX + OWN)["Grants"])
    except world.s3.exceptions.ClientError:
        return []


def more_bytes(chunked: bool, world: World) -> str | None:
    world.send(world.grant(), HONEST + b"+" * 10_000, chunked=chunked)
    found = world.written()
    return None if found is None else f"uploaded {len(found)} bytes, {len(HONEST)} are allowed"


def another_key(world: World) -> str | None:
    upload, other = world.grant(), "rounds/00000/updates/4.safetensors"
    if upload.verb == "POST":
        world.send(upload, instead={"key": PREFIX + other})
    else:
        world.send(upload.model_copy(update={"url": upload.url.replace(OWN, other)}))
    return _wrote(world, other)


def another_bucket(world: World) -> str | None:
    upload = world.grant()
    world.send(upload.model_copy(update={"url": upload.url.replace(f"/{BUCKET}", f"/{OTHER}", 1)}))
    return None if world.written(bucket=OTHER) is None else "wrote into another bucket"


def upload_with_a_wrong_signature(world: World) -> str | None:
    upload = world.grant()
    if upload.verb == "POST":
        world.send(upload, instead={"x-amz-signature": "0" * 64})
    else:
        world.send(upload.model_copy(update={"url": _forged(upload.url)}))
    return _wrote(world, OWN)


def upload_too_late(world: World) -> str | None:
    upload = world.grant(1)
    time.sleep(2.1)
    world.send(upload)
    return _wrote(world, OWN)


def _wrote(world: World, key: str) -> str | None:
    if not world.is_there(key):
        return None
    world.s3.delete_object(Bucket=BUCKET, Key=PREFIX + key)
    return f"wrote {key}"


def write_with_leave_to_read(world: World) -> str | None:
    before = world.written(READ)
    for verb in ("PUT", "DELETE", "POST"):
        world.ask(verb, world.link(), b"another order")
        if world.written(READ) != before:
            world.store.put(READ, before or b"")
            return f"{verb} goes with a URL to read"
    return None


def read_another_key(world: World) -> str | None:
    for victim, value in VICTIMS.items():
        url = world.link().replace(f"{BUCKET}/{PREFIX}{READ}", victim)
        if value in world.ask("GET", url).data:
            return f"read {value.decode()}"
    return None


def read_with_a_wrong_signature(world: World) -> str | None:
    return "read with a wrong signature" if world.ask("GET", _forged(world.link())).status == 200 else None


def read_too_late(world: World) -> str | None:
    url = world.link(1)
    time.sleep(2.1)
    return "read after the URL had expired" if world.ask("GET", url).status == 200 else None


def _forged(url: str) -> str:
    return re.sub("(?<=X-Amz-Signature=)[0-9a-f]+", "0" * 64, url)


def _attack(name: str, tries: str, run: object) -> Attack:
    return Attack(name, tries, "server", run)  # type: ignore[arg-type]


ATTACKS = (
    *(
        _attack(f"copy-source {victim}", "to read any object by copying it into its own", partial(copies, victim))
        for victim in VICTIMS
    ),
    _attack("acl public-read", "to show objects to the world", partial(shows, {"x-amz-acl": "public-read"})),
    _attack("grant-read", "the same", partial(shows, {"x-amz-grant-read": EVERYBODY})),
    _attack("grant-read-acp", "to take its update from its owner", partial(hides, {"x-amz-grant-read-acp": EVERYBODY})),
    _attack("storage-class", "to put its update out of reach", partial(hides, {"x-amz-storage-class": "GLACIER"})),
    _attack("customer's key", "to encrypt its update with a key of its own", partial(hides, ENCRYPTED)),
    _attack("metadata", "to speak as the coordinator does", describes),
    _attack("more bytes", "to fill the bucket", partial(more_bytes, False)),
    _attack("more bytes, chunked", "the same, with no length told", partial(more_bytes, True)),
    _attack("another key", "to write another client's update", another_key),
    _attack("another bucket", "to write elsewhere", another_bucket),
    _attack("upload, wrong signature", "to write with a signature made up", upload_with_a_wrong_signature),
    _attack("upload, expired", "to write after its time", upload_too_late),
    _attack("leave to read: write", "another verb", write_with_leave_to_read),
    _attack("leave to read: another key", "to read what others were sent", read_another_key),
    _attack("read, wrong signature", "to read with a signature made up", read_with_a_wrong_signature),
    _attack("read, expired", "to read after its time", read_too_late),
)
