"""Bytes that are reported are bytes that would travel: 4 for each parameter, or what a codec makes of them, and what
the stored files hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.backends import InProcess
from fl_engine.codecs import Half
from fl_engine.core.contracts import Algorithm
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import Codecs, Device, Outcome, RoundContext, RoundPlan, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore, tensor_bytes
from fl_engine.testing.tiny import SEED, TRAINING, Memory, failure_of, start_of, tiny_fleet, tiny_site, update_of

ALGORITHM = FlexFL(training=replace(TRAINING, epochs=1))


@dataclass
class Remembering:
    """A backend that keeps what it was asked and what it answered; every client named in `failing` fails."""

    inner: InProcess
    plans: list[RoundPlan]
    outcomes: list[Outcome]
    failing: frozenset[int] = frozenset()
    durable: ClassVar[bool] = False

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        self.plans.append(plan)
        orders = {o.client: o for o in plan.orders}
        for outcome in self.inner.run(algorithm, plan):
            if outcome.client in self.failing:
                outcome = failure_of(orders[outcome.client])
            self.outcomes.append(outcome)
            yield outcome


def federate(site: Site, folder: Path, algorithm: Algorithm = ALGORITHM, **changes: Any) -> tuple[Remembering, Ledger]:
    failing = frozenset(changes.pop("failing", ()))
    backend = Remembering(InProcess(site), [], [], failing)
    ledger = ledger_in(FolderStore(folder))
    config = RoundsConfig(stop=3, evaluate_every=3, commit_every=1, **changes)
    state = start_of(algorithm, site)
    rounds.federate(Run(algorithm, site, config), state, backend, ledger, Memory())
    return backend, ledger


def size_of(site: Site, name: str) -> int:
    return next(m.bytes for m in site.pool if m.name == name)


@pytest.mark.parametrize("keep_updates", [False, True], ids=["streamed", "stored"])
def test_a_round_s_bytes_are_the_pool_s(tmp_path: Path, keep_updates: bool) -> None:
    """Down: what was sent. Up: what was trained, which may be less. Waste: AdaptiveFL's 1 - up / down."""
    site = tiny_site(ALGORITHM, fleet=tiny_fleet(sigma=(20.0, 30.0)))
    backend, ledger = federate(site, tmp_path, keep_updates=keep_updates)
    rows = ledger.checkpoints.rows()
    assert [row.round for row in rows] == [0, 1, 2]
    pruned = 0
    for row in rows:
        down = sum(size_of(site, line["sent"]) for line in row.clients)
        up = sum(size_of(site, line["trained"]) for line in row.clients)
        assert row.metrics["bytes_down"] == down
        assert row.metrics["bytes_up"] == up
        assert row.metrics["waste"] == pytest.approx(1 - up / down)
        assert row.metrics["clients_pruned"] == sum(line["sent"] != line["trained"] for line in row.clients)
        assert row.metrics["clients_trained"] == len(row.clients) == 5
        pruned += int(row.metrics["clients_pruned"])
        (plan,) = (p for p in backend.plans if p.round == row.round)
        assert down == sum(tensor_bytes(order.payload) for order in plan.orders)
        assert down == sum(4 * t.numel() for order in plan.orders for t in order.payload.values())
    assert pruned > 0, "in this example some device has to prune"


@pytest.mark.parametrize("keep_updates", [False, True], ids=["streamed", "stored"])
def test_a_failure_costs_its_way_down_only(tmp_path: Path, keep_updates: bool) -> None:
    algorithm = FedAvg(training=replace(TRAINING, fraction=1.0, epochs=1), eligible="all")
    site = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 110.0, 0.0) for c in range(4)))
    _, ledger = federate(site, tmp_path, algorithm, keep_updates=keep_updates, failing=(1, 2))
    whole = 4 * 2324
    for row in ledger.checkpoints.rows():
        assert row.metrics["bytes_down"] == 4 * whole
        assert row.metrics["bytes_up"] == 2 * whole
        assert row.metrics["waste"] == 0.5
        assert (row.metrics["clients_trained"], row.metrics["clients_failed"]) == (2, 2)


def test_all_large_moves_the_full_model_both_ways(tmp_path: Path) -> None:
    """The sheet's check of FlexFL's Table X: rounds x clients x the full model, here 3 x 4 x 2,324 parameters."""
    algorithm = FedAvg(training=replace(TRAINING, fraction=1.0, epochs=1), eligible="all")
    site = tiny_site(algorithm, fleet=tiny_fleet(4))
    _, ledger = federate(site, tmp_path, algorithm)
    for way in ("bytes_down", "bytes_up"):
        assert sum(row.metrics[way] for row in ledger.checkpoints.rows()) == 3 * 4 * 4 * 2324


@dataclass(frozen=True)
class Told(FedAvg):
    """Every client is told what the server computed, as in SCAFFOLD, and from round 2 on something of its own, too."""

    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        plan = super().plan(state, context)
        variate = {name: torch.full_like(t, 1e-3) for name, t in state.params.items() if name.endswith("bias")}
        own = [{f"own/{o.client}": torch.ones(o.client + 1)} if plan.round else {} for o in plan.orders]
        return replace(
            plan, orders=tuple(replace(o, memory={**variate, **m}) for o, m in zip(plan.orders, own, strict=True))
        )


@pytest.mark.parametrize("terms", [{}, {"mode": "buffered", "buffer": 2}], ids=["synchronous", "buffered"])
def test_memory_sent_to_clients_counts_as_traffic(tmp_path: Path, terms: dict[str, Any]) -> None:
    algorithm = Told(training=replace(TRAINING, fraction=1.0, epochs=1), eligible="all")
    site = tiny_site(algorithm, fleet=tiny_fleet(4))
    backend, ledger = federate(site, tmp_path / "run", algorithm, **terms)
    for row, plan in zip(ledger.checkpoints.rows(), backend.plans, strict=True):
        store = FolderStore(tmp_path / f"orders{plan.round}")
        read = Mailbox(store).put_orders(plan)
        values = [store.get(key) for keys in read.values() for key in keys if key.endswith(".safetensors")]
        assert len(values) == 2 * len(plan.orders), "weights and memory"
        assert row.metrics["bytes_down"] == sum(len(value) - header(value) for value in values)
        assert row.metrics["bits_down"] == 8 * row.metrics["bytes_down"]
        if not terms:
            assert row.metrics["model_bytes_down"] == sum(tensor_bytes(order.payload) for order in plan.orders)
            assert row.metrics["waste"] == 0.0, "of the weights alone"


def header(value: bytes) -> int:
    """Bytes of a safetensors file before the first tensor: the header's length, then the header."""
    return 8 + int.from_bytes(value[:8], "little")


@pytest.mark.parametrize("level", range(5))
def test_what_is_stored_encoded_holds_what_is_counted(tmp_path: Path, level: int) -> None:
    """An order of the level, and what comes back: half of 4 bytes a parameter, and whole statistics."""
    site = tiny_site(ALGORITHM, SmallCNN((1, 8, 8), 4, width=0.25, norm="static"))
    pool = coding.sized(site.pool, site.family, Codecs(Half(), Half()))
    model, bare = pool[level], site.pool[level]
    assert bare.bytes / 2 < model.bytes == model.bytes_up < bare.bytes == bare.bytes_up == 4 * model.params
    weights = take(initial_params(site.family, 0), site.layout, model.spec)
    order = WorkOrder(0, 0, model.spec, weights, SEED, level)
    (order,) = coding.sent(RoundPlan(0, (order,)), pool, Codecs(Half(), Half()), SEED).orders
    ledger = ledger_in(FolderStore(tmp_path))
    ledger.mailbox.put_orders(RoundPlan(0, (order,)))
    back = coding.answered(order, model.spec, {n: t + 0.01 for n, t in weights.items()}, site.layout)
    ledger.mailbox.put_outcome(RoundPlan(0, (order,)), replace(update_of(order, model.spec, weights), encoded=back))
    for file in ("orders", "updates"):
        (path,) = (tmp_path / "rounds" / "00000" / file).glob("*.safetensors")
        value = path.read_bytes()
        assert len(value) - header(value) == model.bytes
