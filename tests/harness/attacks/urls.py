"""What a client, or somebody who has found its URLs, can try with them. The server has to refuse all of it. Attacks
that succeed on a server without checks are reported separately."""

from __future__ import annotations

import base64
import hashlib
import json
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


# ------------------------------------------------------------------------------------------- headers on an upload
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


# ------------------------------------------------------------------------------------------------ another upload
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


def two_keys(world: World) -> str | None:
    upload, other = world.grant(), "rounds/00000/updates/5.safetensors"
    if upload.verb == "POST":
        world.send(upload, fields=[("key", PREFIX + other)])
    else:
        world.send(upload.model_copy(update={"url": f"{upload.url}&key={PREFIX}{other}"}))
    return _wrote(world, other)


def a_key_made_of_the_files_name(world: World) -> str | None:
    upload = world.grant()
    if upload.verb == "PUT":
        return another_key(world)
    world.send(upload, instead={"key": PREFIX + "rounds/00000/updates/${filename}"})
    return _wrote(world, "rounds/00000/updates/update")


def a_key_with_dots(world: World) -> str | None:
    upload, other = world.grant(), "rounds/00000/updates/6.safetensors"
    dotted = f"{OWN}/../6.safetensors"
    if upload.verb == "POST":
        world.send(upload, instead={"key": PREFIX + dotted})
    else:
        world.send(upload.model_copy(update={"url": upload.url.replace(OWN, dotted.replace("..", "%2e%2e"))}))
    return _wrote(world, other) or _wrote(world, dotted)


def another_bucket(world: World) -> str | None:
    upload = world.grant()
    world.send(upload.model_copy(update={"url": upload.url.replace(f"/{BUCKET}", f"/{OTHER}", 1)}))
    return None if world.written(bucket=OTHER) is None else "wrote into another bucket"


def another_policy(world: World) -> str | None:
    """Changes a form's policy and keeps the old signature; of a URL, prolongs the time that it is valid."""
    upload, other = world.grant(), "rounds/00000/updates/7.safetensors"
    if upload.verb == "POST":
        said = json.dumps(json.loads(base64.b64decode(upload.fields["policy"]))).replace(OWN, other)
        changed = base64.b64encode(said.encode()).decode()
        world.send(upload, instead={"policy": changed, "key": PREFIX + other})
        return _wrote(world, other)
    world.send(upload.model_copy(update={"url": upload.url.replace("X-Amz-Expires=600", "X-Amz-Expires=6000")}))
    return _wrote(world, OWN)


def no_policy(world: World) -> str | None:
    upload = world.grant()
    bare = {name: value for name, value in upload.fields.items() if name == "key"}
    world.send(upload.model_copy(update={"url": upload.url.partition("?")[0], "fields": bare}))
    return _wrote(world, OWN)


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


# -------------------------------------------------------------------------------------------- another request
def read_with_leave_to_upload(world: World) -> str | None:
    upload = world.grant()
    world.send(upload)
    answers = [world.ask("GET", upload.url), world.ask("GET", world.address())]
    return next((f"read {a.data[:60]!r}" for a in answers if a.status == 200), None)


def delete_with_leave_to_upload(world: World) -> str | None:
    upload = world.grant()
    world.send(upload)
    query = upload.url.partition("?")[2]
    world.ask("DELETE", f"{world.address()}?{query}" if query else world.address())
    listed = f"<Delete><Object><Key>{PREFIX}{OWN}</Key></Object></Delete>".encode()
    world.ask("POST", f"{world.address('').removesuffix(PREFIX)}?delete", listed)
    return None if world.is_there() else "deleted an object"


def begin_an_upload_in_parts(world: World) -> str | None:
    upload = world.grant()
    url = upload.url if upload.verb == "PUT" else world.address()
    answer = world.ask("POST", f"{url}{'&' if '?' in url else '?'}uploads")
    return "began an upload in parts, of any size" if b"UploadId" in answer.data else None


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


def list_the_bucket(world: World) -> str | None:
    query = world.link().partition("?")[2]
    bucket = f"{world.s3.meta.endpoint_url}/{BUCKET}"
    for url in (bucket, f"{bucket}?{query}", f"{bucket}?list-type=2&{query}", f"{bucket}?uploads&{query}"):
        answer = world.ask("GET", url)
        if answer.status == 200:
            return f"listed: {answer.data[:60]!r}"
    return None


def ask_for_more_than_the_object(world: World) -> str | None:
    for more, told in {"acl": b"AccessControlPolicy", "tagging": b"TagSet", "versions": b"Version"}.items():
        if told in world.ask("GET", f"{world.link()}&{more}").data:
            return f"read the object's {more}"
    return None


def read_without_a_signature(world: World) -> str | None:
    return "read without a signature" if world.ask("GET", world.address(READ)).status == 200 else None


def read_with_a_wrong_signature(world: World) -> str | None:
    return "read with a wrong signature" if world.ask("GET", _forged(world.link())).status == 200 else None


def read_too_late(world: World) -> str | None:
    url = world.link(1)
    time.sleep(2.1)
    return "read after the URL had expired" if world.ask("GET", url).status == 200 else None


def prolong(world: World) -> str | None:
    url = world.link().replace("X-Amz-Expires=600", "X-Amz-Expires=604800")
    return "gave the URL a longer life" if world.ask("GET", url).status == 200 else None


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
    _attack("grant-full-control", "the same", partial(shows, {"x-amz-grant-full-control": EVERYBODY})),
    _attack("grant-read-acp", "to take its update from its owner", partial(hides, {"x-amz-grant-read-acp": EVERYBODY})),
    _attack("storage-class", "to put its update out of reach", partial(hides, {"x-amz-storage-class": "GLACIER"})),
    _attack("customer's key", "to encrypt its update with a key of its own", partial(hides, ENCRYPTED)),
    _attack("metadata", "to speak as the coordinator does", describes),
    _attack("more bytes", "to fill the bucket", partial(more_bytes, False)),
    _attack("more bytes, chunked", "the same, with no length told", partial(more_bytes, True)),
    _attack("another key", "to write another client's update", another_key),
    _attack("two keys", "the same", two_keys),
    _attack("a key made of the file's name", "the same", a_key_made_of_the_files_name),
    _attack("a key with dots", "the same", a_key_with_dots),
    _attack("another bucket", "to write elsewhere", another_bucket),
    _attack("another policy", "to change what was signed", another_policy),
    _attack("no policy", "to write unsigned", no_policy),
    _attack("upload, wrong signature", "to write with a signature made up", upload_with_a_wrong_signature),
    _attack("upload, expired", "to write after its time", upload_too_late),
    _attack("leave to upload: read", "another verb", read_with_leave_to_upload),
    _attack("leave to upload: delete", "another verb", delete_with_leave_to_upload),
    _attack("leave to upload: parts", "an upload of any size", begin_an_upload_in_parts),
    _attack("leave to read: write", "another verb", write_with_leave_to_read),
    _attack("leave to read: another key", "to read what others were sent", read_another_key),
    _attack("leave to read: list", "to see what there is", list_the_bucket),
    _attack("leave to read: sub-resources", "to see who may read it", ask_for_more_than_the_object),
    _attack("read unsigned", "to read without leave", read_without_a_signature),
    _attack("read, wrong signature", "to read with a signature made up", read_with_a_wrong_signature),
    _attack("read, expired", "to read after its time", read_too_late),
    _attack("read, prolonged", "to read for longer", prolong),
)
