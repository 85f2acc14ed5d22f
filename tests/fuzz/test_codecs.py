"""Encoded weights: whatever an order or an answer holds, it is what was sent, a client's failure, or a named file."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.algorithms import FlexFL
from fl_engine.codecs import Half, Qsgd
from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import ClientFailure, ClientUpdate, Codec, Codecs
from fl_engine.exchange import coding
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import ResultManifest, sign
from fl_engine.storage.store import encode, sha256
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, first_plan, tiny_site
from tests.fuzz.mutations import answer, damaged, in_time, json_like, law
from tests.harness.deflated import Deflated
from tests.harness.stores import MemoryStore

ALGORITHM = FlexFL(training=replace(TRAINING, epochs=1))
SITE = tiny_site(ALGORITHM)
BARE = first_plan(ALGORITHM, SITE)
USED: tuple[Codec, ...] = (Half(), Deflated(), Qsgd(), Qsgd(bits=2, bucket=None, coding="elias"))
PLANS = {codec: coding.encode_plan(BARE, SITE.pool, Codecs(codec, codec), SEED) for codec in USED}
CLIENT = BARE.assignments[0].client
HONEST = {codec: execute(ALGORITHM, plan.assignments[0], SITE) for codec, plan in PLANS.items()}
CODECS = st.sampled_from(list(PLANS))
BASE = f"rounds/00000/updates/{CLIENT}"
ASSIGNMENT = f"rounds/00000/assignments/{CLIENT}.json"
ORDERED: dict[Codec, dict[str, bytes]] = {codec: {} for codec in PLANS}
for codec, plan in PLANS.items():
    Mailbox(MemoryStore(ORDERED[codec])).put_assignments(plan)
JSON = json.loads(ORDERED[Half()][ASSIGNMENT])


def mailbox_of(files: dict[str, bytes]) -> Mailbox:
    return Mailbox(MemoryStore(files), rules=replace(SITE.rules, algorithm=ALGORITHM))


@law(60)
@given(json_like(JSON))
@example(json.dumps(JSON | {"codecs": {}}).encode())
@example(json.dumps(JSON | {"codecs": None}).encode())
@example(json.dumps(JSON | {"codecs": {"down": {"name": "os:system"}, "up": {"name": "half"}}}).encode())
@example(json.dumps(JSON | {"header": None}).encode())
@example(json.dumps(JSON | {"header": {name: ["float32", [2**62, 8]] for name in JSON["header"]}}).encode())
@example(json.dumps(JSON | {"header": {name: ["nn", shape] for name, (_, shape) in JSON["header"].items()}}).encode())
def test_damaged_encoded_assignment_names_its_file(content: bytes) -> None:
    mailbox = mailbox_of(ORDERED[Half()] | {ASSIGNMENT: content})
    answer(lambda: mailbox.assignments(0, [CLIENT]), "rounds/00000/assignments/", kind=IntegrityError)


@law(160)
@given(CODECS, st.data())
def test_damaged_encoded_update_is_a_result(codec: Codec, data: st.DataObject) -> None:
    """The client lies, and signs what it sends."""
    honest, files = HONEST[codec], dict[str, bytes]()
    assert isinstance(honest, ClientUpdate)
    mailbox_of(files).put_result(PLANS[codec], honest)
    value = files[f"{BASE}.safetensors"]
    content = data.draw(damaged(value) | damaged(value[:3000]))
    manifest = ResultManifest.model_validate_json(files[f"{BASE}.json"])
    manifest = sign(manifest.model_copy(update={"sha256": sha256(content), "signature": None}), None)
    files |= {f"{BASE}.safetensors": content, f"{BASE}.json": manifest.model_dump_json().encode()}
    with in_time():
        found = mailbox_of(files).receive(PLANS[codec], CLIENT)
    if isinstance(found, ClientFailure):
        assert found.stage == "validate" and found.code is not None
        return
    assert isinstance(found, ClientUpdate)
    assert coding.header_of(found.payload) == coding.header_of(honest.payload)
    if encode(found.travels) == encode(honest.travels):
        assert_same_bits(found.payload, mailbox_honest(codec).payload)


def mailbox_honest(codec: Codec) -> ClientUpdate:
    files: dict[str, bytes] = {}
    mailbox_of(files).put_result(PLANS[codec], HONEST[codec])
    found = mailbox_of(files).receive(PLANS[codec], CLIENT)
    assert isinstance(found, ClientUpdate)
    return found
