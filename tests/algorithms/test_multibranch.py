"""Multi-branch networks: where the exits sit, what their heads cost, who trains which branch, and what is merged."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.aggregation.server_opt import Yogi
from fl_engine.algorithms import MultiBranch
from fl_engine.algorithms.multibranch import exits_at, in_tiers
from fl_engine.backends import InProcess
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ClientError, ModelError, PoolError
from fl_engine.core.types import FULL, ClientUpdate, Device, Pick, Pool, RoundContext, TaskContext
from fl_engine.datasets import cifar100, femnist
from fl_engine.exchange.client import execute
from fl_engine.models import MODELS
from fl_engine.models.resnet import ResNet18, ResNet34
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.vgg16 import VGG16
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Curiosity, ResourceTable, Uniform
from fl_engine.testing.tiny import SEED, TRAINING, context_of, paper_pool, start_of, tiny_site, update_of
from fl_engine.training.evaluation import evaluate_pool, published
from tests.data import made

BLOCKS = tuple(str(i) for i in range(1, 17))
PAPER = (64, 128, 256, 512)


def pool_of(family: ModelFamily, **options: Any) -> tuple[Any, Pool]:
    algorithm = MultiBranch(**options)
    network = algorithm.network(family)
    return network, algorithm.pool(network, {}, None)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- the exits
@pytest.mark.parametrize(
    ("rule", "places"),
    [
        ("equidistant:9", "2 3 5 6 8 10 11 13 14"),
        ("equidistant:3", "4 8 12"),
        ("equidistant:1", "8"),
        ("equidistant:15", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
        ("equidistant:99", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
        ("every:2", "2 4 6 8 10 12 14"),
        ("every:7", "7 14"),
        (("3", "16"), "3 16"),
    ],
)
def test_where_exits_sit_among_sixteen_blocks(rule: Any, places: str) -> None:
    assert " ".join(exits_at(BLOCKS, rule)) == places


@pytest.mark.parametrize("wanted", range(1, 40))
@pytest.mark.parametrize("blocks", [2, 3, 7, 10, 16, 33])
def test_exits_are_distinct_and_about_equally_far_apart(blocks: int, wanted: int) -> None:
    places = [int(point) for point in exits_at([str(i) for i in range(1, blocks + 1)], f"equidistant:{wanted}")]
    assert len(places) == min(wanted, blocks - 1)
    gaps = [b - a for a, b in pairwise([0, *places, blocks])]
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("equidistant:0", "algorithm.exits is equidistant:<n>, every:<n> (n from 1) or a list of blocks"),
        ("equidistant", "got 'equidistant': write equidistant:9"),
        ("every:16", "algorithm.exits=every:16 leaves no early exit among 16 blocks"),
        ((), "algorithm.exits is empty"),
    ],
)
def test_bad_rules_are_named(rule: Any, message: str) -> None:
    with pytest.raises(PoolError, match=re.escape(message)):
        exits_at(BLOCKS, rule)


def test_blocks_that_are_not_there_are_named() -> None:
    with pytest.raises(ModelError, match="exits must be"):
        pool_of(ResNet18((3, 12, 12), 4, width=0.1), exits=("stage9.0",))


# ----------------------------------------------------------------------------------------------- MB-ResNet34, costs
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


def test_the_first_branch_by_hand() -> None:
    """Stem 3*64*9 + 128; two blocks of two 64*64*9 + 128 each; the head's two convolutions alike; linear 64*10 + 10."""
    _, pool = pool_of(ResNet34((3, 32, 32), 10, channels=PAPER))
    convolution = 64 * 64 * 9 + 2 * 64
    assert pool[0].params == 3 * 64 * 9 + 2 * 64 + 4 * convolution + 2 * convolution + 64 * 10 + 10


def test_the_last_branch_is_the_network_without_early_exits() -> None:
    family = ResNet34((3, 9, 9), 5, width=0.1)
    network, pool = pool_of(family)
    assert pool[-1].params == count_params(family) < count_params(network)


SAMPLES: dict[str, tuple[tuple[int, ...], int]] = {
    "small_cnn": ((1, 8, 8), 10),
    "vgg16": ((3, 32, 32), 10),
    "resnet18": ((3, 32, 32), 10),
    "preresnet18": ((3, 32, 32), 100),
    "mobilenetv2": ((1, 28, 28), 62),
    "epic_resnet18": ((1, 100, 64), 44),
    "uthar_resnet18": ((1, 250, 90), 7),
    "widar_resnet18": ((22, 20, 20), 9),
    "aep_mlp": ((18,), 1),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_branch_of_every_network_costs_less_than_the_next(name: str) -> None:
    shape, outputs = SAMPLES[name]
    kind: Any = MODELS[name]
    _, pool = pool_of(kind(shape, outputs))
    assert all(a.params < b.params and a.macs < b.macs for a, b in pairwise(pool))


def test_a_head_has_fewer_convolutions_where_they_would_cost_more_than_what_it_leaves_out() -> None:
    network, _ = pool_of(ResNet18((3, 32, 32), 10))
    assert network.exit_convs[:3] == (("stage1.0", 2), ("stage1.1", 1), ("stage2.0", 2))
    assert pool_of(SmallCNN((1, 8, 8), 10))[0].exit_convs == ()
    linear, _ = pool_of(ResNet18((3, 32, 32), 10), head_convs=())
    assert linear.exit_convs == ()


def test_heads_behind_vectors_are_linear() -> None:
    network, _ = pool_of(VGG16((3, 32, 32), 10, fc=(256, 192), width=0.1), exits=("conv4", "fc1"), head_convs=(1,))
    assert (network.exits, network.exit_convs) == (("conv4", "fc1"), (("conv4", 1),))


def test_exits_that_the_model_section_sets_are_replaced() -> None:
    network, _ = pool_of(ResNet18((3, 32, 32), 10, exits=("stage1.0",), exit_convs=(("stage1.0", 8),)), exits="every:4")
    assert (network.exits, network.exit_convs) == (("stage2.1",), (("stage2.1", 2),))


def test_exits_too_close_to_the_end_are_an_error() -> None:
    """Behind the last block, an exit costs what the classifier costs."""
    with pytest.raises(PoolError, match="is not smaller than"):
        pool_of(ResNet18((3, 12, 12), 4, width=0.1), exits=("stage1.0", "stage4.1"))


# ------------------------------------------------------------------------------------------------- ResNet's channels
def test_resnet34_of_the_paper_has_identities_where_the_stem_is_as_wide() -> None:
    family = ResNet34((3, 32, 32), 10, channels=PAPER)
    assert count_params(family) == 21_282_122
    layout = family.layout()
    assert "stem" not in layout.groups and "stage1.0.shortcut.conv.weight" not in layout.slots
    assert family.prunable()[0].params == ("stem.", "stage1.")


@pytest.mark.parametrize("channels", [(64, 128, 256), (64, 128, 256, 0), [64, 128, 256, 512], (64, 128, 256, 2**17)])
def test_bad_channels_are_named(channels: Any) -> None:
    with pytest.raises(ModelError, match="channels"):
        ResNet34((3, 32, 32), 10, channels=channels)


# ---------------------------------------------------------------------------------------------------- who trains what
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


def test_what_a_device_can_hold_is_never_exceeded() -> None:
    context = round_of([(5.0, 1.0, 30.0), (4.0, 1.0, 41.0), (3.0, 1.0, 20.0), (2.0, 1.0, 110.0), (1.0, 1.0, 110.0)])
    # Tiers 4, 3, 2, 1, 0; the first holds .25, the second .4, the third nothing.
    assert in_tiers([(c, 4) for c in range(5)], context, mu=1.0) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]


def test_mu_weighs_the_speed_and_not_the_bandwidth() -> None:
    """T = mu P + S (Algorithm 1, lines 2 to 4), normalised: speeds 1, .6, 0, bandwidths 0, .5, 1. mu = 0 goes by the
    bandwidth: 0, .5, 1; mu = .5: .5, .8, 1; mu = 1e6 by the speed; mu = 2: 2, 1.7, 1. Tiers of three: 1, 3, 4."""
    context = round_of([(11.0, 1.0, 110.0), (7.0, 2.0, 110.0), (1.0, 3.0, 110.0)])
    picks: list[Pick] = [(0, 0), (1, 0), (2, 0)]
    for mu, tiers in ((0.0, [1, 3, 4]), (0.5, [1, 3, 4]), (2.0, [4, 3, 1]), (1e6, [4, 3, 1])):
        assert [level for _, level in in_tiers(picks, context, mu)] == tiers, mu


@pytest.mark.parametrize(("mu", "strongest"), [(0.0, "wide"), (1e6, "fast")])
def test_a_plan_goes_by_its_mu(mu: float, strongest: str) -> None:
    algorithm = MultiBranch(training=replace(TRAINING, fraction=1.0), mu=mu)
    fast, wide = (Device(c, n, 110.0, 0.0, None, p, s) for c, (n, p, s) in enumerate((("fast", 9, 1), ("wide", 1, 9))))
    site = tiny_site(algorithm, sizes=(8, 8), fleet=(fast, wide))
    last = max(algorithm.plan(start_of(algorithm, site), context_of(site, 0)).orders, key=lambda order: order.level)
    assert site.fleet[last.client].tier == strongest and last.level == len(site.pool) - 1


def test_the_speed_of_the_moment_counts() -> None:
    """As `available` says it, not as the fleet was made."""
    context = round_of([(1.0, 1.0, 110.0), (2.0, 1.0, 110.0)])
    swapped = tuple(replace(d, speed=3.0 - d.speed) for d in context.fleet)
    picks: list[Pick] = [(0, 0), (1, 0)]
    assert in_tiers(picks, context, mu=1.0) == [(0, 2), (1, 4)]
    assert in_tiers(picks, replace(context, available=swapped), mu=1.0) == [(0, 4), (1, 2)]


@pytest.mark.parametrize("selection", [Uniform(), Uniform(model="random"), ResourceTable(), Curiosity()])
def test_every_selection_picks_clients_and_none_their_branches(selection: Any) -> None:
    algorithm = MultiBranch(training=TRAINING, selection=selection)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    for round in range(6):
        plan = algorithm.plan(state, context_of(site, round))
        assert plan.orders and all(o.spec == site.pool[o.level].spec for o in plan.orders)
        picks = [(o.client, o.level) for o in plan.orders]
        assert picks == in_tiers(picks, context_of(site, round), algorithm.mu)
        answers = sorted(InProcess(site).run(algorithm, plan), key=lambda o: o.client)
        state = algorithm.merge(state, plan, answers, None)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------- training and merging
def test_a_branch_alone_is_trained() -> None:
    """One output, one loss; earlier heads are not even sent."""
    algorithm = MultiBranch(training=TRAINING, proximal=0.25, exits=("conv", "fc"))
    site = tiny_site(algorithm)
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0))
    for order in plan.orders:
        task = algorithm.task(order, TaskContext(site.layout, site.pool, site.fleet[order.client], 1000.0))
        assert (task.spec, task.exits, task.proximal) == (site.pool[order.level].spec, None, 0.25)
        heads = {name.split(".")[0] for name in order.payload if name.startswith(("exit_", "classifier"))}
        assert len(heads) == 1


def test_a_device_without_room_fails_or_trains_the_smallest() -> None:
    algorithm = MultiBranch(training=TRAINING, exits=("conv", "fc"))
    site = tiny_site(algorithm)
    orders = algorithm.plan(start_of(algorithm, site), context_of(site, 0)).orders
    none = [(o, TaskContext(site.layout, site.pool, site.fleet[o.client], 0.0)) for o in orders]
    assert {o.level for o in orders} >= {0, 1}
    for order, context in none:
        if order.level == 0:
            assert algorithm.task(order, context).spec == site.pool[0].spec
        with pytest.raises(ClientError):
            replace(algorithm, on_too_small="fail" if order.level == 0 else "train").task(order, context)


def test_each_element_is_the_mean_of_those_that_hold_it() -> None:
    """Of two clients, both hold the convolution; the first's head and the second's hidden layer are one's alone."""
    algorithm = MultiBranch(training=TRAINING, exits=("conv",))
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0))
    first = next(o for o in plan.orders if o.level == 0)
    last = next(o for o in plan.orders if o.level == 1)
    answers = [
        update_of(o, o.spec, {n: torch.full_like(t, value) for n, t in o.payload.items()}, examples)
        for o, value, examples in ((first, 1.0, 1), (last, 4.0, 2))
    ]
    plan = replace(plan, orders=tuple(o for o in plan.orders if o in (first, last)))
    params = algorithm.merge(state, plan, answers, None).params  # type: ignore[arg-type]
    for name, expected in {"conv.conv.weight": 3.0, "exit_conv.weight": 1.0, "fc.linear.weight": 4.0}.items():
        torch.testing.assert_close(params[name], torch.full_like(params[name], expected))


def test_with_yogi_untrained_branches_stay() -> None:
    algorithm = MultiBranch(training=TRAINING, exits=("conv",), server=Yogi())
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0))
    plan = replace(plan, orders=tuple(o for o in plan.orders if o.level == 0))
    answers = list(InProcess(site).run(algorithm, plan))
    params = algorithm.merge(state, plan, answers, None).params  # type: ignore[arg-type]
    assert torch.equal(params["classifier.weight"], state.params["classifier.weight"])
    assert not torch.equal(params["exit_conv.weight"], state.params["exit_conv.weight"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["cifar100", "femnist"])
def test_two_rounds_on_the_papers_other_data_sets(name: str, tmp_path: Path) -> None:
    """On small files of their formats; every branch is scored on all their classes."""
    if name == "cifar100":
        made.cifar100_files(tmp_path, (200, 100))
        data, family = cifar100.load(tmp_path, (200, 100)), ResNet18((3, 32, 32), 100, width=0.125)
    else:
        files = made.femnist_files(tmp_path, made.femnist_file({f"f{n:04}_41": 10 for n in range(62)}))
        data, family = femnist.load(tmp_path, files), ResNet18((1, 28, 28), 62, width=0.125)
    algorithm = MultiBranch(training=replace(TRAINING, fraction=0.5))
    site = tiny_site(algorithm, family, data=data)
    state = start_of(algorithm, site)
    trained = set[int]()
    for round in range(2):
        plan = algorithm.plan(state, context_of(site, round))
        answers = [execute(algorithm, order, site) for order in plan.orders]
        trained |= {plan.order_of[each.client].level for each in answers if isinstance(each, ClientUpdate)}
        state = algorithm.merge(state, plan, answers, ServerSite(site))
    scores = evaluate_pool(site.family, published(state), site.pool, data, ("cpu",))
    assert len(scores) == 8 and len(trained) > 2
    assert all(math.isfinite(score.loss) for score in scores.values())


def test_mu_can_be_searched() -> None:
    site = tiny_site(MultiBranch(training=TRAINING))
    assert set(MultiBranch().search_space(site.pool)) == {"mu"}
    assert site.pool[-1].spec != FULL


def test_defaults() -> None:
    """Section 4.1: nine branches more, with two convolutions, one and none. mu, which the paper varies, is ours."""
    found = MultiBranch()
    assert (found.exits, found.head_convs, found.mu, found.proximal) == ("equidistant:9", (2, 1, 0), 1.0, 0.0)
