"""Updates are not trusted: each lie has its code, and no bytes crash the reader or reach the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import ALGORITHMS, FlexFL
from fl_engine.core.errors import EnvironmentFailure, IntegrityError, Refused
from fl_engine.core.slicing import take
from fl_engine.core.types import ClientFailure, ClientUpdate, Params, RoundPlan, SubmodelSpec
from fl_engine.exchange.client import delivered, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import Manifest, key_of, manifest_bytes, order_sum, packed, signed
from fl_engine.exchange.updates import payload_bytes
from fl_engine.rounds.ledger import RoundMailbox
from fl_engine.storage.serialization import laid_out, padded
from fl_engine.storage.store import MemoryStore, decode, encode, sha256
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_outcomes, context_of, start_of, tiny_site

SECRET = b"a run's own"
ALGORITHM = FlexFL(training=TRAINING)
SITE = tiny_site(ALGORITHM)
STATE = start_of(ALGORITHM, SITE)
PLAN = ALGORITHM.plan(STATE, context_of(SITE, 0, SEED))
ORDER = PLAN.orders[0]
KEY = key_of(SECRET)(ORDER)
HONEST = execute(ALGORITHM, ORDER, SITE)
assert isinstance(HONEST, ClientUpdate)
BASE = f"rounds/00000/updates/{ORDER.client}"


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
    ledger_of(files).put_outcome(PLAN, HONEST)
    return files


FILES = honest_files()
MANIFEST = json.loads(FILES[f"{BASE}.json"])


def lying(key: bytes | None = KEY, payload: bytes | None = None, **changes: Any) -> dict[str, bytes]:
    """Return the files of a client that signs arbitrary content."""
    manifest = Manifest.model_validate_json(FILES[f"{BASE}.json"])
    value = FILES[f"{BASE}.safetensors"] if payload is None else payload
    manifest = manifest.model_copy(update={"sha256": sha256(value), "signature": None, **changes})
    return {f"{BASE}.json": signed(manifest, key).model_dump_json().encode(), f"{BASE}.safetensors": value}


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
    assert_same_outcomes([ledger_of(FILES).receive(PLAN, ORDER.client)], [HONEST])
    assert_same_outcomes(list(ledger_of(FILES).finished(PLAN)), [HONEST])
    assert ledger_of(FILES).answered(0) == {ORDER.client}


def test_no_result_is_larger_than_its_assignment_allows() -> None:
    whole = ClientUpdate(ORDER.round, ORDER.client, ORDER.spec, ORDER.payload, 1, {})
    kept = {group: list(range(10**6 - width, 10**6)) for group, width in SITE.layout.groups.items()}
    longest = Manifest(
        round=10**9, client=10**9, order="0" * 64, sha256="0" * 64, spec={"keep": kept, "blocks": None}, stage="x" * 64,
        reason="\0" * 4096, metrics={f"{i:032d}": -1e-300 for i in range(64)}, signature="0" * 64,
    )  # fmt: skip
    assert len(longest.model_dump_json()) <= manifest_bytes(ORDER) < 2**18
    value = packed(whole, ORDER)[1]
    assert value is not None and len(value) <= payload_bytes(ORDER)


@settings(max_examples=50)
@given(more=st.integers(0, 4000))
def test_padded_update_has_the_same_content(more: int) -> None:
    value = laid_out(HONEST.travels)
    assert bytes(value) == FILES[f"{BASE}.safetensors"]
    longer = padded(value, len(value) + more)
    assert len(longer) == len(bytes(longer)) == len(value) + more
    before, after = decode(bytes(value), "it"), decode(bytes(longer), "it")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_result_has_the_only_length_of_an_upload() -> None:
    lengths = {f"{BASE}.safetensors": payload_bytes(ORDER), f"{BASE}.json": manifest_bytes(ORDER)}
    for outcome in (HONEST, ClientFailure(0, ORDER.client, "train", "no")):
        files: dict[str, bytes] = {}
        RoundMailbox(MemoryStore(files), key=key_of(SECRET), lengths=lengths).put_outcome(PLAN, outcome)
        assert {key: len(value) for key, value in files.items()}.items() <= lengths.items()
        assert_same_outcomes([ledger_of(files).receive(PLAN, ORDER.client)], [outcome])


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

    plan = replace(PLAN, orders=(ORDER,))
    outcome = refusing().receive(plan, ORDER.client)
    assert isinstance(outcome, ClientFailure) and outcome.stage == "validate"
    assert outcome.reason.startswith("unreadable: ")
    assert list(refusing().finished(plan)) == []
    # What passes by itself is nobody's doing.
    assert_same_outcomes([refusing(until=1).receive(plan, ORDER.client)], [HONEST])


def test_store_that_refuses_everything_fails_the_run() -> None:
    ledger = RoundMailbox(Refusing(dict(FILES), ""), rules=ledger_of({}).rules, key=key_of(SECRET))
    with pytest.raises(EnvironmentFailure, match="InvalidObjectState"):
        ledger.receive(PLAN, ORDER.client)
    with pytest.raises(EnvironmentFailure, match="InvalidObjectState"):
        list(ledger.finished(PLAN))
    own = RoundMailbox(Refusing(dict(FILES), BASE), rules=ledger_of({}).rules)
    with pytest.raises(EnvironmentFailure):  # without keys it is this machine's own file
        own.receive(PLAN, ORDER.client)


def header(*shape: int) -> bytes:
    """Return a file without numbers, whose sizes overflow in torch."""
    said = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(said)) + said


def narrower() -> dict[str, bytes]:
    """Return a part of what was sent that this client would not train."""
    group = next(g for g in SITE.layout.groups if SITE.layout.width(ORDER.spec, g) > 1)
    spec = SubmodelSpec.of({**ORDER.spec.kept, group: 1}, ORDER.spec.blocks)
    payload = take(ORDER.payload, SITE.layout, spec, have=ORDER.spec)
    return lying(spec=spec.to_json(), payload=encode({n: t.contiguous() for n, t in payload.items()}))


def written(**said: Any) -> dict[str, bytes]:
    """Return the honest manifest with other content and the old signature."""
    manifest = json.loads(FILES[f"{BASE}.json"])
    return FILES | {f"{BASE}.json": json.dumps({**manifest, **said}).encode()}


OTHER_SPEC = {"keep": {next(iter(SITE.layout.groups)): 10**6}, "blocks": None}
LIES: dict[str, tuple[str, dict[str, bytes]]] = {
    "unsigned": ("signature", lying(key=None)),
    "another client's key": ("signature", lying(key=key_of(SECRET)(PLAN.orders[1]))),
    "another run's key": ("signature", lying(key=key_of(b"another")(ORDER))),
    "another round": ("order", lying(round=1)),
    "another client": ("order", lying(client=ORDER.client + 1)),
    "a replayed order": ("order", lying(order=order_sum(replace(ORDER, seed=ORDER.seed + 1)))),
    "another file": ("checksum", lying() | {f"{BASE}.safetensors": tensors(a=lambda p: first(p, poisoned(9.0)))}),
    "a pickle": ("schema", lying(payload=b"\x80\x04K\x01.")),
    "a large file": ("file", lying(payload=b"x" * 10**6)),
    "no file": ("file", {f"{BASE}.json": FILES[f"{BASE}.json"]}),
    "no manifest": ("schema", {f"{BASE}.json": b"[]"}),
    "a large manifest": ("file", {f"{BASE}.json": b" " * 2**21}),
    "an unknown field": ("schema", {f"{BASE}.json": b'{"run": "rm"}'}),
    "an unknown field more": ("schema", written(run="rm")),
    "a number as text": ("schema", written(round="0")),
    "a stage without end": ("schema", written(stage="s" * 65)),
    "a loss that JSON cannot say": ("metrics", written(metrics={**dict(HONEST.metrics), "loss": float("nan")})),
    "nan": ("finite", lying(payload=tensors(a=lambda p: first(p, poisoned(float("nan")))))),
    "infinity": ("finite", lying(payload=tensors(a=lambda p: first(p, poisoned(float("inf")))))),
    "half precision": ("dtype", lying(payload=tensors(a=lambda p: first(p, torch.Tensor.half)))),
    "integers": ("dtype", lying(payload=tensors(a=lambda p: first(p, torch.Tensor.int)))),
    "a row too few": ("shape", lying(payload=tensors(a=lambda p: first(p, lambda t: t[1:])))),
    "a tensor too many": ("names", lying(payload=tensors(a=lambda p: {**p, "more": torch.zeros(1)}))),
    "a tensor too few": ("names", lying(payload=tensors(a=lambda p: dict(list(p.items())[1:])))),
    "nothing of 2**63": ("schema", lying(payload=header(0, 2**63))),
    "nothing of 2**65": ("schema", lying(payload=header(0, 2**62, 8))),
    "another sub-model than its memory asks for": ("spec", narrower()),
    "less memory than it has": ("metrics", lying(metrics={**dict(HONEST.metrics), "free": 0.0})),
    "more memory than it has": ("metrics", lying(metrics={**dict(HONEST.metrics), "free": 1e18})),
    "a loss that steers": ("metrics", lying(metrics={**dict(HONEST.metrics), "loss": 1e308})),
    "a loss below any": ("metrics", lying(metrics={**dict(HONEST.metrics), "loss": -1e308})),
    "steps that steer": ("metrics", lying(metrics={**dict(HONEST.metrics), "steps": 1e18})),
    "a step more": ("metrics", lying(metrics={**dict(HONEST.metrics), "steps": HONEST.metrics["steps"] + 1})),
    "no work": ("metrics", lying(metrics={**dict(HONEST.metrics), "macs": 0.0})),
    "work that steers": ("metrics", lying(metrics={**dict(HONEST.metrics), "macs": 1e18})),
    "a multiply-add more": ("metrics", lying(metrics={**dict(HONEST.metrics), "macs": HONEST.metrics["macs"] + 1})),
    "ages": ("metrics", lying(metrics={**dict(HONEST.metrics), "seconds": 1e18})),
    "a number whose square overflows": ("finite", lying(payload=tensors(a=lambda p: first(p, poisoned(3e38))))),
    "the same below zero": ("finite", lying(payload=tensors(a=lambda p: first(p, poisoned(-3e38))))),
    "no step": ("metrics", lying(metrics={**dict(HONEST.metrics), "steps": 0.0})),
    "endless steps": ("metrics", lying(metrics={**dict(HONEST.metrics), "steps": 1e308})),
    "channels that are not there": ("spec", lying(spec=OTHER_SPEC)),
    "no sub-model": ("spec", lying(spec={"keep": 7})),
    "blocks that are no names": ("spec", lying(spec={"keep": {}, "blocks": [1]})),
    "odd indices": ("spec", lying(spec={"keep": {next(iter(SITE.layout.groups)): [3, 1]}, "blocks": None})),
    "more samples": ("examples", lying(num_examples=10**9)),
    "fewer samples": ("examples", lying(num_examples=0)),
    "no loss": ("metrics", lying(metrics={})),
    "a negative count": ("metrics", lying(metrics={**dict(HONEST.metrics), "steps": -1.0})),
    "a metric that would be a client's number": ("metrics", lying(metrics={**dict(HONEST.metrics), "client": 7.0})),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_has_its_code(lie: str) -> None:
    code, files = LIES[lie]
    found = ledger_of(files).receive(PLAN, ORDER.client)
    assert isinstance(found, ClientFailure)
    assert (found.stage, found.reason.partition(":")[0]) == ("validate", code)
    assert list(ledger_of(files).finished(PLAN)) == []
    with pytest.raises(IntegrityError, match="--discard-damaged"):
        ledger_of(files).outcome(PLAN, ORDER.client)


def test_larger_sub_model_than_was_sent_is_rejected() -> None:
    small = min(PLAN.orders, key=lambda o: sum(t.numel() for t in o.payload.values()))
    held = len(SITE.partition.clients[small.client])
    update = ClientUpdate(0, small.client, SITE.pool[-1].spec, STATE.params, held, {"loss": 1.0})
    assert small.spec != update.spec
    ledger = ledger_of({})
    ledger.put_outcome(RoundPlan(0, (small,)), update)
    found = ledger.receive(RoundPlan(0, (small,)), small.client)
    assert isinstance(found, ClientFailure) and found.reason.startswith("spec:")


@pytest.mark.parametrize("stage", ["pod", "validate", "straggle", "x\n$$"])
def test_client_cannot_report_the_coordinators_stages(stage: str) -> None:
    files = lying(spec=None, sha256=None, stage=stage, reason="norm:\n$$", code="norm")
    found = of_worker(files).receive(PLAN, ORDER.client)
    assert found == ClientFailure(0, ORDER.client, "train", "norm: $$")


ODD = "\x1b[2J\u202e\u2066\x00\ud800"
"""A terminal clears itself, and writes backwards; and half a character."""


def test_reason_of_a_client_is_printable() -> None:
    said = "".join(c for c in ODD if c != "\ud800")
    reasons = lying(spec=None, sha256=None, stage="train", reason=f"gone{said}")
    names = lying(payload=tensors(more=lambda p: {**p, f"zz{said}": torch.zeros(1)}))
    keys = dict(FILES) | {f"{BASE}.json": json.dumps({**MANIFEST, f"zz{said}": 1}).encode()}
    for files in (reasons, names, keys):
        found = of_worker(files).receive(PLAN, ORDER.client)
        assert isinstance(found, ClientFailure) and r"\x1b[2J\u202e\u2066\x00" in found.reason
        assert found.reason.isprintable()


def test_key_of_one_assignment_signs_no_other_result() -> None:
    """A client may store all its earlier keys."""
    for other in (replace(ORDER, round=1), replace(ORDER, seed=ORDER.seed + 1), replace(ORDER, level=1 - ORDER.level)):
        plan, files = RoundPlan(other.round, (other,)), dict[str, bytes]()
        given = RoundMailbox(MemoryStore(files), key=lambda _: KEY)  # what the client does with the key that it has
        given.put_outcome(plan, replace(HONEST, round=other.round))
        found = ledger_of(files).receive(plan, ORDER.client)
        assert isinstance(found, ClientFailure) and found.reason.startswith("signature:")


@pytest.mark.parametrize("later", ["another", "garbage", "nothing"])
def test_result_replaced_after_the_close_does_not_count(later: str) -> None:
    files = dict(FILES)
    ledger = ledger_of(files)
    plan = replace(PLAN, orders=(ORDER,))
    assert len(list(ledger.finished(plan))) == 1
    ledger.close(plan, [ORDER.client])
    closed = ledger.closed(plan)
    assert closed is not None
    assert_same_outcomes([ledger_of(files).accepted(plan, ORDER.client, closed)], [HONEST])
    if later == "another":
        files |= lying(payload=tensors(a=lambda p: first(p, poisoned(1e6))))
    else:
        files[f"{BASE}.json"] = b"garbage" if later == "garbage" else b""
    with pytest.raises(IntegrityError):
        ledger_of(files).accepted(plan, ORDER.client, closed)


@pytest.mark.parametrize("what", ["an update", "a failure"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)], ids=["then in pods", "then here"])
def test_closed_outcome_counts_in_any_backend(before: bool, after: bool, what: str) -> None:
    """Clients of this machine sign without a key, pods with one; a run may continue with the others."""
    files: dict[str, bytes] = {}
    ours = {False: RoundMailbox(MemoryStore(files)), True: ledger_of(files)}
    plan = replace(PLAN, orders=(ORDER,))
    answer = HONEST if what == "an update" else ClientFailure(0, ORDER.client, "prune", "nothing fits")
    ours[before].put_outcome(plan, answer)
    ours[before].close(plan, [ORDER.client])
    closed = ours[after].closed(plan)
    assert closed is not None
    assert_same_outcomes([ours[after].accepted(plan, ORDER.client, closed)], [answer])
    files |= {name: value[:-1] for name, value in files.items() if "updates/" in name}
    if what == "a failure":
        assert_same_outcomes([ours[after].accepted(plan, ORDER.client, closed)], [answer])
    else:
        with pytest.raises(IntegrityError, match="--discard-damaged"):
            ours[after].accepted(plan, ORDER.client, closed)


def test_result_with_other_metrics_still_counts() -> None:
    files = dict(FILES)
    ledger, plan = ledger_of(files), replace(PLAN, orders=(ORDER,))
    assert len(list(ledger.finished(plan))) == 1
    ledger.close(plan, [ORDER.client])
    closed = ledger.closed(plan)
    assert closed is not None
    for later in ({"seconds": 99.0}, {"loss": 77.0}, {"loss": 1e308, "steps": 1e18, "free": 0.0, "macs": 0.0}, None):
        files |= lying(metrics={} if later is None else {**dict(HONEST.metrics), **later})
        found = ledger_of(files).accepted(plan, ORDER.client, closed)
        assert_same_outcomes([found], [HONEST])
        assert isinstance(found, ClientUpdate) and found.metrics == HONEST.metrics, "as the round was closed with"


def test_measured_memory_within_bounds_is_accepted() -> None:
    rules = replace(SITE.rules, algorithm=ALGORITHM, seed=None)

    def said(free: float) -> str:
        files = lying(metrics={**dict(HONEST.metrics), "free": free})
        found = RoundMailbox(MemoryStore(files), rules=rules, key=key_of(SECRET)).receive(PLAN, ORDER.client)
        return found.reason.partition(":")[0] if isinstance(found, ClientFailure) else "taken"

    assert said(HONEST.metrics["free"] + 1e-3) == "taken"
    assert (said(0.0), said(1e18), said(-1.0)) == ("spec", "metrics", "metrics")


def test_unknown_algorithm_checks_only_bounds() -> None:
    rules = replace(SITE.rules, algorithm=None)

    def said(**metrics: float) -> str:
        files = lying(metrics={**dict(HONEST.metrics), **metrics})
        found = RoundMailbox(MemoryStore(files), rules=rules, key=key_of(SECRET)).receive(PLAN, ORDER.client)
        return found.reason.partition(":")[0] if isinstance(found, ClientFailure) else "taken"

    assert said(steps=7.0, macs=1e9) == "taken"
    worst = {name: 1e19 for name in ("steps", "macs", "free", "seconds", "loss")}
    assert {name: said(**{name: value}) for name, value in worst.items()} == dict.fromkeys(worst, "metrics")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_honest_clients_report_what_the_assignment_makes(name: str) -> None:
    """Steps and multiply-adds, to the bit, for every algorithm, also with a last batch that is not full."""
    for training in (TRAINING, replace(TRAINING, batch_size=3, drop_last=False)):
        algorithm = ALGORITHMS[name](training=training)
        site = tiny_site(algorithm)
        plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
        files: dict[str, bytes] = {}
        ledger = RoundMailbox(MemoryStore(files), rules=replace(site.rules, algorithm=algorithm))
        for order in plan.orders:
            outcome = execute(algorithm, order, site)
            ledger.put_outcome(plan, outcome)
            arrived = delivered(algorithm, outcome, order, site)  # as its codec gives it back, where it has one
            assert_same_outcomes([ledger.receive(plan, order.client)], [arrived])


def test_unsigned_results_are_deleted() -> None:
    files: dict[str, bytes] = {}
    RoundMailbox(MemoryStore(files)).put_outcome(PLAN, HONEST)
    ledger = ledger_of(files)
    assert ledger.answered(0) == {ORDER.client} and list(ledger.finished(PLAN)) == []
    assert ledger.answered(0) == set() and not files
