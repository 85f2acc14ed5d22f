"""What clients keep: who may declare what, what a lie about it is worth, and that no kill and no backend changes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import FedAvg, FedPer
from fl_engine.backends import InProcess
from fl_engine.core.clients import header, kept_by_clients, with_prefix
from fl_engine.core.contracts import ClientContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import full_shapes
from fl_engine.core.types import Assignment, ClientFailure, ClientResult, ClientUpdate, Params
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import pack_result
from fl_engine.exchange.updates import payload_bytes
from fl_engine.fleet.devices import simulated_seconds
from fl_engine.rounds import loop
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage import run_lock
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore, encode, tensor_bytes
from fl_engine.storage.tensor_files import named
from fl_engine.testing.tiny import (
    TRAINING,
    Memory,
    TinyNet,
    assert_same_bits,
    assert_same_results,
    first_plan,
    start_of,
    tiny_fleet,
    tiny_site,
)

HEADS = FedPer(training=replace(TRAINING, fraction=0.5, epochs=1))
SITE = tiny_site(HEADS, fleet=tiny_fleet(6))
PLAN = first_plan(HEADS, SITE)
ASSIGNMENT = PLAN.assignments[0]
DECLARED = kept_by_clients(HEADS, SITE.family, SITE.pool)


def update_of(assignment: Assignment = ASSIGNMENT, algorithm: Any = HEADS) -> ClientUpdate:
    result = execute(algorithm, assignment, SITE)
    assert isinstance(result, ClientUpdate), result
    return result


def test_private_aggregation_refuses_it() -> None:
    with pytest.raises(ConfigError, match="FedPer"):
        start_of(replace(HEADS, aggregation=Private()), SITE)


def test_head_continues_and_is_not_sent_as_weights() -> None:
    first = update_of()
    assert first.state.keys() == DECLARED.keys() == {"classifier.weight", "classifier.bias"}
    assert first.payload.keys() == ASSIGNMENT.payload.keys() - DECLARED.keys()
    bare = update_of(algorithm=FedAvg(training=HEADS.training, eligible="all"))
    assert_same_bits({**first.payload, **first.state}, bare.payload)  # the first time it starts from the global head
    again = update_of(replace(ASSIGNMENT, memory=with_prefix(first.state)))
    own = replace(ASSIGNMENT, payload={**ASSIGNMENT.payload, **first.state})
    assert_same_bits({**again.payload, **again.state}, update_of(own, FedAvg(HEADS.training, eligible="all")).payload)


@dataclass(frozen=True)
class KeepsOther(FedPer):
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
def test_undeclared_client_state_fails_the_client(what: str) -> None:
    result = execute(KeepsOther(training=HEADS.training, what=what), ASSIGNMENT, SITE)
    assert isinstance(result, ClientFailure) and result.stage == "train"
    assert "KeepsOther.keep" in result.reason


def received(tmp_path: Path, state: Params, payload: Params | None = None) -> ClientResult:
    honest = update_of()
    lie = replace(honest, state=state, payload=honest.payload if payload is None else payload)
    mailbox = Mailbox(FolderStore(tmp_path), replace(SITE.rules, algorithm=HEADS), key=lambda assignment: b"key")
    mailbox.put_result(PLAN, lie)
    return mailbox.receive(PLAN, lie.client)


def test_honest_state_is_returned_unchanged(tmp_path: Path) -> None:
    honest = update_of()
    assert_same_results([received(tmp_path, honest.state)], [honest])
    value = pack_result(honest, ASSIGNMENT)[1]
    most = payload_bytes(ASSIGNMENT, header(DECLARED))
    assert value is not None and len(value) <= most
    grown = most - payload_bytes(ASSIGNMENT)
    assert tensor_bytes(honest.state) < grown < tensor_bytes(honest.state) + 2**12


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
    result = received(tmp_path, state)
    assert isinstance(result, ClientFailure) and (result.stage, result.code) == ("validate", code)


def federated(store: Any, stop: int = 3, site: Site = SITE, held: Any = None, **options: Any) -> bytes:
    settings = RoundsConfig(**{"stop": stop, "evaluate_every": 1000, "commit_every": 1, "norm_bound": None, **options})
    ledger = Ledger(store, settings.keep_every, replace(site.rules, algorithm=HEADS), lock=held)
    final = loop.federate(Run(HEADS, site, settings), start_of(HEADS, site), InProcess(site), ledger, Memory())
    return encode(final.params)


def kept(store: Any) -> dict[int, str]:
    checkpoints = Checkpoints(store)
    return named(checkpoints.rest(checkpoints.commits()[-1]))


def states(store: Any) -> set[str]:
    return {key.removeprefix("states/") for key in store.list("states/")}


@pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
def test_killed_run_stores_the_same_client_states(killed_at_writes: Any, keep_updates: bool) -> None:
    killed_at_writes(
        lambda store: federated(store, keep_updates=keep_updates),
        3 + 2 * keep_updates,
        also=lambda store: (kept(store), states(store)),
    )


def test_state_of_a_refused_update_is_dropped(memory_store: Any) -> None:
    options: dict[str, Any] = {"norm_bound": 5.0, "faults": "scale=0.3x1000,corrupt=0.2"}
    before: dict[int, str] = {}
    refused: set[int] = set()
    for stop in range(1, 7):
        federated(memory_store, stop, **options)
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
    with run_lock.hold(store) as first:
        federated(store, 2, held=first)
        assert all(name.startswith("1-") for name in states(store))
    with run_lock.hold(store) as second:
        federated(store, 3, held=second)
        newer = {name for name in states(store) if name.startswith("2-")}
        assert newer and any(name.startswith("1-") for name in kept(store).values()), "what did not change stays"
        old = Ledger(store, lock=first)
        store.put("states/2-" + "0" * 64 + ".safetensors", b"under way")
        store.put("states/1-" + "0" * 64 + ".safetensors", b"left over")
        old.states.prune()
        assert newer <= states(store) and "2-" + "0" * 64 + ".safetensors" in states(store)
        assert "1-" + "0" * 64 + ".safetensors" not in states(store)
        assert set(kept(store).values()) <= states(store)
