"""The run store: orders, updates, commits, states. What is read is what was written; else a named error says the file.

A damaged run goes on only when told to, and then has the bits of one that was never disturbed.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import IntegrityError
from fl_engine.core.state import pack, unpack
from fl_engine.core.types import Assignment, ClientFailure, ClientUpdate, RoundPlan, SubmodelSpec
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import ResultManifest, key_of, sign
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage import checkpoints
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import canonical, decode, encode, sha256
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, start_of, tiny_site
from tests.fuzz.mutations import answer, anything, damaged, in_time, json_like, law
from tests.harness.stores import MemoryStore

ALGORITHM = FlexFL(training=TRAINING)
SITE = tiny_site(ALGORITHM)
STATE = start_of(ALGORITHM, SITE)
PLAN = ALGORITHM.plan(STATE, context_of(SITE, 0, SEED))
ASSIGNMENT = PLAN.assignments[0]
HONEST = execute(ALGORITHM, ASSIGNMENT, SITE)
assert isinstance(HONEST, ClientUpdate)
SECRET = b"a run's own"
KEY = key_of(SECRET)(ASSIGNMENT)
ROUNDS = 6


def ledger_of(files: dict[str, bytes], checked: bool) -> Ledger:
    """`checked`: with keys and rules, as where clients are pods; else as in worker processes."""
    if not checked:
        return Ledger(MemoryStore(files))
    return Ledger(MemoryStore(files), rules=replace(SITE.rules, algorithm=ALGORITHM), key=key_of(SECRET))


# ------------------------------------------------------------------------------------------------------ orders
ORDERED: dict[str, bytes] = {}
Mailbox(MemoryStore(ORDERED)).put_assignments(PLAN)
ORDER_KEY = f"rounds/00000/assignments/{ASSIGNMENT.client}.json"
ORDER_JSON = json.loads(ORDERED[ORDER_KEY])
OTHERS = [key for key in ORDERED if key.endswith(".json") and key != ORDER_KEY]


@law(80)
@given(json_like(ORDER_JSON) | st.sampled_from(OTHERS).map(ORDERED.__getitem__))
@example(json.dumps(ORDER_JSON | {"spec": {}}).encode())
@example(json.dumps(ORDER_JSON | {"spec": {"keep": None, "blocks": None}}).encode())
@example(json.dumps(ORDER_JSON | {"spec": {"keep": {"conv": "many"}, "blocks": None}}).encode())
@example(json.dumps(ORDER_JSON | {"spec": {"keep": {"conv": [1e308, 1e309]}, "blocks": None}}).encode())
@example(json.dumps(ORDER_JSON | {"spec": {"keep": {"conv": [0.5, 1.5]}, "blocks": None}}).encode())
@example(json.dumps(ORDER_JSON | {"payload": "../../x", "client": -1}).encode())
def test_damaged_assignment_names_its_file(content: bytes) -> None:
    ledger = Ledger(MemoryStore(ORDERED | {ORDER_KEY: content}))
    found = answer(
        lambda: ledger.mailbox.assignments(0, [ASSIGNMENT.client]), "rounds/00000/assignments/", kind=IntegrityError
    )
    if found is not None:
        (found,) = found.values()
        assert isinstance(found, Assignment) and (found.round, found.client) == (0, ASSIGNMENT.client)
        given = json.loads(content)["spec"]["keep"]
        kept = {group: keep if isinstance(keep, int) else list(keep) for group, keep in found.spec.keep}
        for group, keep in given.items():
            assert type(keep) in (int, list) and (keep == kept[group] or len(keep) == kept[group]), "as it was given"


# ----------------------------------------------------------------------------------------------------- updates
BASE = f"rounds/00000/updates/{ASSIGNMENT.client}"


def honest_files(checked: bool) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    ledger_of(files, checked).mailbox.put_result(PLAN, HONEST)
    return files


HONEST_FILES = {checked: honest_files(checked) for checked in (True, False)}
MANIFEST = {checked: json.loads(files[f"{BASE}.json"]) for checked, files in HONEST_FILES.items()}
NO_SPECS = [
    {}, {"keep": {}}, {"keep": None, "blocks": None}, {"keep": {"conv": "11"}, "blocks": None},
    {"keep": {"conv": [0.5, 1.5]}, "blocks": None}, {"keep": {"conv": True}, "blocks": None},
    {"keep": {"conv": [True]}, "blocks": None}, {"keep": {"conv": 1.5}, "blocks": None},
    {"keep": {"conv": {"0": 1}}, "blocks": None}, {"keep": [], "blocks": []}, {"keep": {}, "blocks": "conv"},
]  # fmt: skip
OTHER_SPECS = [
    {"keep": {"conv": 10**30}, "blocks": None}, {"keep": {"conv": [10**30]}, "blocks": None},
    {"keep": {"x": 1}, "blocks": ["x"]}, {"keep": {"conv": 8, "hidden": 32}, "blocks": None},
]  # fmt: skip
"""Specs of other networks, or of more than was sent."""


@law(100)
@given(st.booleans(), st.data())
def test_result_with_damaged_files_is_an_update_or_a_failure(checked: bool, data: st.DataObject) -> None:
    """`receive` never raises, `finished` asks again, `result` names the file."""
    files = dict(HONEST_FILES[checked])
    if data.draw(st.booleans(), label="manifest"):
        kind = json_like(MANIFEST[checked]) | st.sampled_from(NO_SPECS + OTHER_SPECS).map(
            lambda spec: json.dumps(MANIFEST[checked] | {"spec": spec}).encode()
        )
        files[f"{BASE}.json"] = data.draw(kind, label="content")
    else:
        content = data.draw(damaged(files[f"{BASE}.safetensors"][:3000]), label="content")
        files[f"{BASE}.safetensors"] = content
        if not checked and data.draw(st.booleans(), label="its checksum"):
            files[f"{BASE}.json"] = json.dumps(MANIFEST[checked] | {"sha256": sha256(content)}).encode()
    with in_time():
        received = ledger_of(files, checked).mailbox.receive(PLAN, ASSIGNMENT.client)
        assert isinstance(received, ClientUpdate | ClientFailure)
        if checked and isinstance(received, ClientFailure):
            assert received.stage == "validate"
        assert len(list(ledger_of(files, checked).mailbox.finished(PLAN))) <= 1
    found = answer(lambda: ledger_of(files, checked).mailbox.result(PLAN, ASSIGNMENT.client), BASE, kind=IntegrityError)
    if isinstance(received, ClientUpdate):
        assert isinstance(found, ClientUpdate) and isinstance(found.spec, SubmodelSpec)
        assert (found.round, found.client) == (0, ASSIGNMENT.client)
        if checked:
            assert_same_bits(found.payload, HONEST.payload)


@law(200)
@given(damaged(HONEST_FILES[True][f"{BASE}.safetensors"]))
def test_signed_damaged_weights_are_finite_or_a_failure(content: bytes) -> None:
    """The signature is valid, so only the reader protects the coordinator."""
    manifest = ResultManifest.model_validate(MANIFEST[True] | {"sha256": sha256(content), "signature": None})
    files = {f"{BASE}.json": sign(manifest, KEY).model_dump_json().encode(), f"{BASE}.safetensors": content}
    with in_time():
        found = ledger_of(files, True).mailbox.receive(PLAN, ASSIGNMENT.client)
    if isinstance(found, ClientUpdate):
        kinds = {name: (t.dtype, t.shape) for name, t in HONEST.payload.items()}
        assert {name: (t.dtype, t.shape) for name, t in found.payload.items()}.items() <= kinds.items()
        assert all(bool(torch.isfinite(t).all()) for t in found.payload.values())
    else:
        assert isinstance(found, ClientFailure) and found.stage == "validate"


@law(200)
@given(st.sampled_from(sorted(ResultManifest.model_fields)), anything)
def test_signed_wrong_manifest_is_a_result(field: str, value: Any) -> None:
    said = {key: each for key, each in (MANIFEST[True] | {field: value}).items() if key != "signature"}
    with suppress(ValueError):  # a number that is not finite cannot be signed
        said["signature"] = hmac.new(KEY, canonical(said), "sha256").hexdigest()
    if field == "signature":
        said[field] = value
    files = HONEST_FILES[True] | {f"{BASE}.json": json.dumps(said).encode()}
    with in_time():
        found = ledger_of(files, True).mailbox.receive(PLAN, ASSIGNMENT.client)
    assert isinstance(found, ClientUpdate | ClientFailure)


@pytest.mark.parametrize("checked", [True, False], ids=["with keys", "without"])
@pytest.mark.parametrize("spec", [*NO_SPECS, *OTHER_SPECS], ids=str)
def test_update_with_a_wrong_spec_is_a_failure(checked: bool, spec: Any) -> None:
    """Without rules nobody knows the network, and one of another network is one."""
    manifest = ResultManifest.model_validate(MANIFEST[checked] | {"spec": spec, "signature": None})
    content = sign(manifest, KEY if checked else None).model_dump_json().encode()
    found = ledger_of(HONEST_FILES[checked] | {f"{BASE}.json": content}, checked).mailbox.receive(
        PLAN, ASSIGNMENT.client
    )
    if checked or spec in NO_SPECS:
        assert isinstance(found, ClientFailure) and found.stage == "validate" and found.reason.startswith("spec: ")


# ------------------------------------------------------------------------------------------------------ states
TENSORS, REST = pack(STATE)
ENCODED = encode(TENSORS)


@law(80)
@given(damaged(ENCODED[:4000]) | damaged(ENCODED))
def test_tensors_are_decoded_or_their_file_is_named(content: bytes) -> None:
    found = answer(lambda: decode(content, "state.safetensors"), "state.safetensors", kind=IntegrityError)
    if found is not None:
        assert sum(t.numel() * t.element_size() for t in found.values()) < len(content)
        state = answer(lambda: unpack(STATE, found, REST), "stored state", kind=IntegrityError)
        if state is not None:
            params = state.params
            assert {n: t.shape for n, t in params.items()} == {n: t.shape for n, t in STATE.params.items()}
            assert {n: t.dtype for n, t in params.items()} == {n: t.dtype for n, t in STATE.params.items()}


# -------------------------------------------------------------------------------------------- the whole ledger
def pack_often(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoints, "PACKED", 2)


@pytest.fixture(scope="module")
def runs(job: Any, new_store: Callable[[], Any]) -> dict[str, Any]:
    """The files of a run, those of one of another seed, and the bits that rounds without a disturbance give."""

    class Foreign(type(job)):  # type: ignore[misc]
        seed = 4

    made: dict[str, Any] = {"bits": {}}
    for name, of in (("own", job), ("foreign", Foreign())):
        store = new_store()
        with pytest.MonkeyPatch.context() as patch:
            pack_often(patch)
            of.federate(store, stop=ROUNDS, keep_every=4)
        made[name] = dict(store.files)
    assert any(key.startswith("metrics/") for key in made["own"]), "the measurements of early rounds are packed"
    for stop in (3, ROUNDS, ROUNDS + 1):
        made["bits"][stop] = job.federate(new_store(), stop=stop)
    return made


@pytest.fixture(autouse=True)
def _few_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_often(monkeypatch)


ODD_KEYS = (
    "rounds/x", "rounds/x/COMMITTED", "rounds/-0001/COMMITTED", "rounds/00001", "rounds/00003/x/COMMITTED",
    "rounds/\u0663/COMMITTED", "rounds/00009/x", "rounds/3/COMMITTED", "rounds/00003/.x.1.part", "rounds/ 4/COMMITTED",
    "metrics/x", "metrics/0-3-x.json", "rounds/1e3/COMMITTED", "rounds/99999999999999999999/COMMITTED",
)  # fmt: skip


@st.composite
def disturbed(draw: Any, files: dict[str, bytes], foreign: dict[str, bytes]) -> dict[str, bytes]:
    """A run's files with one thing wrong: damaged, exchanged, lost, of another run, or of no kind."""
    out = dict(files)
    key, other = draw(st.sampled_from(sorted(files))), draw(st.sampled_from(sorted(files)))
    match draw(st.sampled_from(("damage", "json", "lose", "copy", "exchange", "foreign", "odd", "folders"))):
        case "damage":
            out[key] = draw(damaged(files[key][:3000]))
        case "json" if not key.endswith(".safetensors"):
            out[key] = draw(json_like(json.loads(files[key])))
        case "lose":
            del out[key]
        case "copy":
            out[key] = files[other]
        case "exchange":
            out[key], out[other] = files[other], files[key]
        case "foreign":
            out[key] = foreign.get(key, b"")
        case "odd":
            out[draw(st.sampled_from(ODD_KEYS))] = draw(st.sampled_from((b"", b"{}", files[key])))
        case "folders":  # two rounds' whole folders have each other's names
            a, b = ("/".join(k.split("/")[:2]) for k in (key, other))
            for k in [k for k in out if k.startswith((f"{a}/", f"{b}/"))]:
                del out[k]
            for one, two in ((a, b), (b, a)):
                out |= {f"{two}/{k.split('/', 2)[2]}": v for k, v in files.items() if k.startswith(f"{one}/")}
    return out


def check_ledger(job: Any, runs: dict[str, Any], store: Any, files: dict[str, bytes]) -> None:
    store.files = dict(files)
    ledger = Ledger(store)
    for round in ledger.checkpoints.commits():
        plan = RoundPlan(round, ())
        answer(lambda round=round: ledger.checkpoints.read(round), "rounds/", kind=IntegrityError)  # type: ignore[misc]
        answer(lambda plan=plan: ledger.mailbox.closed(plan), "rounds/", kind=IntegrityError)  # type: ignore[misc]
    rows = answer(ledger.checkpoints.rows, "rounds/", "metrics", kind=IntegrityError)
    assert rows is None or [row.round for row in rows] == list(range(len(rows)))
    ledger.checkpoints.last_good()

    found = answer(lambda: job.federate(store, stop=ROUNDS, keep_every=4), "rounds/", "metrics", "stored state")
    if found is None:
        found = job.federate(store, stop=ROUNDS, keep_every=4, discard_damaged=True)
    assert found == runs["bits"][ROUNDS], "the bits of a run that was never disturbed"
    assert job.federate(store, stop=ROUNDS + 1, keep_every=4) == runs["bits"][ROUNDS + 1], "and it goes on"
    assert [row.round for row in Checkpoints(store).rows()] == list(range(ROUNDS + 1))


@law(15)
@given(st.data())
def test_disturbed_run_continues_with_the_right_bits_or_stops(
    job: Any, new_store: Callable[[], Any], runs: dict[str, Any], data: st.DataObject
) -> None:
    """Without `discard_damaged` it may stop with an error that names a file. It never continues with other bits."""
    files = data.draw(disturbed(runs["own"], runs["foreign"]), label="files")
    check_ledger(job, runs, new_store(), files)


@law(8)
@given(st.data())
def test_interrupted_round_finishes_with_the_right_bits(
    job: Any, new_store: Callable[[], Any], dying: Any, killed: Any, runs: dict[str, Any], data: st.DataObject
) -> None:
    """The run is killed inside a round with kept updates, and then one file of the round is damaged."""
    store = new_store()
    with pytest.raises(killed):
        job.federate(dying(store, data.draw(st.integers(2, 45), label="writes")), stop=3, keep_updates=True)
    inside = [key for key in store.list("rounds/") if "/updates/" in key or key.endswith(("plan.json", "closed.json"))]
    if inside:
        key = data.draw(st.sampled_from(inside), label="key")
        store.files[key] = data.draw(damaged(store.files[key][:3000]), label="content")
    found = answer(lambda: job.federate(store, stop=3, keep_updates=True), "rounds/")
    if found is None:
        found = job.federate(store, stop=3, keep_updates=True, discard_damaged=True)
    assert found == runs["bits"][3]
