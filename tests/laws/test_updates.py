"""Updates are not trusted: each lie has its code, and no bytes crash the reader or reach the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import ALGORITHMS, FlexFL
from fl_engine.core.errors import EnvironmentFailure, IntegrityError, Refused
from fl_engine.core.slicing import take
from fl_engine.core.types import ClientFailure, ClientUpdate, Params, RoundPlan, SubmodelSpec
from fl_engine.exchange.client import deliver, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import ResultManifest, assignment_sum, key_of, manifest_bytes, pack_result, sign
from fl_engine.exchange.updates import payload_bytes
from fl_engine.rounds.ledger import RoundMailbox
from fl_engine.storage.store import encode, sha256
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_results, context_of, first_plan, start_of, tiny_site
from tests.harness.stores import MemoryStore

SECRET = b"a run's own"
ALGORITHM = FlexFL(training=TRAINING)
SITE = tiny_site(ALGORITHM)
STATE = start_of(ALGORITHM, SITE)
PLAN = ALGORITHM.plan(STATE, context_of(SITE, 0, SEED))
ASSIGNMENT = PLAN.assignments[0]
KEY = key_of(SECRET)(ASSIGNMENT)
HONEST = execute(ALGORITHM, ASSIGNMENT, SITE)
assert isinstance(HONEST, ClientUpdate)
BASE = f"rounds/00000/updates/{ASSIGNMENT.client}"


def ledger_of(files: dict[str, bytes]) -> RoundMailbox:
    return RoundMailbox(MemoryStore(files), rules=replace(SITE.rules, algorithm=ALGORITHM), key=key_of(SECRET))


LEASE = "ab" * 8


def of_worker(files: dict[str, bytes], kind: type[MemoryStore] = MemoryStore, *more: Any) -> Mailbox:
    """Return the mailbox with these files of a worker."""
    there = {key.replace("/updates/", f"/leases/{LEASE}/"): value for key, value in files.items()}
    rules = replace(SITE.rules, algorithm=ALGORITHM)
    return Mailbox(kind(there, *more), rules=rules, key=key_of(SECRET), lease=LEASE)


def honest_files() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    ledger_of(files).put_result(PLAN, HONEST)
    return files


FILES = honest_files()
MANIFEST = json.loads(FILES[f"{BASE}.json"])


def lying(key: bytes | None = KEY, payload: bytes | None = None, **changes: Any) -> dict[str, bytes]:
    """Return the files of a client that signs arbitrary content."""
    manifest = ResultManifest.model_validate_json(FILES[f"{BASE}.json"])
    value = FILES[f"{BASE}.safetensors"] if payload is None else payload
    manifest = manifest.model_copy(update={"sha256": sha256(value), "signature": None, **changes})
    return {f"{BASE}.json": sign(manifest, key).model_dump_json().encode(), f"{BASE}.safetensors": value}


def tensors(**changes: Callable[[Params], Params]) -> bytes:
    (change,) = changes.values()
    assert isinstance(HONEST, ClientUpdate)
    return encode(change({name: t.clone() for name, t in HONEST.payload.items()}))


def first(params: Params, to: Callable[[torch.Tensor], torch.Tensor]) -> Params:
    name = next(iter(params))
    return {**params, name: to(params[name])}


def poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t.view(-1)[0] = value
        return t

    return change


def test_honest_update_is_accepted_unchanged() -> None:
    assert_same_results([ledger_of(FILES).receive(PLAN, ASSIGNMENT.client)], [HONEST])
    assert_same_results(list(ledger_of(FILES).finished(PLAN)), [HONEST])
    assert ledger_of(FILES).clients_with_results(0) == {ASSIGNMENT.client}


def test_no_result_is_larger_than_its_assignment_allows() -> None:
    whole = ClientUpdate(ASSIGNMENT.round, ASSIGNMENT.client, ASSIGNMENT.spec, ASSIGNMENT.payload, 1, {})
    kept = {group: list(range(10**6 - width, 10**6)) for group, width in SITE.layout.groups.items()}
    longest = ResultManifest(
        round=10**9, client=10**9, assignment="0" * 64, sha256="0" * 64, stage="x" * 64,
        spec={"keep": kept, "blocks": None},
        reason="\0" * 4096, metrics={f"{i:032d}": -1e-300 for i in range(64)}, signature="0" * 64,
    )  # fmt: skip
    assert len(longest.model_dump_json()) <= manifest_bytes(ASSIGNMENT) < 2**18
    value = pack_result(whole, ASSIGNMENT)[1]
    assert value is not None and len(value) <= payload_bytes(ASSIGNMENT)


def test_result_has_the_only_length_of_an_upload() -> None:
    lengths = {f"{BASE}.safetensors": payload_bytes(ASSIGNMENT), f"{BASE}.json": manifest_bytes(ASSIGNMENT)}
    for result in (HONEST, ClientFailure(0, ASSIGNMENT.client, "train", "no")):
        files: dict[str, bytes] = {}
        RoundMailbox(MemoryStore(files), key=key_of(SECRET), lengths=lengths).put_result(PLAN, result)
        assert {key: len(value) for key, value in files.items()}.items() <= lengths.items()
        assert_same_results([ledger_of(files).receive(PLAN, ASSIGNMENT.client)], [result])


class Refusing(MemoryStore):
    """Refuses some reads, from the `after`-th to the one before `until`."""

    def __init__(
        self,
        files: dict[str, bytes],
        what: str,
        after: int = 0,
        until: int = 10**9,
        kind: type[EnvironmentFailure] = Refused,
    ) -> None:
        super().__init__(files)
        self.what, self.after, self.until, self.kind, self.reads = what, after, until, kind, 0

    def get(self, key: str, limit: int | None = None) -> bytes:
        if self.what in key:
            self.reads += 1
            if self.after < self.reads <= self.until:
                raise self.kind(f"{key}: the server refuses GetObject with InvalidObjectState")
        return super().get(key, limit)


@pytest.mark.parametrize("kind", [Refused, EnvironmentFailure])  # the latter: an answer that nobody can read
@pytest.mark.parametrize("what", [f"{BASE}.safetensors", f"{BASE}.json"])
def test_unreadable_files_of_one_client_are_its_failure(what: str, kind: type[EnvironmentFailure]) -> None:
    def refusing(after: int = 0, until: int = 10**9) -> Mailbox:
        return of_worker(FILES, Refusing, what.replace("/updates/", f"/leases/{LEASE}/"), after, until, kind)

    plan = replace(PLAN, assignments=(ASSIGNMENT,))
    result = refusing().receive(plan, ASSIGNMENT.client)
    assert isinstance(result, ClientFailure) and result.stage == "validate"
    assert result.reason.startswith("unreadable: ")
    assert list(refusing().finished(plan)) == []
    # What passes by itself is nobody's doing.
    assert_same_results([refusing(until=1).receive(plan, ASSIGNMENT.client)], [HONEST])


def test_store_that_refuses_everything_fails_the_run() -> None:
    ledger = RoundMailbox(Refusing(dict(FILES), ""), rules=ledger_of({}).rules, key=key_of(SECRET))
    with pytest.raises(EnvironmentFailure, match="InvalidObjectState"):
        ledger.receive(PLAN, ASSIGNMENT.client)
    with pytest.raises(EnvironmentFailure, match="InvalidObjectState"):
        list(ledger.finished(PLAN))
    own = RoundMailbox(Refusing(dict(FILES), BASE), rules=ledger_of({}).rules)
    with pytest.raises(EnvironmentFailure):  # without keys it is this machine's own file
        own.receive(PLAN, ASSIGNMENT.client)


def header(*shape: int) -> bytes:
    """Return a file without numbers, whose sizes overflow in torch."""
    said = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(said)) + said


def many_tensors() -> bytes:
    """Return a file of the allowed size whose header lists many empty tensors."""
    one = b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    count = (payload_bytes(ASSIGNMENT, SITE.rules.client_state) - 100) // (len(one) + 10)
    header = b"{" + b",".join(b'"%06d' % number + one for number in range(count)) + b"}"
    return struct.pack("<Q", len(header)) + header


def narrower() -> dict[str, bytes]:
    """Return a part of what was sent that this client would not train."""
    group = next(g for g in SITE.layout.groups if SITE.layout.width(ASSIGNMENT.spec, g) > 1)
    spec = SubmodelSpec.of({**ASSIGNMENT.spec.kept, group: 1}, ASSIGNMENT.spec.blocks)
    payload = take(ASSIGNMENT.payload, SITE.layout, spec, have=ASSIGNMENT.spec)
    return lying(spec=spec.to_json(), payload=encode({n: t.contiguous() for n, t in payload.items()}))


def written(**said: Any) -> dict[str, bytes]:
    """Return the honest manifest with other content and the old signature."""
    manifest = json.loads(FILES[f"{BASE}.json"])
    return FILES | {f"{BASE}.json": json.dumps({**manifest, **said}).encode()}


OTHER_SPEC = {"keep": {next(iter(SITE.layout.groups)): 10**6}, "blocks": None}
LIES: dict[str, tuple[str, dict[str, bytes]]] = {
    "unsigned": ("signature", lying(key=None)),
    "another client's key": ("signature", lying(key=key_of(SECRET)(PLAN.assignments[1]))),
    "another run's key": ("signature", lying(key=key_of(b"another")(ASSIGNMENT))),
    "another round": ("assignment", lying(round=1)),
    "another client": ("assignment", lying(client=ASSIGNMENT.client + 1)),
    "a replayed assignment": (
        "assignment",
        lying(assignment=assignment_sum(replace(ASSIGNMENT, seed=ASSIGNMENT.seed + 1))),
    ),
    "another file": ("checksum", lying() | {f"{BASE}.safetensors": tensors(a=lambda p: first(p, poisoned(9.0)))}),
    "a pickle": ("schema", lying(payload=b"\x80\x04K\x01.")),
    "a large file": ("file", lying(payload=b"x" * 10**6)),
    "no file": ("file", {f"{BASE}.json": FILES[f"{BASE}.json"]}),
    "a large manifest": ("file", {f"{BASE}.json": b" " * 2**21}),
    "an unknown field more": ("schema", written(run="rm")),
    "a number as text": ("schema", written(round="0")),
    "a stage without end": ("schema", written(stage="s" * 65)),
    "a loss that JSON cannot say": ("metrics", written(metrics={**dict(HONEST.metrics), "loss": float("nan")})),
    "nan": ("finite", lying(payload=tensors(a=lambda p: first(p, poisoned(float("nan")))))),
    "half precision": ("dtype", lying(payload=tensors(a=lambda p: first(p, torch.Tensor.half)))),
    "a row too few": ("shape", lying(payload=tensors(a=lambda p: first(p, lambda t: t[1:])))),
    "a tensor too many": ("names", lying(payload=tensors(a=lambda p: {**p, "more": torch.zeros(1)}))),
    "a tensor too few": ("names", lying(payload=tensors(a=lambda p: dict(list(p.items())[1:])))),
    "nothing of 2**63": ("schema", lying(payload=header(0, 2**63))),
    "a header without end": ("schema", lying(payload=struct.pack("<Q", 2**62) + b"{}")),
    "a header of many tensors": ("schema", lying(payload=many_tensors())),
    "a manifest of many levels": ("schema", {f"{BASE}.json": b'{"spec":' * 2000 + b"0" + b"}" * 2000}),
    "another sub-model than its memory asks for": ("spec", narrower()),
    "more memory than it has": ("metrics", lying(metrics={**dict(HONEST.metrics), "free": 1e18})),
    "a loss that steers": ("metrics", lying(metrics={**dict(HONEST.metrics), "loss": 1e308})),
    "a step more": ("metrics", lying(metrics={**dict(HONEST.metrics), "steps": HONEST.metrics["steps"] + 1})),
    "a multiply-add more": ("metrics", lying(metrics={**dict(HONEST.metrics), "macs": HONEST.metrics["macs"] + 1})),
    "ages": ("metrics", lying(metrics={**dict(HONEST.metrics), "seconds": 1e18})),
    "a number whose square overflows": ("finite", lying(payload=tensors(a=lambda p: first(p, poisoned(3e38))))),
    "channels that are not there": ("spec", lying(spec=OTHER_SPEC)),
    "no sub-model": ("spec", lying(spec={"keep": 7})),
    "odd indices": ("spec", lying(spec={"keep": {next(iter(SITE.layout.groups)): [3, 1]}, "blocks": None})),
    "more samples": ("examples", lying(num_examples=10**9)),
    "no loss": ("metrics", lying(metrics={})),
    "a metric that would be a client's number": ("metrics", lying(metrics={**dict(HONEST.metrics), "client": 7.0})),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_has_its_code(lie: str) -> None:
    code, files = LIES[lie]
    found = ledger_of(files).receive(PLAN, ASSIGNMENT.client)
    assert isinstance(found, ClientFailure)
    assert (found.stage, found.reason.partition(":")[0]) == ("validate", code)
    assert list(ledger_of(files).finished(PLAN)) == []
    with pytest.raises(IntegrityError, match="--discard-damaged"):
        ledger_of(files).result(PLAN, ASSIGNMENT.client)


def test_larger_sub_model_than_was_sent_is_rejected() -> None:
    small = min(PLAN.assignments, key=lambda o: sum(t.numel() for t in o.payload.values()))
    held = len(SITE.partition.clients[small.client])
    update = ClientUpdate(0, small.client, SITE.pool[-1].spec, STATE.params, held, {"loss": 1.0})
    assert small.spec != update.spec
    ledger = ledger_of({})
    ledger.put_result(RoundPlan(0, (small,)), update)
    found = ledger.receive(RoundPlan(0, (small,)), small.client)
    assert isinstance(found, ClientFailure) and found.reason.startswith("spec:")


@pytest.mark.parametrize("stage", ["pod", "validate", "straggle", "x\n$$"])
def test_client_cannot_report_the_coordinators_stages(stage: str) -> None:
    files = lying(spec=None, sha256=None, stage=stage, reason="norm:\n$$", code="norm")
    found = of_worker(files).receive(PLAN, ASSIGNMENT.client)
    assert found == ClientFailure(0, ASSIGNMENT.client, "train", "norm: $$")


ODD = "\x1b[2J\u202e\u2066\x00\ud800"
"""A terminal clears itself, and writes backwards; and half a character."""


def test_reason_of_a_client_is_printable() -> None:
    said = "".join(c for c in ODD if c != "\ud800")
    reasons = lying(spec=None, sha256=None, stage="train", reason=f"gone{said}")
    names = lying(payload=tensors(more=lambda p: {**p, f"zz{said}": torch.zeros(1)}))
    keys = dict(FILES) | {f"{BASE}.json": json.dumps({**MANIFEST, f"zz{said}": 1}).encode()}
    for files in (reasons, names, keys):
        found = of_worker(files).receive(PLAN, ASSIGNMENT.client)
        assert isinstance(found, ClientFailure) and r"\x1b[2J\u202e\u2066\x00" in found.reason
        assert found.reason.isprintable()


def test_key_of_one_assignment_signs_no_other_result() -> None:
    """A client may store all its earlier keys."""
    for other in (
        replace(ASSIGNMENT, round=1),
        replace(ASSIGNMENT, seed=ASSIGNMENT.seed + 1),
        replace(ASSIGNMENT, level=1 - ASSIGNMENT.level),
    ):
        plan, files = RoundPlan(other.round, (other,)), dict[str, bytes]()
        given = RoundMailbox(MemoryStore(files), key=lambda _: KEY)  # what the client does with the key that it has
        given.put_result(plan, replace(HONEST, round=other.round))
        found = ledger_of(files).receive(plan, ASSIGNMENT.client)
        assert isinstance(found, ClientFailure) and found.reason.startswith("signature:")


@pytest.mark.parametrize("later", ["another", "garbage", "nothing"])
def test_result_replaced_after_the_close_does_not_count(later: str) -> None:
    files = dict(FILES)
    ledger = ledger_of(files)
    plan = replace(PLAN, assignments=(ASSIGNMENT,))
    assert len(list(ledger.finished(plan))) == 1
    ledger.close(plan)
    closed = ledger.closed(plan)
    assert closed is not None
    assert_same_results([ledger_of(files).accepted(plan, ASSIGNMENT.client, closed)], [HONEST])
    if later == "another":
        files |= lying(payload=tensors(a=lambda p: first(p, poisoned(1e6))))
    else:
        files[f"{BASE}.json"] = b"garbage" if later == "garbage" else b""
    with pytest.raises(IntegrityError):
        ledger_of(files).accepted(plan, ASSIGNMENT.client, closed)


@pytest.mark.parametrize("what", ["an update", "a failure"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)], ids=["then in pods", "then here"])
def test_closed_result_counts_in_any_backend(before: bool, after: bool, what: str) -> None:
    """Clients of this machine sign without a key, pods with one; a run may continue with the others."""
    files: dict[str, bytes] = {}
    ours = {False: RoundMailbox(MemoryStore(files)), True: ledger_of(files)}
    plan = replace(PLAN, assignments=(ASSIGNMENT,))
    answer = HONEST if what == "an update" else ClientFailure(0, ASSIGNMENT.client, "prune", "nothing fits")
    ours[before].put_result(plan, answer)
    ours[before].close(plan)
    closed = ours[after].closed(plan)
    assert closed is not None
    assert_same_results([ours[after].accepted(plan, ASSIGNMENT.client, closed)], [answer])
    files |= {name: value[:-1] for name, value in files.items() if "updates/" in name}
    if what == "a failure":
        assert_same_results([ours[after].accepted(plan, ASSIGNMENT.client, closed)], [answer])
    else:
        with pytest.raises(IntegrityError, match="--discard-damaged"):
            ours[after].accepted(plan, ASSIGNMENT.client, closed)


def test_measured_memory_within_bounds_is_accepted() -> None:
    rules = replace(SITE.rules, algorithm=ALGORITHM, seed=None)

    def said(free: float) -> str:
        files = lying(metrics={**dict(HONEST.metrics), "free": free})
        found = RoundMailbox(MemoryStore(files), rules=rules, key=key_of(SECRET)).receive(PLAN, ASSIGNMENT.client)
        return found.reason.partition(":")[0] if isinstance(found, ClientFailure) else "taken"

    assert said(HONEST.metrics["free"] + 1e-3) == "taken"
    assert (said(0.0), said(1e18), said(-1.0)) == ("spec", "metrics", "metrics")


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"fedbn"}))  # the tiny network has no batch norm
def test_honest_clients_report_what_the_assignment_makes(name: str) -> None:
    """Steps and multiply-adds, to the bit, for every algorithm, also with a last batch that is not full."""
    for training in (TRAINING, replace(TRAINING, batch_size=3, drop_last=False)):
        algorithm = ALGORITHMS[name](training=training)
        site = tiny_site(algorithm)
        plan = first_plan(algorithm, site)
        files: dict[str, bytes] = {}
        ledger = RoundMailbox(MemoryStore(files), rules=replace(site.rules, algorithm=algorithm))
        for assignment in plan.assignments:
            result = execute(algorithm, assignment, site)
            ledger.put_result(plan, result)
            arrived = deliver(algorithm, result, assignment, site)  # as its codec gives it back, where it has one
            assert_same_results([ledger.receive(plan, assignment.client)], [arrived])


def test_unsigned_results_are_deleted() -> None:
    files: dict[str, bytes] = {}
    RoundMailbox(MemoryStore(files)).put_result(PLAN, HONEST)
    ledger = ledger_of(files)
    assert ledger.clients_with_results(0) == {ASSIGNMENT.client} and list(ledger.finished(PLAN)) == []
    assert ledger.clients_with_results(0) == set() and not files
