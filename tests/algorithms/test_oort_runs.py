"""Oort in a run: levels and times, every algorithm, kills, and how quickly it selects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_engine.algorithms import ALGORITHMS, FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core import seeds
from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.errors import ConfigError
from fl_engine.core.state import pack, unpack
from fl_engine.core.types import (
    ClientUpdate,
    Device,
    RoundContext,
    Tables,
)
from fl_engine.exchange.client import execute
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.selection import Oort
from fl_engine.selection.capacity import holds
from fl_engine.selection.oort import Candidates
from fl_engine.selection.oort_state import CLIENT, SECONDS
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import decode, encode
from fl_engine.testing import played
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.tiny import TRAINING, context_of, on_devices_alone, start_of, tiny_site
from tests.harness.oort import POOL, after, answer, asked, context, fleet_of


# ---------------------------------------------------------------------------------------------- models and time
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


def test_a_time_is_estimated_for_the_model_that_is_sent_until_it_is_measured() -> None:
    """Three forward passes of each sample at the device's speed, four bytes of each parameter there and back. What
    another model took says nothing."""
    fleet = (Device(0, "weak", 30.0, 0.0, None, 50.0, 10.0), Device(1, "strong", 110.0, 0.0, None, 200.0, 40.0))
    now = context(1, fleet, [10, 20], POOL, draws=(20, 40))
    tables = Oort().init(fleet, POOL)
    assert times(Oort(), tables, now) == pytest.approx([3 * 25 * 20 / 50 + 200 / 10, 3 * 100 * 40 / 200 + 800 / 40])
    assert times(Oort(), answer(Oort(), tables, 0, 1, 1.0, seconds=7.5, level=0), now) == pytest.approx([50.0, 80.0])
    tables = answer(Oort(), tables, 0, 1, 1.0, seconds=7.5, level=4)
    assert times(Oort(), tables, now) == pytest.approx([50.0, 7.5])
    faster = replace(now, available=(replace(fleet[0], speed=100.0), fleet[1]))
    assert times(Oort(), tables, faster) == pytest.approx([35.0, 7.5]), "what a device can do now"


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


# -------------------------------------------------------------------------------------------------------- in a run
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


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_takes_it(name: str, memory_store: Any) -> None:
    algorithm = on_devices_alone(ALGORITHMS[name](training=TRAINING, selection=Oort(pacer_step=1)))  # type: ignore[call-arg]
    federated(algorithm, memory_store, 3)
    rows = Checkpoints(memory_store).rows()
    site = tiny_site(algorithm)
    sizes = {model.name: model.share for model in site.pool}
    for row in rows:
        assert row.clients
        for line in row.clients:
            assert holds(site.fleet[line["client"]], sizes[line["sent"]])
            assert "failure" in line or 0 < line["rms_loss"] < LARGEST_LOSS
    assert len({line["client"] for row in rows for line in row.clients}) > len(rows[0].clients)


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


def test_what_is_learned_survives_being_stored_and_decides_who_is_asked() -> None:
    algorithm = FedAvg(training=TRAINING, eligible="all", selection=Oort(model="largest"))
    site = tiny_site(algorithm)
    state = fresh = start_of(algorithm, site)
    for round in range(4):
        plan = algorithm.plan(state, context_of(site, round))
        state = algorithm.merge(state, plan, [execute(algorithm, o, site) for o in plan.orders], ServerSite(site))
        tensors, rest = pack(state)
        found = unpack(fresh, decode(encode(tensors), "state"), json.loads(json.dumps(rest)))
        assert found.tables == state.tables
        again, plan = (algorithm.plan(s, context_of(site, round + 1)) for s in (found, state))
        assert [o.client for o in again.orders] == [o.client for o in plan.orders]
    unlearned = algorithm.plan(fresh, context_of(site, 4))
    assert [o.client for o in unlearned.orders] != [o.client for o in plan.orders]


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


def test_oort_of_many_clients_keeps_a_compact_state() -> None:
    """A commit holds it."""
    clients, oort, rng = 2800, Oort(), np.random.default_rng(0)
    fleet, samples = fleet_of(clients, rng.lognormal(22, 1, clients).tolist()), [10] * clients
    tables = after(oort, [{}], 1)
    tables = {**tables, "heard": tuple((0.0, float(c), float(rng.random()), 1.0, 0.0) for c in range(clients // 2))}
    for round in range(1, 6):
        for client in asked(oort, tables, context(round, fleet, samples), 100, round):
            tables = answer(oort, tables, round, client, 1.0)
    assert len(json.dumps(tables)) < 60 * clients
