"""Weights that a codec codes: server and client go on from the same bits, what travels is what is counted, and what a
stranger sends instead is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.backends import InProcess
from fl_engine.codecs import Half
from fl_engine.core.errors import ClientError, IntegrityError, ModelError
from fl_engine.core.fields import STRICT
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientFailure, ClientUpdate, Codecs, Header, Outcome, Params, RoundPlan, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import Manifest, key_of, manifest_bytes, signed
from fl_engine.exchange.updates import payload_bytes, received
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.storage.store import FolderStore, encode, sha256
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    assert_same_bits,
    assert_same_outcomes,
    context_of,
    start_of,
    tiny_fleet,
    tiny_site,
)
from tests.harness.deflated import Deflated

ALGORITHM = FlexFL(training=replace(TRAINING, epochs=1))
FAMILY = SmallCNN((1, 8, 8), 4, width=0.25, norm="static")
"""With running statistics."""
SITE = tiny_site(ALGORITHM, FAMILY, fleet=tiny_fleet(sigma=(20.0, 30.0)))
STATE = start_of(ALGORITHM, SITE)
BARE = ALGORITHM.plan(STATE, context_of(SITE, 0, SEED))
HALF, DEFLATED = Codecs(Half(), Half()), Codecs(Deflated(), Deflated())
BOTH = pytest.mark.parametrize("codecs", [HALF, DEFLATED, Codecs(up=Half()), Codecs(down=Half())], ids=str)
SECRET = b"a run's own"


def plan_of(codecs: Codecs) -> RoundPlan:
    return coding.sent(BARE, SITE.pool, codecs, SEED)


def mailbox_of(folder: Path, **more: Any) -> Mailbox:
    return Mailbox(FolderStore(folder), replace(SITE.rules, algorithm=ALGORITHM), **more)


def outcomes_of(plan: RoundPlan, site: Site = SITE) -> list[Outcome]:
    return sorted(InProcess(site).run(ALGORITHM, plan), key=lambda o: o.client)


# ------------------------------------------------------------------------------------------------------- orders


def test_codecs_of_assignment_override_level_and_run() -> None:
    ((level, _),) = Counter(order.level for order in BARE.orders).most_common(1)
    pool = tuple(replace(m, codecs=Codecs(up=Half())) if i == level else m for i, m in enumerate(SITE.pool))
    first = next(order for order in BARE.orders if order.level == level)
    own = tuple(replace(order, codecs=Codecs()) if order is first else order for order in BARE.orders)
    plan = coding.sent(replace(BARE, orders=own), pool, DEFLATED, SEED)
    assert plan.order_of[first.client].codecs == Codecs() and plan.order_of[first.client].encoded is None
    others = [order for order in plan.orders if order.client != first.client]
    for order in others:
        assert order.codecs == (Codecs(up=Half()) if order.level == level else DEFLATED)
    assert {order.level == level for order in others} == {True, False}


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ('"name":"half"', '"name":"hlaf"'),
        ('"float32"', '"float33"'),
        ('"up":{', '"sideways":{'),
        ('"conv1.conv.weight":', '"conv9.conv.weight":'),
    ],
)
def test_an_order_that_nobody_can_decode_is_named(said: str, wrong: str, tmp_path: Path) -> None:
    mailbox = mailbox_of(tmp_path)
    mailbox.put_orders(plan_of(HALF))
    path = tmp_path / f"rounds/00000/orders/{BARE.orders[0].client}.json"
    assert said in path.read_text()
    path.write_text(path.read_text().replace(said, wrong))
    with pytest.raises(IntegrityError, match=path.name):
        mailbox.orders(0, [BARE.orders[0].client])


# ------------------------------------------------------------------------------------------------------ updates
@BOTH
def test_an_update_through_the_store_is_the_one_in_memory(codecs: Codecs, tmp_path: Path) -> None:
    plan, mailbox = plan_of(codecs), mailbox_of(tmp_path)
    here, pruned = outcomes_of(plan), 0
    for outcome in here:
        assert isinstance(outcome, ClientUpdate) and (outcome.encoded is None) == (codecs.up is None)
        order = plan.order_of[outcome.client]
        pruned += outcome.spec != order.spec
        # What a client in another process sends: its order is the stored one.
        mailbox.put_orders(replace(plan, orders=(order,)))
        (stored,) = mailbox.orders(0, [order.client]).values()
        mailbox.put_outcome(plan, execute(ALGORITHM, stored, SITE))
        there = mailbox.receive(plan, order.client)
        assert_same_outcomes([there], [outcome])
        assert isinstance(there, ClientUpdate)
        assert_same_bits(there.travels, outcome.travels)
        size = (tmp_path / f"rounds/00000/updates/{order.client}.safetensors").stat().st_size
        assert size <= payload_bytes(order)
    assert pruned, "in this example some device has to prune"


def test_the_server_adds_the_change_that_it_decodes() -> None:
    plan = plan_of(HALF)
    for outcome in outcomes_of(plan):
        order = plan.order_of[outcome.client]
        bare = execute(ALGORITHM, order, SITE)
        assert isinstance(outcome, ClientUpdate) and isinstance(bare, ClientUpdate)
        sent = take(order.payload, SITE.layout, outcome.spec, have=order.spec)
        for name, tensor in outcome.payload.items():
            if is_statistic(name):
                assert torch.equal(tensor, bare.payload[name])
                continue
            change = bare.payload[name] - sent[name]
            assert torch.equal(tensor, sent[name] + change.half().float())
            off = float((tensor - bare.payload[name]).abs().max())
            assert off <= max(float(change.abs().max()) * 2**-11, 2**-25) + float(tensor.abs().max()) * 2**-23


@dataclass(frozen=True)
class Mute:
    __pydantic_config__ = STRICT

    def encode(self, tensors: Params, seed: int) -> Params:
        raise ModelError("numbers that it cannot say")

    def decode(self, encoded: Params, header: Header) -> Params:
        return dict(encoded)

    def header(self, header: Header) -> Header:
        return header


def test_unencodable_numbers_fail_the_client_or_the_server() -> None:
    plan = replace(plan_of(Codecs(up=Mute())), orders=plan_of(Codecs(up=Mute())).orders[:1])
    (found,) = InProcess(SITE).run(ALGORITHM, plan)
    assert isinstance(found, ClientFailure) and found.stage == "train"
    assert "codec.up" in found.reason and found.code == "finite"
    far = {name: torch.full_like(t, 7e4) for name, t in BARE.orders[0].payload.items()}
    with pytest.raises(ModelError, match=r"round 1: .* holds 7e\+04, and float16 ends at 65504\. Choose another"):
        coding.sent(RoundPlan(0, (replace(BARE.orders[0], payload=far),)), SITE.pool, HALF, SEED)


# --------------------------------------------------------------------------------------------------------- lies
@dataclass(frozen=True)
class Case:
    """A client's honest answer, whose tensors a liar changes."""

    codecs: Codecs
    order: WorkOrder
    honest: ClientUpdate

    @classmethod
    def of(cls, codecs: Codecs) -> Case:
        order = plan_of(codecs).orders[0]
        honest = execute(ALGORITHM, order, SITE)
        assert isinstance(honest, ClientUpdate) and honest.encoded is not None
        return cls(codecs, order, honest)

    def told(self, folder: Path, change: Callable[[Params], Params | bytes]) -> Outcome:
        made = change({name: t.clone() for name, t in self.honest.travels.items()})
        value = made if isinstance(made, bytes) else encode(made)
        plan, mailbox = RoundPlan(0, (self.order,)), mailbox_of(folder, key=key_of(SECRET))
        mailbox.put_outcome(plan, self.honest)
        base = folder / f"rounds/00000/updates/{self.order.client}"
        manifest = Manifest.model_validate_json(base.with_suffix(".json").read_bytes())
        manifest = manifest.model_copy(update={"sha256": sha256(value), "signature": None})
        base.with_suffix(".json").write_text(signed(manifest, key_of(SECRET)(self.order)).model_dump_json())
        base.with_suffix(".safetensors").write_bytes(value)
        return mailbox.receive(plan, self.order.client)


WEIGHT, STATISTIC = "conv1.conv.weight", "conv1.bn.running_var"


def at(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Params], Params]:
    return lambda params: {**params, name: change(params[name])}


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: torch.full_like(t, value)


LIES: dict[str, tuple[str, Codecs, Callable[[Params], Params | bytes]]] = {
    "uncoded": ("dtype", HALF, at(WEIGHT, torch.Tensor.float)),
    "coded statistics": ("dtype", HALF, at(STATISTIC, torch.Tensor.half)),
    "a row too few": ("shape", HALF, at(WEIGHT, lambda t: t[1:].clone())),
    "one number for all": ("shape", HALF, at(WEIGHT, lambda t: t.flatten()[:1].clone())),
    "a short flat one": ("shape", HALF, at("conv1.conv.bias", lambda t: t[:1].clone())),
    "a tensor too few": ("names", HALF, lambda p: {n: t for n, t in p.items() if n != WEIGHT}),
    "a tensor too many": ("names", HALF, lambda p: {**p, "more": torch.zeros(1)}),
    "nan": ("finite", HALF, at(WEIGHT, filled(float("nan")))),
    "infinity": ("finite", HALF, at(WEIGHT, filled(float("inf")))),
    "a variance below zero": ("statistics", HALF, at(STATISTIC, filled(-1.0))),
    "a statistic of nan": ("finite", HALF, at(STATISTIC, filled(float("nan")))),
    "no file of tensors": ("schema", HALF, lambda p: b"x" * 100),
    "a large file": ("file", HALF, lambda p: encode(p) + b"x" * 10**6),
    "no stream": ("encoding", DEFLATED, at(WEIGHT, filled(7))),
    "an empty stream": ("encoding", DEFLATED, at(WEIGHT, lambda t: t[:0].clone())),
    "half a stream": ("encoding", DEFLATED, at(WEIGHT, lambda t: t[: len(t) // 2].clone())),
    "a long stream": ("shape", DEFLATED, at(WEIGHT, lambda t: torch.cat([t, t, t]))),
    "a stream in rows": ("shape", DEFLATED, at(WEIGHT, lambda t: t[None].clone())),
    "more than it may hold": (
        "encoding", DEFLATED, at(WEIGHT, lambda t: Deflated().encode({"a": torch.zeros(10**4)}, 0)["a"])
    ),
    "an endless scale": ("finite", DEFLATED, at(f"{WEIGHT}/scale", filled(float("inf")))),
    "a scale beyond any weight": ("finite", DEFLATED, at(f"{WEIGHT}/scale", filled(1e30))),
    "no scale": ("names", DEFLATED, lambda p: {n: t for n, t in p.items() if n != f"{WEIGHT}/scale"}),
}  # fmt: skip
CASES = {codecs: Case.of(codecs) for codecs in (HALF, DEFLATED)}


@pytest.mark.parametrize("lie", LIES)
def test_lying_update_fails_with_its_code(lie: str, tmp_path: Path) -> None:
    code, codecs, change = LIES[lie]
    found = CASES[codecs].told(tmp_path, change)
    assert isinstance(found, ClientFailure), "it is taken"
    assert (found.stage, found.code, found.reason.partition(":")[0]) == ("validate", code, code)


def test_codec_error_on_an_update_is_the_clients_failure(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Careless(Half):
        def decode(self, encoded: Params, header: Header) -> Params:
            raise ZeroDivisionError("nobody thought of that")

    @dataclass(frozen=True)
    class Other(Half):
        def decode(self, encoded: Params, header: Header) -> Params:
            return {name: torch.zeros(1) for name in header}

    for codec, said in ((Careless(), "Careless cannot decode it: nobody thought of that"), (Other(), "Other decodes")):
        case = replace(CASES[HALF], order=replace(CASES[HALF].order, codecs=Codecs(None, codec)))
        found = case.told(tmp_path, lambda p: p)
        assert isinstance(found, ClientFailure) and found.code == "encoding" and said in found.reason


@pytest.mark.parametrize("codecs", CASES, ids=str)
def test_an_answer_has_the_one_length_that_a_store_takes(codecs: Codecs, tmp_path: Path) -> None:
    order = plan_of(codecs).orders[0]
    base = f"rounds/00000/updates/{order.client}"
    lengths = {f"{base}.safetensors": payload_bytes(order), f"{base}.json": manifest_bytes(order)}
    for free in (None, 1.0):
        outcome = execute(ALGORITHM, order, replace(SITE, free=free))
        assert isinstance(outcome, ClientUpdate) and (free is None or outcome.spec != order.spec or order.level == 0)
        mailbox = Mailbox(FolderStore(tmp_path), replace(SITE.rules, seed=None, algorithm=ALGORITHM), lengths=lengths)
        mailbox.put_outcome(plan_of(codecs), outcome)
        assert (tmp_path / f"{base}.safetensors").stat().st_size == payload_bytes(order)
        found = mailbox.receive(plan_of(codecs), order.client)
        assert_same_outcomes([found], [received(outcome, order, SITE.rules)])
    with pytest.raises(ClientError, match="POST policies"):
        short = {f"{base}.safetensors": 100}
        Mailbox(FolderStore(tmp_path), lengths=short).put_outcome(plan_of(codecs), outcome)
