"""What clients keep: who may declare what, what a lie about it is worth, and that no kill and no backend changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.aggregation import privacy
from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import FedAvg
from fl_engine.backends import InProcess
from fl_engine.core.clients import header, kept_by_clients, travelling
from fl_engine.core.contracts import ClientContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import full_shapes, largest
from fl_engine.core.types import ClientFailure, ClientUpdate, LocalTask, Outcome, Params, Start, TaskContext, WorkOrder
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import packed
from fl_engine.exchange.updates import payload_bytes
from fl_engine.fleet.devices import simulated_seconds
from fl_engine.rounds import loop
from fl_engine.rounds.ledger import Ledger, RoundMailbox, ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage import lease
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore, encode, tensor_bytes
from fl_engine.storage.tensor_files import named
from fl_engine.testing.plugins import PersonalHeads
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    Memory,
    TinyNet,
    assert_same_bits,
    assert_same_outcomes,
    context_of,
    start_of,
    tiny_fleet,
    tiny_site,
)
from fl_engine.training.numerics import Numerics

HEADS = PersonalHeads(training=replace(TRAINING, fraction=0.5, epochs=1))
SITE = tiny_site(HEADS, fleet=tiny_fleet(6))
PLAN = HEADS.plan(start_of(HEADS, SITE), context_of(SITE, 0, SEED))
ORDER = PLAN.orders[0]
DECLARED = kept_by_clients(HEADS, SITE.family, SITE.pool)


def by_client(outcomes: Any) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: outcome.client)


def update_of(order: WorkOrder = ORDER, algorithm: Any = HEADS) -> ClientUpdate:
    outcome = execute(algorithm, order, SITE)
    assert isinstance(outcome, ClientUpdate), outcome
    return outcome


# ------------------------------------------------------------------------------------------------ declarations


def test_private_aggregation_refuses_it() -> None:
    private = replace(HEADS, aggregation=Private())
    for refuse in (
        lambda: start_of(private, SITE),
        lambda: privacy.check_settings(private, True, {}),
    ):
        with pytest.raises(ConfigError, match="PersonalHeads"):
            refuse()


# -------------------------------------------------------------------------------------------------- on a client
def test_a_head_begins_as_it_was_left_and_is_not_sent_as_weights() -> None:
    first = update_of()
    assert first.state.keys() == DECLARED.keys() == {"classifier.weight", "classifier.bias"}
    assert first.payload.keys() == ORDER.payload.keys() - DECLARED.keys()
    bare = update_of(algorithm=FedAvg(training=HEADS.training, eligible="all"))
    assert_same_bits({**first.payload, **first.state}, bare.payload)  # the first time it starts from the global head
    again = update_of(replace(ORDER, memory=travelling(first.state)))
    own = replace(ORDER, payload={**ORDER.payload, **first.state})
    assert_same_bits({**again.payload, **again.state}, update_of(own, FedAvg(HEADS.training, eligible="all")).payload)


@dataclass(frozen=True)
class Pushed(PersonalHeads):
    def begin(self, state: Params, start: Start, order: WorkOrder, task: LocalTask, ctx: TaskContext) -> Start:
        return replace(start, linear={**start.linear, **state})


@pytest.mark.parametrize("numerics", [Numerics(), Numerics("batched", 3)], ids=["single", "batched"])
def test_a_variate_is_a_linear_term_as_the_servers_is(numerics: Numerics) -> None:
    site, pushed = replace(SITE, numerics=numerics), Pushed(training=HEADS.training)
    g = {name: torch.full(shape, 0.01) for name, shape in DECLARED.items()}
    bare = FedAvg(training=HEADS.training, eligible="all")
    for index in range(len(PLAN.orders)):
        kept, told = list(PLAN.orders), list(PLAN.orders)
        kept[index], told[index] = (replace(ORDER_OF[index], memory=memory) for memory in (travelling(g), g))
        found = by_client(InProcess(site).run(pushed, replace(PLAN, orders=tuple(kept))))
        expected = by_client(InProcess(site).run(bare, replace(PLAN, orders=tuple(told))))
        for a, b in zip(found, expected, strict=True):
            assert isinstance(a, ClientUpdate) and isinstance(b, ClientUpdate)
            assert_same_bits({**a.payload, **a.state}, b.payload)
    plain = by_client(InProcess(site).run(bare, PLAN))[-1]
    assert isinstance(plain, ClientUpdate) and isinstance(b, ClientUpdate)
    assert not plain.payload["classifier.bias"].equal(b.payload["classifier.bias"]), "it moves something"


ORDER_OF = dict(enumerate(PLAN.orders))


@dataclass(frozen=True)
class KeepsOther(PersonalHeads):
    what: str = ""

    def keep(self, state: Params, client: ClientContext) -> Params:
        kept = dict(super().keep(state, client))
        match self.what:
            case "lacks":
                del kept["classifier.bias"]
            case "shape":
                kept["classifier.bias"] = kept["classifier.bias"][1:]
            case "dtype":
                kept["classifier.bias"] = kept["classifier.bias"].double()
            case "finite":
                kept["classifier.bias"] = kept["classifier.bias"] * math.nan
        return kept


@pytest.mark.parametrize("what", ["lacks", "shape", "dtype", "finite"])
def test_a_client_that_keeps_what_is_not_declared_fails(what: str) -> None:
    outcome = execute(KeepsOther(training=HEADS.training, what=what), ORDER, SITE)
    assert isinstance(outcome, ClientFailure) and outcome.stage == "train"
    assert "KeepsOther.keep" in outcome.reason


# ------------------------------------------------------------------------------------------------------ lies
def received(tmp_path: Path, state: Params, payload: Params | None = None) -> Outcome:
    honest = update_of()
    lie = replace(honest, state=state, payload=honest.payload if payload is None else payload)
    mailbox = Mailbox(FolderStore(tmp_path), replace(SITE.rules, algorithm=HEADS), key=lambda order: b"key")
    mailbox.put_outcome(PLAN, lie)
    return mailbox.receive(PLAN, lie.client)


def test_an_honest_state_comes_back_as_it_is_and_has_room(tmp_path: Path) -> None:
    honest = update_of()
    assert_same_outcomes([received(tmp_path, honest.state)], [honest])
    value = packed(honest, ORDER)[1]
    most = payload_bytes(ORDER, header(DECLARED))
    assert value is not None and len(value) <= most
    grown = most - payload_bytes(ORDER)
    assert tensor_bytes(honest.state) < grown < tensor_bytes(honest.state) + 2**12


def test_the_worst_state_is_the_clients_own_affair(tmp_path: Path) -> None:
    worst = {name: torch.full(shape, largest(name)) for name, shape in DECLARED.items()}
    outcome = received(tmp_path, worst)
    assert isinstance(outcome, ClientUpdate)
    assert_same_bits(outcome.state, worst)
    assert_same_bits(outcome.payload, update_of().payload)


STATE = update_of().state
LIES: dict[str, tuple[str, Params]] = {
    "none": ("names", {}),
    "one too few": ("names", {"classifier.bias": STATE["classifier.bias"]}),
    "one too many": ("names", {**STATE, "more": torch.zeros(1)}),
    "another type": ("dtype", {n: t.double() for n, t in STATE.items()}),
    "another shape": ("shape", {**STATE, "classifier.bias": torch.zeros(9)}),
    "no number": ("finite", {**STATE, "classifier.bias": torch.full((4,), math.nan)}),
    "beyond the largest": ("finite", {**STATE, "classifier.bias": torch.full((4,), 1.001e9)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_about_a_state_has_its_code(lie: str, tmp_path: Path) -> None:
    code, state = LIES[lie]
    outcome = received(tmp_path, state)
    assert isinstance(outcome, ClientFailure) and (outcome.stage, outcome.code) == ("validate", code)


# ------------------------------------------------------------------------------------------------------ rounds
def federated(store: Any, stop: int = 3, site: Site = SITE, held: Any = None, **terms: Any) -> bytes:
    settings = RoundsConfig(**{"stop": stop, "evaluate_every": 1000, "commit_every": 1, "norm_bound": None, **terms})
    ledger = ledger_in(store, settings.keep_every, replace(site.rules, algorithm=HEADS), lease=held)
    final = loop.federate(Run(HEADS, site, settings), start_of(HEADS, site), InProcess(site), ledger, Memory())
    return encode(final.params)


def kept(store: Any) -> dict[int, str]:
    checkpoints = Checkpoints(store)
    return named(checkpoints.rest(checkpoints.commits()[-1]))


def states(store: Any) -> set[str]:
    return {key.removeprefix("states/") for key in store.list("states/")}


@pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
def test_a_run_that_is_killed_anywhere_keeps_the_same(
    new_store: Any,
    dying: Any,
    killed: type[BaseException],
    timeless: Callable[[Any], Sequence[Any]],
    keep_updates: bool,
) -> None:
    undisturbed = new_store()
    expected = federated(undisturbed, keep_updates=keep_updates)
    writes = dying(new_store(), 10**6)
    federated(writes, keep_updates=keep_updates)
    total = 10**6 - writes.left
    assert total > 20
    for place in range(0, total, 3 + 2 * keep_updates):
        store = new_store()
        with pytest.raises(killed):
            federated(dying(store, place), keep_updates=keep_updates)
        assert federated(store, keep_updates=keep_updates) == expected, place
        assert timeless(store) == timeless(undisturbed), place
        assert kept(store) == kept(undisturbed), place
        assert states(store) == states(undisturbed), f"killed after {place} writes, files are left, or gone"


def test_state_file_is_written_once_and_deleted_when_unnamed(memory_store: Any) -> None:
    puts: list[str] = []
    put = memory_store.put

    def counting(key: str, value: bytes) -> None:
        if key.startswith("states/"):
            puts.append(key)
        put(key, value)

    memory_store.put = counting
    before: dict[int, str] = {}
    for stop in range(1, 6):
        count = len(puts)
        federated(memory_store, stop)
        now = kept(memory_store)
        changed = {client for client in now if now[client] != before.get(client)}
        asked = {line["client"] for line in Checkpoints(memory_store).rows()[-1].clients}
        assert changed == asked and len(puts) - count == len(asked) == 3, "those that took part, and no other"
        assert states(memory_store) == {*before.values(), *now.values()}, "those of the last two commits"
        before = now
    assert len(before) > 3


def test_the_state_of_an_update_that_is_refused_is_not_kept(memory_store: Any) -> None:
    terms: dict[str, Any] = {"norm_bound": 5.0, "faults": "scale=0.3x1000,corrupt=0.2"}
    before: dict[int, str] = {}
    refused: set[int] = set()
    for stop in range(1, 7):
        federated(memory_store, stop, **terms)
        lines = Checkpoints(memory_store).rows()[-1].clients
        failed = {line["client"] for line in lines if "failure" in line}
        now = kept(memory_store)
        changed = {client for client in now if now[client] != before.get(client)}
        assert changed == {line["client"] for line in lines} - failed
        refused |= failed
        before = now
    assert refused


def test_its_bytes_count_as_traffic(memory_store: Any) -> None:
    federated(memory_store, 4)
    whole, head = 4 * SITE.pool[-1].params, sum(4 * math.prod(shape) for shape in DECLARED.values())
    seen: set[int] = set()
    for row in Checkpoints(memory_store).rows():
        asked = {line["client"] for line in row.clients}
        assert row.metrics["bytes_down"] == len(asked) * whole + len(asked & seen) * head
        assert row.metrics["bytes_up"] == len(asked) * whole, "the head comes as state instead of as weights"
        for line in row.clients:
            moved = 2 * whole + head * (line["client"] in seen)
            expected = simulated_seconds(SITE.fleet[line["client"]], line["macs"], moved).total
            assert line["seconds_simulated"] == expected
        seen |= asked
    assert sum(math.prod(shape) for shape in full_shapes(TinyNet()).values()) * 4 == whole


def test_replaced_coordinator_deletes_nothing_of_its_successor(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with lease.held(store) as first:
        federated(store, 2, held=first)
        assert all(name.startswith("1-") for name in states(store))
    with lease.held(store) as second:
        federated(store, 3, held=second)
        newer = {name for name in states(store) if name.startswith("2-")}
        assert newer and any(name.startswith("1-") for name in kept(store).values()), "what did not change stays"
        old = Ledger(Checkpoints(store, lease=first), RoundMailbox(store))
        store.put("states/2-" + "0" * 64 + ".safetensors", b"under way")
        store.put("states/1-" + "0" * 64 + ".safetensors", b"left over")
        old.states.prune()
        assert newer <= states(store) and "2-" + "0" * 64 + ".safetensors" in states(store)
        assert "1-" + "0" * 64 + ".safetensors" not in states(store)
        assert set(kept(store).values()) <= states(store)
