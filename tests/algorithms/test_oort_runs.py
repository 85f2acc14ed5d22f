"""Oort in a run: levels and times, every algorithm, kills, and how quickly it selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import ClientUpdate, Device, RoundContext, Tables
from fl_engine.exchange.client import execute
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.selection import Oort
from fl_engine.selection.capacity import holds
from fl_engine.selection.oort import Candidates
from fl_engine.selection.oort_state import CLIENT, SECONDS
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import encode
from fl_engine.testing import played
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.tiny import TRAINING, start_of, tiny_site
from tests.harness.oort import POOL, context


def test_each_is_sent_the_largest_model_that_it_can_hold() -> None:
    memory = [20.0, 25.0, 25.1, 49.0, 51.0, 100.0, 110.0]
    fleet = tuple(Device(c, "any", r, 0.0) for c, r in enumerate(memory))
    largest = Oort(model="largest")
    picks = Oort().pick(largest.init(fleet, POOL), context(0, fleet, [5] * 7, POOL), 7, seeds.rng(0, "t"))
    assert picks == [(2, 0), (3, 0), (4, 2), (5, 2), (6, 4)], "M2' and M3' are never sent"
    for client, level in picks:
        assert holds(fleet[client], POOL[level].share)
    assert largest.pick({**largest.init(fleet, POOL)}, context(0, fleet, [5] * 7, POOL), 7, seeds.rng(0, "t")) == [
        (c, 4) for c in range(7)
    ]
    with pytest.raises(ConfigError, match=r"fleet\.tiers"):
        Oort().init(fleet, POOL)


def times(oort: Oort, tables: Tables, now: RoundContext) -> list[float]:
    found: list[float] = Candidates.of(now, oort.known(tables, now.round)[0], "capacity").seconds.tolist()
    return found


def test_the_estimate_is_what_the_simulated_clock_measures(memory_store: Any) -> None:
    for drop_last in (False, True):
        training = Training(fraction=1.0, epochs=2, batch_size=3, lr=0.05, drop_last=drop_last)
        algorithm = FedAvg(training=training, eligible="all", selection=Oort(model="largest"))
        site = tiny_site(algorithm, sizes=[4 + c % 9 for c in range(20)])
        run = Run(algorithm, site, RoundsConfig(stop=1))
        expected = times(Oort(), Oort().init(site.fleet, site.pool), run.context(0, 0.0))
        plan = algorithm.plan(start_of(algorithm, site), run.context(0, 0.0))
        assert len(plan.orders) == 20
        for order in plan.orders:
            outcome = execute(algorithm, order, site)
            assert isinstance(outcome, ClientUpdate)
            if holds(site.fleet[order.client], 1.0):
                took = run.times(outcome, order, 0.0)
                assert took is not None and took.total == pytest.approx(expected[order.client])


class TestFlexFLWithOort(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> FlexFL:
        return FlexFL(training=TRAINING, selection=Oort())


class TestAllLargeWithOort(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> FedAvg:
        return FedAvg(training=TRAINING, eligible="all", selection=Oort(model="largest", preferred=0.5))

    def promises_to_fit(self, algorithm: Any) -> bool:
        return False  # sends all the largest model


def federated(algorithm: Any, store: Any, rounds: int, **terms: Any) -> bytes:
    site = tiny_site(algorithm)
    config = RoundsConfig(stop=rounds, evaluate_every=1000, commit_every=1, keep_updates=True, **terms)
    return encode(played.federated(Run(algorithm, site, config), store)[0].params)


def test_over_provision_is_its_over_commitment(memory_store: Any) -> None:
    """Six of 20 are asked for five updates; the slowest comes too late, and is known afterwards."""
    algorithm = FedAvg(training=TRAINING, eligible="all", selection=Oort(model="largest"))
    federated(algorithm, memory_store, 2, over_provision=1.3)
    (row, _) = Checkpoints(memory_store).rows()
    assert len(row.clients) == 6 and row.metrics["clients_late"] == 1.0
    (late,) = (line for line in row.clients if "failure" in line)
    tables = Checkpoints(memory_store).read(1)[1]["tables"]
    known, _ = algorithm.selection.known(tables, 2)
    (took,) = known[SECONDS, known[CLIENT] == late["client"]]
    assert took == late["seconds_simulated"] == max(line["seconds_simulated"] for line in row.clients)


@pytest.mark.long
def test_a_run_that_is_killed_anywhere_asks_the_same_clients(
    new_store: Any, dying: Any, killed: type[BaseException], timeless: Callable[[Any], Sequence[Any]]
) -> None:
    algorithm = FedAvg(training=TRAINING, eligible="all", selection=Oort(model="largest", pacer_step=1))
    rounds, terms = 5, {"over_provision": 1.3}
    undisturbed = new_store()
    expected = federated(algorithm, undisturbed, rounds, **terms)
    writes = dying(new_store(), 10**6)
    federated(algorithm, writes, rounds, **terms)
    for place in range(0, 10**6 - writes.left, 11):
        store = new_store()
        with pytest.raises(killed):
            federated(algorithm, dying(store, place), rounds, **terms)
        assert federated(algorithm, store, rounds, **terms) == expected
        assert timeless(store) == timeless(undisturbed)
