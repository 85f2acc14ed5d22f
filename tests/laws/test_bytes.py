"""Bytes that are reported are bytes that would travel: 4 for each parameter, or what a codec makes of them, and what
the stored files hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.backends import InProcess
from fl_engine.core.contracts import Algorithm
from fl_engine.core.types import RoundContext, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore, tensor_bytes
from fl_engine.testing.tiny import TRAINING, Memory, start_of, tiny_fleet, tiny_site
from tests.harness.jobs import Through

ALGORITHM = FlexFL(training=replace(TRAINING, epochs=1))


def federate(
    site: Site, folder: Path, algorithm: Algorithm = ALGORITHM, **changes: Any
) -> tuple[list[RoundPlan], Ledger]:
    """Run three rounds, and return their plans and the ledger."""
    plans: list[RoundPlan] = []
    backend = Through(InProcess(site), lambda plan, found: plans.append(plan) or found)  # type: ignore[func-returns-value]
    ledger = Ledger(FolderStore(folder))
    config = RoundsConfig(stop=3, evaluate_every=3, commit_every=1, **changes)
    rounds.federate(Run(algorithm, site, config), start_of(algorithm, site), backend, ledger, Memory())
    return plans, ledger


def size_of(site: Site, name: str) -> int:
    return next(m.bytes for m in site.pool if m.name == name)


@pytest.mark.parametrize("keep_updates", [False, True], ids=["streamed", "stored"])
def test_a_round_s_bytes_are_the_pool_s(tmp_path: Path, keep_updates: bool) -> None:
    """Down: what was sent. Up: what was trained, which may be less. Waste: AdaptiveFL's 1 - up / down."""
    site = tiny_site(ALGORITHM, fleet=tiny_fleet(sigma=(20.0, 30.0)))
    plans, ledger = federate(site, tmp_path, keep_updates=keep_updates)
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
        (plan,) = (p for p in plans if p.round == row.round)
        assert down == sum(tensor_bytes(assignment.payload) for assignment in plan.assignments)
        assert down == sum(4 * t.numel() for assignment in plan.assignments for t in assignment.payload.values())
    assert pruned > 0, "in this example some device has to prune"


@dataclass(frozen=True)
class Told(FedAvg):
    """Every client is told what the server computed, as in SCAFFOLD, and from round 2 on something of its own, too."""

    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        plan = super().plan(state, context)
        variate = {name: torch.full_like(t, 1e-3) for name, t in state.params.items() if name.endswith("bias")}
        own = [{f"own/{o.client}": torch.ones(o.client + 1)} if plan.round else {} for o in plan.assignments]
        return replace(
            plan,
            assignments=tuple(replace(o, memory={**variate, **m}) for o, m in zip(plan.assignments, own, strict=True)),
        )


@pytest.mark.parametrize("options", [{}, {"mode": "buffered", "buffer": 2}], ids=["synchronous", "buffered"])
def test_memory_sent_to_clients_counts_as_traffic(tmp_path: Path, options: dict[str, Any]) -> None:
    algorithm = Told(training=replace(TRAINING, fraction=1.0, epochs=1), eligible="all")
    site = tiny_site(algorithm, fleet=tiny_fleet(4))
    plans, ledger = federate(site, tmp_path / "run", algorithm, **options)
    for row, plan in zip(ledger.checkpoints.rows(), plans, strict=True):
        store = FolderStore(tmp_path / f"orders{plan.round}")
        read = Mailbox(store).put_assignments(plan)
        values = [store.get(key) for keys in read.values() for key in keys if key.endswith(".safetensors")]
        assert len(values) == 2 * len(plan.assignments), "weights and memory"
        assert row.metrics["bytes_down"] == sum(len(value) - header(value) for value in values)
        assert row.metrics["bits_down"] == 8 * row.metrics["bytes_down"]
        if not options:
            assert row.metrics["model_bytes_down"] == sum(
                tensor_bytes(assignment.payload) for assignment in plan.assignments
            )
            assert row.metrics["waste"] == 0.0, "of the weights alone"


def header(value: bytes) -> int:
    """Bytes of a safetensors file before the first tensor: the header's length, then the header."""
    return 8 + int.from_bytes(value[:8], "little")
