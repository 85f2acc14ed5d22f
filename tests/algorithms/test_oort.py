"""Oort: each formula by hand, whom it asks over several rounds, what a lie is worth; levels, times and kills in a
run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core import seeds
from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import (
    FULL,
    Assignment,
    ClientFailure,
    ClientUpdate,
    Device,
    Pool,
    RoundContext,
    Stage,
    Tables,
)
from fl_engine.exchange.client import execute
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.selection import Oort
from fl_engine.selection.capacity import holds
from fl_engine.selection.oort import CLIENT, LAST, NO_CLIENTS, SECONDS, SELECTED, UTILITY, Candidates, Pacer, rms_loss
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import encode
from fl_engine.testing import rounds
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.tiny import SEED, TRAINING, start_of, tiny_site
from tests.harness.made_up import paper_pool

law = settings(max_examples=25)
PACES: dict[str, Any] = {"step": 2, "delta": 5.0}
NO_PACE = Oort(pacer_start=100.0)
"""Nobody is too slow."""


_, POOL = paper_pool()
FULL_ONLY = (POOL[-1],)


def fleet_of(clients: int, speed: Sequence[float] = ()) -> tuple[Device, ...]:
    speeds = speed or (1e9,) * clients
    return tuple(Device(c, "any", 110.0, 0.0, speed=speeds[c]) for c in range(clients))


def context(
    round: int, fleet: tuple[Device, ...], samples: Sequence[int], pool: Pool = FULL_ONLY, **more: Any
) -> RoundContext:
    known: dict[str, Any] = {"available": fleet, "samples": tuple(samples), "draws": tuple(samples), **more}
    return RoundContext(round, SEED, fleet, pool=pool, **known)


def asked(oort: Oort, tables: Tables, now: RoundContext, count: int, draw: int = 0) -> list[int]:
    picks = oort.pick(tables, now, count, seeds.rng(draw, "test", now.round))
    return [client for client, _ in picks]


def answer(
    oort: Oort, tables: Tables, round: int, client: int, utility: float, seconds: float = 1.0, level: int = 0
) -> Tables:
    """One sample, whose loss is the utility."""
    update = ClientUpdate(round, client, FULL, {}, 1, {"rms_loss": utility})
    return oort.learn(tables, Assignment(round, client, FULL, {}, 0, level), update, seconds)


def failure(oort: Oort, tables: Tables, round: int, client: int, stage: Stage, seconds: float = 0.0) -> Tables:
    said = ClientFailure(round, client, stage, "made up", elapsed=seconds)
    return oort.learn(tables, Assignment(round, client, FULL, {}, 0, 0), said, seconds)


def after(oort: Oort, rounds: Sequence[dict[int, float]], clients: int) -> Tables:
    """The tables after rounds with these utilities."""
    tables = oort.init(fleet_of(clients), FULL_ONLY)
    for round, utilities in enumerate(rounds):
        for client, utility in sorted(utilities.items()):
            tables = answer(oort, tables, round, client, utility)
    return tables


def column(oort: Oort, tables: Tables, round: int, which: int) -> dict[int, float]:
    clients, _ = oort.known(tables, round)
    return {int(c): float(v) for c, v in zip(clients[CLIENT], clients[which], strict=True)}


class Client:
    def __init__(self, *losses: float) -> None:
        self.losses = torch.tensor(losses)


def test_a_client_reports_the_root_mean_square_of_its_losses() -> None:
    found: Any = Client(3.0, 4.0)
    assert rms_loss(found) == pytest.approx(math.sqrt(12.5))
    endless: Any = Client(1.0, math.inf)
    assert rms_loss(endless) == LARGEST_LOSS, "as large as anything may be, and clipped like any other"
    nothing: Any = Client(1.0, math.nan)
    assert math.isnan(rms_loss(nothing)), "no value within the declared bounds: the client fails"


def test_the_score_by_hand() -> None:
    """Five clients in round 5. Of U = 10 .. 1000 the floor(4 * 0.9) = third from 0 is the clip, 40; least 9.99."""
    utility, last = np.asarray([10.0, 20, 30, 40, 1000]), np.asarray([1.0, 2, 3, 4, 1])
    expected = [(min(u, 40) - 9.99) / 30.01 + math.sqrt(0.1 * math.log(5) / r) for u, r in zip(utility, last)]  # noqa: B905
    assert Oort().scores(utility, last, 5).tolist() == pytest.approx(expected)
    assert expected[:2] == pytest.approx([0.0003332 + 0.4011781, 0.3335555 + 0.2836757], abs=1e-6)
    assert expected[3] - expected[4] == pytest.approx(math.sqrt(0.1 * math.log(5)) * (1 / 2 - 1)), "clipped alike"


def test_slow_clients_lose_by_the_square_of_their_time() -> None:
    """(T / t)^2 where T < t: 10 s preferred."""
    assert Oort().slow(np.asarray([0.0, 5.0, 10.0, 20.0, 40.0]), 10.0).tolist() == [1, 1, 1, 1 / 4, 1 / 16]
    assert Oort(penalty=0.5).slow(np.asarray([40.0]), 10.0).tolist() == [0.5]
    assert Oort().slow(np.asarray([40.0]), math.inf).tolist() == [1.0]


def paced(percentile: float, brought: Sequence[float], **more: Any) -> list[float]:
    """The percentile before each round."""
    known = dict(enumerate(brought))
    start = Pacer(0, percentile)
    return [start.after(r, known, **{**PACES, **more}).percentile for r in range(len(brought) + 1)]


def test_the_pacer_by_hand() -> None:
    """Every 2 rounds from the fourth on: 10 + 10, then 11 + 11 (10 % more: flat, +5), then 66 + 66 (five times more:
    sharp, -5), then 99 + 99 (half as much again: nothing), then 50 + 50 (half: nothing, where the paper adds 5)."""
    found = paced(30.0, [10, 10, 11, 11, 66, 66, 99, 99, 50, 50])
    assert found == [30, 30, 30, 30, 35, 35, 30, 30, 30, 30, 30]


def test_t_is_a_percentile_of_the_times() -> None:
    seconds = np.asarray([50.0, 10, 40, 20, 30])
    assert [Pacer(0, p).preferred(seconds) for p in (1, 20, 30, 50, 99.9)] == [10, 20, 20, 30, 50]
    assert Pacer(0, 100.0).preferred(seconds) == math.inf


def test_estimated_time_of_an_assignment_by_hand() -> None:
    """Of a device with 10^9 multiply-adds and 10^6 bytes a second: three times the forward pass of each sample that is
    drawn, and the model both ways. What the last order took counts if it was of the same model, and only then."""
    (model,) = FULL_ONLY
    fleet = tuple(replace(d, bandwidth=1e6) for d in fleet_of(2))
    now = context(0, fleet, [70, 30], FULL_ONLY, draws=(20, 40))
    (first, second) = Candidates.of(now, np.asarray(NO_CLIENTS), "largest").seconds
    moved = (model.bytes + model.bytes_up) / 1e6
    assert model.bytes_up == model.bytes
    assert (first, second) == pytest.approx((3 * model.macs * 20 / 1e9 + moved, 3 * model.macs * 40 / 1e9 + moved))
    for level, expected in ((0, 7.5), (1, first)):
        known = np.asarray([[0.0], [1.0], [1.0], [1.0], [7.5], [float(level)]])
        assert Candidates.of(now, known, "largest").seconds.tolist() == pytest.approx([expected, second])


def test_the_round_is_divided_by_epsilon() -> None:
    """20 clients, the first ten asked before; 10 in round 0 and 55: 9 and 3 new ones."""
    oort, fleet = replace(NO_PACE, share_limit=None), fleet_of(20)
    tables = after(oort, [dict.fromkeys(range(10), 1.0)], 20)
    for round, new in ((0, 9), (1, 8), (55, 3)):
        found = asked(oort, tables, context(round, fleet, [5] * 20), 10)
        assert len(found) == 10 and sum(c >= 10 for c in found) == new


def scored(cut_off: float, pool: float, count: int, draws: int = 2000) -> Counter[int]:
    """Who is drawn of scores 0.8, 0.7, 0.6, 0.5, 0.1."""
    oort = Oort(cut_off=cut_off, cut_off_pool=pool)
    scores = np.asarray([0.5, 0.8, 0.1, 0.7, 0.6])
    found: Counter[int] = Counter()
    for draw in range(draws):
        numbers = seeds.rng(draw, "cut off").exponential
        found.update(oort.exploited(scores, count, lambda some: numbers(size=len(some))).tolist())  # noqa: B023
    return found


def test_the_cut_off_by_hand() -> None:
    """Two wanted: the third score, 0.6, is the first not preferred. Times 0.7 that is 0.42: four are drawn from."""
    assert set(scored(0.7, 0, 2)) == {0, 1, 3, 4}
    assert set(scored(0.95, 0, 2)) == {1, 3, 4}
    assert set(scored(0.05, 0, 2)) == {0, 1, 2, 3, 4}
    assert set(scored(1.0, 2.0, 2)) == {0, 1, 3, 4}, "at least twice as many"
    first = scored(0.95, 0, 1)  # of 0.8 and 0.7
    assert first[1] / 2000 == pytest.approx(0.8 / 1.5, abs=0.04) and set(first) == {1, 3}
    assert scored(0.7, 0, 5) == Counter(dict.fromkeys(range(5), 2000))


def test_rest_of_oorts_round_is_drawn_uniformly() -> None:
    """Oort selects half of 4 clients: 8 and 9, whose scores are the largest. In the first round ln R is 0."""
    oort = replace(NO_PACE, preferred=0.5, exploration=0.0, exploration_min=0.0)
    tables = after(oort, [{**dict.fromkeys(range(5), 0.0), 8: 9.0, 9: 9.0}], 10)
    found = Counter[int]()
    for d in range(1500):
        four = asked(oort, tables, context(0, fleet_of(10), [5] * 10), 4, d)
        assert len(set(four)) == 4 and {8, 9} <= set(four)
        found.update(four)
    assert all(found[c] / 1500 == pytest.approx(2 / 8, abs=0.06) for c in range(8))
    nobody = replace(oort, preferred=0.0)
    assert len(asked(nobody, tables, context(0, fleet_of(10), [5] * 10), 4)) == 4


@law
@given(
    clients=st.integers(1, 12), count=st.integers(0, 14), rounds=st.integers(0, 6), seed=st.integers(0, 2**30),
    preferred=st.floats(0, 1), data=st.data(),
)  # fmt: skip
def test_oort_picks_distinct_available_clients_in_order(
    clients: int, count: int, rounds: int, seed: int, preferred: float, data: st.DataObject
) -> None:
    oort = Oort(preferred=preferred, pacer_step=1)
    fleet, samples = fleet_of(clients), data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))
    tables = oort.init(fleet, POOL)
    for round in range(rounds):
        here = tuple(d for d in fleet if data.draw(st.booleans()))
        now = context(round, fleet, samples, POOL, available=here)
        before = json.dumps(tables)
        picks = oort.pick(tables, now, count, np.random.default_rng(seed + round))
        assert oort.pick(tables, now, count, np.random.default_rng(seed + round)) == picks
        assert json.dumps(tables) == before
        found = [client for client, _ in picks]
        assert found == sorted(set(found)) and set(found) <= {d.client for d in here}
        assert len(found) == min(count, len(here))
        for client in found:
            said = data.draw(st.floats(0, 1e6) | st.sampled_from(["drop", "straggle"]))
            if isinstance(said, str):
                tables = failure(oort, tables, round, client, said)  # type: ignore[arg-type]
            else:
                tables = answer(oort, tables, round, client, said, data.draw(st.floats(0, 1e6)))
        stored = json.loads(json.dumps(tables))
        assert oort.known(stored, round + 1)[0].tolist() == oort.known(tables, round + 1)[0].tolist()


def test_largest_lie_is_worth_the_clip() -> None:
    honest, last = np.linspace(1, 20, 20), np.full(21, 3.0)
    with_lie = Oort().scores(np.append(honest, 1e12), last, 10)
    assert with_lie[-1] == with_lie[18] == with_lie.max(), "as much as an ordinary client, no more"
    assert np.all(np.diff(with_lie[:19]) > 0.04), "the others still differ: they are not flattened"
    two = Oort().scores(np.asarray([3.0, 1e12]), np.ones(2), 1)
    assert two[0] == two[1], "also where few are known"


def test_false_loss_is_selected_at_most_twice_as_often_as_average() -> None:
    """Utilities differ by a factor of e^2 between most clients, so without a limit the liar has up to 3 times the
    average."""
    usual, fleet = np.exp(2 * np.random.default_rng(0).standard_normal(50)), fleet_of(50)

    def selections(oort: Oort) -> Counter[int]:
        tables, count = oort.init(fleet, FULL_ONLY), Counter[int]()
        for round in range(100):
            now = asked(oort, tables, context(round, fleet, [1] * 50), 5)
            count.update(now)
            for client in now:
                tables = answer(oort, tables, round, client, LARGEST_LOSS if client == 0 else float(usual[client]))
        return count

    assert selections(NO_PACE)[0] <= 2 * 10 + 1 < selections(replace(NO_PACE, share_limit=None))[0]


def test_results_of_a_round_by_hand() -> None:
    """Clients 0 and 1 are merged with 4 and 8, 2 is a straggler (their mean, 6), and 3 fails (0). All count as
    selected, and only 3 has no time."""
    oort = Oort()
    tables = answer(oort, oort.init(fleet_of(4), FULL_ONLY), 0, 0, 4.0, 2.0)
    tables = answer(oort, tables, 0, 1, 8.0, 3.0)
    tables = failure(oort, failure(oort, tables, 0, 2, "straggle", 9.0), 0, 3, "train")
    assert column(oort, tables, 1, UTILITY) == {0: 4.0, 1: 8.0, 2: 6.0, 3: 0.0}
    assert column(oort, tables, 1, SECONDS) == {0: 2.0, 1: 3.0, 2: 9.0, 3: 0.0}
    assert set(column(oort, tables, 1, SELECTED).values()) == set(column(oort, tables, 1, LAST).values()) == {1.0}


def test_oort_sends_the_largest_model_that_fits() -> None:
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


def test_estimate_equals_the_simulated_time(memory_store: Any) -> None:
    for drop_last in (False, True):
        training = Training(fraction=1.0, epochs=2, batch_size=3, lr=0.05, drop_last=drop_last)
        algorithm = FedAvg(training=training, eligible="all", selection=Oort(model="largest"))
        site = tiny_site(algorithm, sizes=[4 + c % 9 for c in range(20)])
        run = Run(algorithm, site, RoundsConfig(stop=1))
        expected = Candidates.of(run.context(0, 0.0), np.asarray(NO_CLIENTS), "capacity").seconds.tolist()
        plan = algorithm.plan(start_of(algorithm, site), run.context(0, 0.0))
        assert len(plan.assignments) == 20
        for assignment in plan.assignments:
            result = execute(algorithm, assignment, site)
            assert isinstance(result, ClientUpdate)
            if holds(site.fleet[assignment.client], 1.0):
                took = run.times(result, assignment, 0.0)
                assert took is not None and took.total == pytest.approx(expected[assignment.client])


class TestFlexFLWithOort(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> FlexFL:
        return FlexFL(training=TRAINING, selection=Oort())


def federated(algorithm: Any, store: Any, stop: int, **options: Any) -> bytes:
    site = tiny_site(algorithm)
    config = RoundsConfig(stop=stop, evaluate_every=1000, commit_every=1, keep_updates=True, **options)
    return encode(rounds.federated(Run(algorithm, site, config), store)[0].params)


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
def test_killed_run_selects_the_same_clients(killed_at_writes: Any) -> None:
    algorithm = FedAvg(training=TRAINING, eligible="all", selection=Oort(model="largest", pacer_step=1))
    killed_at_writes(lambda store: federated(algorithm, store, 5, over_provision=1.3), 11)
