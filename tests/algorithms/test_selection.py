"""Who takes part, and with which model: FlexFL's resource table, and All-Large."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_engine.core import seeds
from fl_engine.core.contracts import Selector
from fl_engine.core.errors import ConfigError
from fl_engine.core.submodels import FULL
from fl_engine.core.types import Assignment, ClientUpdate, Device, RoundContext
from fl_engine.selection import SELECTIONS, ByCapacity, Curiosity, Oort, ResourceTable, Uniform
from fl_engine.selection.capacity import round_size, tiers
from fl_engine.testing.rounds import check_silent
from fl_engine.testing.tiny import SEED
from tests.harness.made_up import paper_pool, picked
from tests.harness.plugins import LargestUtility


def devices(**tiers: int) -> tuple[Device, ...]:
    memory = {"weak": 35.0, "medium": 60.0, "strong": 110.0}
    kinds = [kind for kind, count in tiers.items() for _ in range(count)]
    return tuple(Device(c, kind, memory[kind], 8.0) for c, kind in enumerate(kinds))


def draw(fleet: tuple[Device, ...], k: int, rounds: int) -> list[list[tuple[int, str]]]:
    _, pool = paper_pool()
    selection = ResourceTable()
    tables = selection.init(fleet, pool)
    found = [picked(selection, tables, fleet, pool, seeds.rng(1, "test", r), k) for r in range(rounds)]
    return [[(client, pool[level].name) for client, level in picks] for picks in found]


def test_levels_are_drawn_uniformly_from_25_50_and_100() -> None:
    """Table I's fleet of 100, ten a round: no class runs out, so each level comes a third of the time."""
    rounds = draw(devices(weak=40, medium=30, strong=30), 10, 300)
    levels = Counter(level for picks in rounds for _, level in picks)
    assert set(levels) == {"M1", "M2", "M3"}, "M2' and M3' are never sent"
    for count in levels.values():
        assert count / 3000 == pytest.approx(1 / 3, abs=0.04)
    clients = Counter(client for picks in rounds for client, _ in picks)
    assert len(clients) == 100


def test_a_capacity_equal_to_the_size_is_too_little() -> None:
    """r <= size is insufficient: a device of exactly 50 % is sent M1."""
    _, pool = paper_pool()
    fleet = tuple(Device(c, "half", 50.0, 0.0) for c in range(6))
    picks = [picked(ResourceTable(), {}, fleet, pool, seeds.rng(0, "t", r), 3) for r in range(40)]
    assert {level for each in picks for _, level in each} == {0}


def fleet_of(*kinds: tuple[str, float]) -> tuple[Device, ...]:
    return tuple(Device(client, tier, most, 0.0) for client, (tier, most) in enumerate(kinds))


MIXED = fleet_of(*[("mote", 25.0)] * 3, *[("watch", 10.0)] * 2, *[("phone", 60.0)] * 5)
"""Motes and watches cannot hold M1, which takes 25 % and more; M2 takes 50 %, M3 100 %; M2' and M3' are not sent."""
BY_CAPACITY = [ResourceTable(), ByCapacity(), Oort()]


@pytest.mark.parametrize("selection", BY_CAPACITY, ids=lambda s: s.name)
def test_selection_refuses_tiers_that_would_never_train(selection: Any) -> None:
    _, pool = paper_pool()
    with pytest.raises(ConfigError) as error:
        selection.init(MIXED, pool)
    assert error.value.path == "fleet.tiers"
    with pytest.raises(ConfigError):
        selection.init(fleet_of(("mote", 25.0)), pool)


def test_uniform_asks_all_and_by_capacity_those_that_hold_one() -> None:
    _, pool = paper_pool()

    def asked(selection: Any, pool: Any) -> set[tuple[int, str]]:
        picks = picked(selection, {}, MIXED, pool, np.random.default_rng(0), len(MIXED))
        return {(client, pool[level].name) for client, level in picks}

    strong = {(client, "M2") for client in range(5, 10)}
    assert asked(ByCapacity(), pool) == strong
    assert asked(Uniform(), pool) == strong | {(client, "M1") for client in range(5)}
    assert asked(Uniform(), pool[-1:]) == {(client, "M3") for client in range(10)}, "the full model alone"


@pytest.mark.parametrize(
    ("fraction", "clients", "k"),
    [(0.1, 100, 10), (0.1, 5, 1), (0.1, 19, 1), (0.3, 10, 3), (0.29, 100, 29), (1.0, 7, 7), (0.5, 5, 2), (0.999, 9, 8)],
)
def test_round_size_is_max_1_fraction_times_clients(fraction: float, clients: int, k: int) -> None:
    assert round_size(fraction, clients) == k


_, PAPER_POOL = paper_pool()
EACH: list[Selector] = [
    *(Uniform(model=model) for model in ("capacity", "random", "largest")),
    ByCapacity(),
    ResourceTable(),
    *(Curiosity(score=score, per_type=p) for score in ("cs", "c", "s") for p in (1, 2)),
    *(Oort(model=model) for model in ("capacity", "largest")),
    Oort(cut_off=0.7, cut_off_pool=0.0, exploration_min=0.2, clip=0.98),
    LargestUtility(),
]


KEYED = [
    *(Uniform(model=model, draws="keyed") for model in ("capacity", "random", "largest")),
    *(kind(draws="keyed") for kind in (ByCapacity, ResourceTable, Curiosity, Oort)),
]


@pytest.mark.parametrize("selector", KEYED, ids=str)
def test_keyed_draw_without_a_client_replaces_only_this_client(selector: Any) -> None:
    fleet = devices(weak=16, medium=12, strong=12)
    tables = selector.init(fleet, PAPER_POOL)
    whole = RoundContext(3, SEED, fleet, fleet, PAPER_POOL)
    for draw in range(20):
        gone = draw % len(fleet)
        before = dict(selector.pick(tables, whole, 8, seeds.rng(draw, "t")))
        rest = replace(whole, available=tuple(d for d in fleet if d.client != gone))
        after = dict(selector.pick(tables, rest, 8, seeds.rng(draw, "t")))
        assert len(after) == 8
        assert before.keys() - {gone} <= after.keys()
        assert gone in before or after == before


def test_keyed_oort_does_not_change_its_draws_if_an_unselected_known_client_is_missing() -> None:
    """Two of three known clients are drawn. Without the third, both others are selected without a draw."""
    oort = Oort(draws="keyed", share_limit=None, exploration=0.7, exploration_decay=1.0)
    fleet = devices(weak=4, medium=4, strong=4)
    tables = oort.init(fleet, PAPER_POOL)
    for client in range(3):
        update = ClientUpdate(0, client, FULL, {}, 5, {"rms_loss": 1.0})
        tables = oort.learn(tables, Assignment(0, client, FULL, {}, 0, 0), update, 1.0)
    whole = RoundContext(1, SEED, fleet, fleet, PAPER_POOL)
    for draw in range(20):
        before = oort.pick(tables, whole, 6, seeds.rng(draw, "t"))
        (gone,) = set(range(3)) - {client for client, _ in before}
        rest = replace(whole, available=tuple(device for device in fleet if device.client != gone))
        assert oort.pick(tables, rest, 6, seeds.rng(draw, "t")) == before


@pytest.mark.parametrize("selector", KEYED[2:], ids=str)
def test_keyed_draws_have_the_distribution_of_draws_by_position(selector: Any) -> None:
    fleet = devices(weak=0, medium=6, strong=6)
    tables = selector.init(fleet, PAPER_POOL)
    rates = []
    for each in (selector, replace(selector, draws="position")):
        draws = [picked(each, tables, fleet, PAPER_POOL, seeds.rng(draw, "t"), 4) for draw in range(2000)]
        counts = Counter(client for picks in draws for client, _ in picks)
        rates.append([counts[device.client] / 2000 for device in fleet])
    assert rates[0] == pytest.approx(rates[1], abs=0.05)


@pytest.mark.parametrize("selector", EACH, ids=str)
def test_silent_client_is_not_selected_more_often(selector: Selector) -> None:
    check_silent(selector, PAPER_POOL)


def test_every_registered_selection_is_held_to_this() -> None:
    assert set(SELECTIONS.values()) <= {type(each) for each in EACH}


def test_tiers_by_hand() -> None:
    """P of 0, 1/2, 1/4, 1 and S of 1, 0, 1/2, 0: T with mu = 2 is 1, 1, 1, 2, with 0.5 it is 1, 1/4, 5/8, 1/2, with 0
    it is S."""
    speed, bandwidth = [10.0, 30.0, 20.0, 50.0], [9.0, 1.0, 5.0, 1.0]
    assert tiers(speed, bandwidth, 4, mu=2.0) == [0, 1, 2, 3], "equal ones in the order of their numbers"
    assert tiers(speed, bandwidth, 4, mu=0.5) == [3, 0, 2, 1]
    assert tiers(speed, bandwidth, 4, mu=0.0) == [3, 0, 2, 1]
    assert tiers(speed, bandwidth, 4, mu=1e6) == [0, 2, 1, 3], "the speed alone"
    assert tiers(speed, bandwidth, 2, mu=0.5) == [1, 0, 1, 0]
