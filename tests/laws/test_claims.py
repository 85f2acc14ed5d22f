"""What an update claims beside weights: running statistics that cannot be, and how many samples a device has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any, ClassVar

import pytest
import torch

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.backends import InProcess
from fl_engine.core.contracts import Algorithm
from fl_engine.core.costs import macs, steps
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan, TaskContext
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of, packed, signed
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds.answers import Answers
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore, MemoryStore
from fl_engine.testing.played import federated
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, start_of, tiny_site

ALGORITHM = FlexFL(training=TRAINING)
STATIC = SmallCNN((1, 8, 8), 4, width=0.25, norm="static")
STATIC_SITE = tiny_site(ALGORITHM, STATIC)
STATIC_PLAN = ALGORITHM.plan(start_of(ALGORITHM, STATIC_SITE), context_of(STATIC_SITE, 0, SEED))


def with_statistics(kind: str, value: float) -> ClientFailure | ClientUpdate:
    """An update one of whose running statistics is this."""
    order = STATIC_PLAN.orders[0]
    honest = execute(ALGORITHM, order, STATIC_SITE)
    assert isinstance(honest, ClientUpdate)
    name = next(name for name in honest.payload if name.endswith(kind))
    changed = honest.payload[name].clone()
    changed[0] = value
    payload = {**honest.payload, name: changed}
    ledger = Mailbox(MemoryStore({}), rules=replace(STATIC_SITE.rules, algorithm=ALGORITHM))
    ledger.put_outcome(STATIC_PLAN, replace(honest, payload=payload))
    found = ledger.receive(STATIC_PLAN, order.client)
    assert isinstance(found, ClientUpdate | ClientFailure)
    return found


@pytest.mark.parametrize(
    ("kind", "value", "code"),
    [
        ("running_var", -1e-3, "statistics"),
        ("running_var", 3e38, "finite"),
        ("running_mean", 3e38, "finite"),
        ("running_mean", -3e38, "finite"),
        ("running_var", float("nan"), "finite"),
    ],
)
def test_statistics_that_cannot_be_are_refused(kind: str, value: float, code: str) -> None:
    found = with_statistics(kind, value)
    assert isinstance(found, ClientFailure) and found.reason.partition(":")[0] == code


@pytest.mark.parametrize(("kind", "value"), [("running_mean", -5.0), ("running_var", 0.0), ("running_var", 5.0)])
def test_statistics_that_can_be_are_taken(kind: str, value: float) -> None:
    assert isinstance(with_statistics(kind, value), ClientUpdate)


def test_claimed_samples_of_a_device_are_bounded() -> None:
    """With partition.rule=local: 19 clients of 8 samples that stay where they are, and one that claims partition.most,
    and the steps and multiply-adds of so many, and moves by 1. So the mean moves by the liar's weight."""
    most = 100_000
    algorithm = FedAvg(training=replace(TRAINING, fraction=1.0))
    known = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 120.0, 0.0) for c in range(20)))
    state = start_of(algorithm, known)
    plan, liar = algorithm.plan(state, context_of(known, 0, SEED)), 0
    box = Mailbox(
        MemoryStore({}), replace(replace(known, most=most).rules, algorithm=algorithm), key_of(b"a run's own")
    )
    assert box.key is not None
    order = plan.order_of[liar]
    honest = execute(algorithm, order, known)
    assert isinstance(honest, ClientUpdate)
    task = algorithm.task(order, TaskContext(known.layout, known.pool, known.fleet[liar], honest.metrics["free"]))

    def claims(samples: int, counted: int) -> Outcome:
        """What the coordinator makes of so many samples, with the steps of as many as are `counted`."""
        made = {"steps": float(steps(task, counted)), "macs": macs(known.family, task, counted)}
        payload = {name: order.payload[name] + 1.0 for name in honest.payload}
        lie = replace(honest, num_examples=samples, payload=payload, metrics={**honest.metrics, **made})
        manifest, value = packed(lie, order)
        assert value is not None
        box.store.put(f"rounds/00000/updates/{liar}.safetensors", bytes(value))
        box.store.put(f"rounds/00000/updates/{liar}.json", signed(manifest, box.key(order)).model_dump_json().encode())
        return box.receive(plan, liar)

    for samples, counted, code in ((most + 1, most + 1, "examples"), (most, 8, "metrics"), (8, most, "metrics")):
        refused = claims(samples, counted)
        assert isinstance(refused, ClientFailure) and refused.code == code
    answers = Answers()
    answers.add(claims(most, most))
    for other in plan.orders[1:]:
        answers.add(ClientUpdate(0, other.client, honest.spec, {n: other.payload[n] for n in honest.payload}, 8, {}))
    merged = algorithm.merge(state, plan, answers, ServerSite(known))
    weights = torch.cat([(merged.params[n] - state.params[n]).flatten() for n in honest.payload])
    assert len(plan.orders) == 20 and weights.mean().item() == pytest.approx(most / (most + 19 * 8), abs=1e-4)
    assert f"{weights.mean().item():.2%}" == "99.85%", "docs/guides/partitions.md says so"
    for bound, share in ((10.0, "34.48%"), (3.0, "13.64%")):  # 80 / (80 + 19 * 8), 24 / (24 + 19 * 8)
        limited = Answers()
        for answer in answers:
            limited.add(answer)
        limited.limit(bound)
        merged = algorithm.merge(state, plan, limited, ServerSite(known))
        weights = torch.cat([(merged.params[n] - state.params[n]).flatten() for n in honest.payload])
        assert f"{weights.mean().item():.2%}" == share and limited.said == {liar: most}


@dataclass(frozen=True)
class Claiming:
    """A backend in which client 0 says that it holds 100,000 samples."""

    inner: InProcess
    durable: ClassVar[bool] = False

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        for outcome in self.inner.run(algorithm, plan):
            assert isinstance(outcome, ClientUpdate)
            yield replace(outcome, num_examples=100_000) if outcome.client == 0 else outcome


@pytest.mark.parametrize("more", [{}, {"mode": "buffered", "buffer": 2}], ids=["synchronous", "buffered"])
@pytest.mark.parametrize("bound", [None, 1e9, 4.0])
def test_a_claim_counts_for_a_multiple_of_the_round_s_median(
    tmp_path: Path, bound: float | None, more: dict[str, Any]
) -> None:
    algorithm = FedAvg(training=replace(TRAINING, fraction=1.0, epochs=1))
    site = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 120.0, 0.0) for c in range(4)))
    terms = RoundsConfig(stop=3, commit_every=1, keep_updates=True, norm_bound=None, samples_bound=bound, **more)
    run, backend = Run(algorithm, site, terms), Claiming(InProcess(site))
    final, rows = federated(run, FolderStore(tmp_path / "whole"), backend)
    lines = [line for row in rows for line in row.clients if line["client"] == 0]
    assert lines and all(line["examples"] == 100_000 for line in lines)
    for row in rows:
        others = {line["client"]: line["examples"] for line in row.clients if line["client"] != 0}
        limited = bound == 4.0 and len(others) < len(row.clients)
        assert row.metrics.get("clients_limited", 0.0) == limited
        if limited:
            (own,) = (line for line in row.clients if line["client"] == 0)
            assert own["counted"] == 4 * median_low(others.values())
    if bound == 1e9:
        free = replace(run, terms=terms.model_copy(update={"samples_bound": None}))
        assert_same_bits(final.params, federated(free, FolderStore(tmp_path / "free"), backend)[0].params)
