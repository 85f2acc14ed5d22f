"""Multi-branch networks: where the exits sit, what their heads cost, who trains which branch, and what is merged."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fl_engine.algorithms import MultiBranch
from fl_engine.algorithms.multibranch import exits_at, in_tiers
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ClientError
from fl_engine.core.types import Device, Pick, Pool, RoundContext, TaskContext
from fl_engine.models.resnet import ResNet34
from fl_engine.testing.tiny import SEED, TRAINING, first_plan, tiny_site
from tests.harness.made_up import paper_pool
from tests.harness.networks import SMALL

BLOCKS = tuple(str(i) for i in range(1, 17))
PAPER = (64, 128, 256, 512)


def pool_of(family: ModelFamily, **options: Any) -> tuple[Any, Pool]:
    algorithm = MultiBranch(**options)
    network = algorithm.network(family)
    return network, algorithm.pool(network, {}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "places"),
    [
        ("equidistant:9", "2 3 5 6 8 10 11 13 14"),
        ("equidistant:3", "4 8 12"),
        ("equidistant:99", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
        ("every:2", "2 4 6 8 10 12 14"),
        ("every:7", "7 14"),
        (("3", "16"), "3 16"),
    ],
)
def test_where_exits_sit_among_sixteen_blocks(rule: Any, places: str) -> None:
    assert " ".join(exits_at(BLOCKS, rule)) == places


COSTS = {
    PAPER: (
        (224_458, 298_442, 1_046_090, 1_193_802, 2_852_170, 5_213_514, 5_803_850, 8_165_194, 11_840_842, 21_282_122),
        (230.10, 306.12, 440.73, 478.61, 613.22, 764.48, 802.29, 953.55, 1012.37, 1163.50),
    ),
    (96, 128, 256, 512): (
        (480_330, 646_602, 1_342_602, 1_490_314, 3_148_682, 5_510_026, 6_100_362, 8_461_706, 12_137_354, 21_578_634),
        (492.37, 663.03, 713.49, 751.37, 885.98, 1037.24, 1075.06, 1226.31, 1285.13, 1436.26),
    ),
}


@pytest.mark.parametrize("channels", COSTS)
def test_the_ten_branches_of_mb_resnet34(channels: Any) -> None:
    network, pool = pool_of(ResNet34((3, 32, 32), 10, channels=channels))
    stages = [(s, b) for s, depth in enumerate((3, 4, 6, 3), 1) for b in range(depth)]
    assert network.exits == tuple("stage{}.{}".format(*stages[n - 1]) for n in (2, 3, 5, 6, 8, 10, 11, 13, 14))
    assert [dict(network.exit_convs).get(block, 0) for block in network.exits] == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    params, macs = COSTS[channels]
    assert tuple(m.params for m in pool) == params
    assert tuple(round(m.macs / 1e6, 2) for m in pool) == macs
    assert all(a.params < b.params and a.macs < b.macs for a, b in pairwise(pool))
    assert [m.name for m in pool] == [f"branch{i}" for i in range(1, 11)]
    assert all(m.reported and m.dispatched for m in pool)


def test_the_last_branch_is_the_network_without_early_exits() -> None:
    family = ResNet34((3, 9, 9), 5, width=0.1)
    network, pool = pool_of(family)
    assert pool[-1].params == count_params(family) < count_params(network)


@pytest.mark.parametrize("name", ["vgg16", "preresnet18", "mobilenetv2", "widar_resnet18", "aep_mlp"])
def test_every_branch_of_every_network_costs_less_than_the_next(name: str) -> None:
    _, pool = pool_of(SMALL[name])
    assert all(a.params < b.params and a.macs < b.macs for a, b in pairwise(pool))


def round_of(devices: list[tuple[float, float, float]]) -> RoundContext:
    """A round of clients with these speeds, bandwidths and memories."""
    _, pool = paper_pool()
    pool = tuple(replace(m, dispatched=True) for m in pool)  # shares .25, .4, .5, .9, 1
    fleet = tuple(Device(c, "t", memory, 0.0, None, p, s) for c, (p, s, memory) in enumerate(devices))
    return RoundContext(0, SEED, fleet, fleet, pool)


def test_the_selection_s_levels_are_replaced_by_the_tiers() -> None:
    context = round_of([(3.0, 1.0, 110.0), (1.0, 1.0, 110.0), (5.0, 1.0, 110.0), (2.0, 1.0, 110.0), (4.0, 1.0, 110.0)])
    picks: list[Pick] = [(c, 4) for c in range(5)]
    assert in_tiers(picks, context, mu=1.0) == [(0, 2), (1, 0), (2, 4), (3, 1), (4, 3)]


def test_only_the_selected_clients_are_tiered() -> None:
    """Normalised over the three, the speeds are 0, 1 and 1/2; the fastest of all is not asked."""
    context = round_of([(3.0, 1.0, 110.0), (900.0, 1.0, 110.0), (5.0, 1.0, 110.0), (4.0, 1.0, 110.0)])
    assert in_tiers([(0, 0), (2, 0), (3, 0)], context, mu=1.0) == [(0, 1), (2, 4), (3, 3)]


def test_mu_weighs_the_speed_and_not_the_bandwidth() -> None:
    """T = mu P + S (Algorithm 1, lines 2 to 4), normalised: speeds 1, .6, 0, bandwidths 0, .5, 1. mu = 0 goes by the
    bandwidth: 0, .5, 1; mu = .5: .5, .8, 1; mu = 1e6 by the speed; mu = 2: 2, 1.7, 1. Tiers of three: 1, 3, 4."""
    context = round_of([(11.0, 1.0, 110.0), (7.0, 2.0, 110.0), (1.0, 3.0, 110.0)])
    picks: list[Pick] = [(0, 0), (1, 0), (2, 0)]
    for mu, tiers in ((0.0, [1, 3, 4]), (0.5, [1, 3, 4]), (2.0, [4, 3, 1]), (1e6, [4, 3, 1])):
        assert [level for _, level in in_tiers(picks, context, mu)] == tiers, mu


def test_a_device_without_room_fails_or_trains_the_smallest() -> None:
    algorithm = MultiBranch(training=TRAINING, exits=("conv", "fc"))
    site = tiny_site(algorithm)
    assignments = first_plan(algorithm, site).assignments
    none = [(o, TaskContext(site.layout, site.pool, site.fleet[o.client], 0.0)) for o in assignments]
    assert {o.level for o in assignments} >= {0, 1}
    for assignment, context in none:
        if assignment.level == 0:
            assert algorithm.task(assignment, context).spec == site.pool[0].spec
        with pytest.raises(ClientError):
            replace(algorithm, on_too_small="fail" if assignment.level == 0 else "train").task(assignment, context)
