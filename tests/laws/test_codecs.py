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
from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import (
    Assignment,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Codecs,
    Header,
    Params,
    RoundPlan,
)
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import ResultManifest, key_of, sign
from fl_engine.exchange.updates import payload_bytes
from fl_engine.models.chains import SmallCNN
from fl_engine.storage.store import FolderStore, encode, sha256
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    assert_same_bits,
    assert_same_results,
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
    return coding.encode_plan(BARE, SITE.pool, codecs, SEED)


def mailbox_of(folder: Path, **more: Any) -> Mailbox:
    return Mailbox(FolderStore(folder), replace(SITE.rules, algorithm=ALGORITHM), **more)


def results_of(plan: RoundPlan, site: Site = SITE) -> list[ClientResult]:
    return sorted(InProcess(site).run(ALGORITHM, plan), key=lambda o: o.client)


def test_codecs_of_assignment_override_level_and_run() -> None:
    ((level, _),) = Counter(assignment.level for assignment in BARE.assignments).most_common(1)
    pool = tuple(replace(m, codecs=Codecs(up=Half())) if i == level else m for i, m in enumerate(SITE.pool))
    first = next(assignment for assignment in BARE.assignments if assignment.level == level)
    own = tuple(
        replace(assignment, codecs=Codecs()) if assignment is first else assignment for assignment in BARE.assignments
    )
    plan = coding.encode_plan(replace(BARE, assignments=own), pool, DEFLATED, SEED)
    assert plan.assignment_of[first.client].codecs == Codecs() and plan.assignment_of[first.client].encoded is None
    others = [assignment for assignment in plan.assignments if assignment.client != first.client]
    for assignment in others:
        assert assignment.codecs == (Codecs(up=Half()) if assignment.level == level else DEFLATED)
    assert {assignment.level == level for assignment in others} == {True, False}


@BOTH
def test_an_update_through_the_store_is_the_one_in_memory(codecs: Codecs, tmp_path: Path) -> None:
    plan, mailbox = plan_of(codecs), mailbox_of(tmp_path)
    here, pruned = results_of(plan), 0
    for result in here:
        assert isinstance(result, ClientUpdate) and (result.encoded is None) == (codecs.up is None)
        assignment = plan.assignment_of[result.client]
        pruned += result.spec != assignment.spec
        # What a client in another process sends: its order is the stored one.
        mailbox.put_assignments(replace(plan, assignments=(assignment,)))
        (stored,) = mailbox.assignments(0, [assignment.client]).values()
        mailbox.put_result(plan, execute(ALGORITHM, stored, SITE))
        there = mailbox.receive(plan, assignment.client)
        assert_same_results([there], [result])
        assert isinstance(there, ClientUpdate)
        assert_same_bits(there.travels, result.travels)
        size = (tmp_path / f"rounds/00000/updates/{assignment.client}.safetensors").stat().st_size
        assert size <= payload_bytes(assignment)
    assert pruned, "in this example some device has to prune"


def test_server_adds_the_decoded_change() -> None:
    plan = plan_of(HALF)
    for result in results_of(plan):
        assignment = plan.assignment_of[result.client]
        bare = execute(ALGORITHM, assignment, SITE)
        assert isinstance(result, ClientUpdate) and isinstance(bare, ClientUpdate)
        sent = take(assignment.payload, SITE.layout, result.spec, have=assignment.spec)
        for name, tensor in result.payload.items():
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
    plan = replace(plan_of(Codecs(up=Mute())), assignments=plan_of(Codecs(up=Mute())).assignments[:1])
    (found,) = InProcess(SITE).run(ALGORITHM, plan)
    assert isinstance(found, ClientFailure) and found.stage == "train"
    assert "codec.up" in found.reason and found.code == "finite"
    far = {name: torch.full_like(t, 7e4) for name, t in BARE.assignments[0].payload.items()}
    with pytest.raises(ModelError, match=r"round 1: .* got 7e\+04"):
        coding.encode_plan(RoundPlan(0, (replace(BARE.assignments[0], payload=far),)), SITE.pool, HALF, SEED)


@dataclass(frozen=True)
class Case:
    """A client's honest answer, whose tensors a liar changes."""

    codecs: Codecs
    assignment: Assignment
    honest: ClientUpdate

    @classmethod
    def of(cls, codecs: Codecs) -> Case:
        assignment = plan_of(codecs).assignments[0]
        honest = execute(ALGORITHM, assignment, SITE)
        assert isinstance(honest, ClientUpdate) and honest.encoded is not None
        return cls(codecs, assignment, honest)

    def told(self, folder: Path, change: Callable[[Params], Params | bytes]) -> ClientResult:
        made = change({name: t.clone() for name, t in self.honest.travels.items()})
        value = made if isinstance(made, bytes) else encode(made)
        plan, mailbox = RoundPlan(0, (self.assignment,)), mailbox_of(folder, key=key_of(SECRET))
        mailbox.put_result(plan, self.honest)
        base = folder / f"rounds/00000/updates/{self.assignment.client}"
        manifest = ResultManifest.model_validate_json(base.with_suffix(".json").read_bytes())
        manifest = manifest.model_copy(update={"sha256": sha256(value), "signature": None})
        base.with_suffix(".json").write_text(sign(manifest, key_of(SECRET)(self.assignment)).model_dump_json())
        base.with_suffix(".safetensors").write_bytes(value)
        return mailbox.receive(plan, self.assignment.client)


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

    for codec, said in (
        (Careless(), "cannot decode the tensors: nobody thought of that"),
        (Other(), "Other.decode must"),
    ):
        case = replace(CASES[HALF], assignment=replace(CASES[HALF].assignment, codecs=Codecs(None, codec)))
        found = case.told(tmp_path, lambda p: p)
        assert isinstance(found, ClientFailure) and found.code == "encoding" and said in found.reason
