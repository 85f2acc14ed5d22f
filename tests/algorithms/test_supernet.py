"""FedX's preparation: the server trains all sub-networks, and searches one for each tier."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.algorithms import FedAvg, FedX
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.errors import PoolError
from fl_engine.core.slicing import full_shapes, initial_params, is_statistic, take
from fl_engine.core.widths import nested, prefix
from fl_engine.exchange.coding import bytes_of, encode, header_of
from fl_engine.fleet.devices import FLEETS, fleet
from fl_engine.models.chains import SmallCNN
from fl_engine.preparation.submodel_search import best
from fl_engine.preparation.supernet import Supernet, TrainSupernet
from fl_engine.rounds.server import PreparingServer
from fl_engine.testing.tiny import CLIENTS, SEED, TRAINING, TinyNet, assert_same_bits, tiny_data, tiny_site
from fl_engine.training.evaluation import evaluate, recalibrated
from tests.algorithms.test_fedx import NestedNet

DEFAULTS = {f"algorithm.{name}": value for name, value in vars(FedX()).items() if name != "training"}
QUICK = {
    "pretrain.lr": 0.01, "pretrain.epochs": 6, "pretrain.batch_size": 8,
    "training.epochs": 2,
    "training.batch_size": 4, "training.drop_last": True, "algorithm.bits": (2, 8, 12), "algorithm.search_seeds": 2,
    "algorithm.widths": (0.4, 0.75, 1.0), "fleet.tiers": [asdict(tier) for tier in FLEETS["4:3:3"]],
}  # fmt: skip


OTHER_FLEET = [asdict(tier) for tier in FLEETS["8:1:1"]]
"""Unlike the default fleet, it has devices that cannot hold every network's smallest model."""


def server_for(family: ModelFamily, **changes: Any) -> PreparingServer:
    """Owns 80 samples of 160; each client holds 4 or 12."""
    data = tiny_data(family.input_shape, family.outputs)  # type: ignore[arg-type]
    sizes = [4 if i % 2 else 12 for i in range(CLIENTS // 2)] + [8] * (CLIENTS // 2)
    site = tiny_site(FedAvg(TRAINING), family, sizes=sizes, data=data)
    own = np.arange(80, 160)
    clients = site.partition.clients[: CLIENTS // 2]
    parts = replace(site.partition, clients=clients, proxy_train=own[:60], proxy_test=own[60:])
    options = {name if "." in name else f"algorithm.{name}": value for name, value in changes.items()}
    wanted = {name: {**DEFAULTS, **QUICK, **options}[name] for name in (*TrainSupernet.settings, *QUICK)}
    return PreparingServer(replace(site, partition=parts), "cpu", wanted)


def prepared(family: ModelFamily, **changes: Any) -> Supernet:
    return TrainSupernet().prepare(family, server_for(family, **changes))


@cache
def trained_once() -> Supernet:
    return prepared(TinyNet())


@pytest.fixture
def found() -> Supernet:
    """Trained in the first test, with its single thread."""
    return trained_once()


def test_supernet_trains_every_sub_network(found: Supernet) -> None:
    family, server = TinyNet(), server_for(TinyNet())
    assert {name: t.shape for name, t in found.weights.items()} == full_shapes(family)
    fresh, data = initial_params(family, seeds.derive(SEED, "init")), server.data
    specs = nested(family, (0.4, 0.75, 1.0), ("small", "medium", "large"))
    for level, (name, spec) in zip(found.levels, specs.items(), strict=True):
        assert (level.name, level.params, level.macs) == (name, count_params(family, spec), count_macs(family, spec))
        untrained, trained = (
            evaluate(family, take(w, family.layout(), spec), spec, data, data.test_x, data.test_y)
            for w in (fresh, found.weights)
        )
        assert level.accuracy == trained.value > untrained.value + 0.3
    assert found.samples == 80


def test_table_is_complete_and_decides_the_choice(found: Supernet) -> None:
    assert [(each.level, each.bits) for each in found.table] == [
        (name, bits) for name in ("small", "medium", "large") for bits in (2, 8, 12)
    ]
    holds = {"weak": ("small",), "medium": ("small", "medium"), "strong": ("small", "medium", "large")}
    assert {tier: tuple(by) for tier, by in found.seconds_per_round.items()} == holds
    for tier, names in holds.items():
        assert found.chosen[tier] == best([each for each in found.table if each.level in names], 0.01, tier)
    params = {each.name: each.params for each in found.levels}
    pairs = [(a, b) for a in found.chosen.values() for b in found.chosen.values() if params[a.level] < params[b.level]]
    assert found.smaller_gets_more_bits is (all(a.bits > b.bits for a, b in pairs) if pairs else None)
    sizes = {(each.level, each.bits): each.encoded_bits for each in found.table}
    assert all(sizes[name, 8] < sizes[name, 12] for name in ("small", "medium", "large"))


def test_candidate_is_scored_as_a_client_decodes_it(found: Supernet) -> None:
    family, server = TinyNet(), server_for(TinyNet())
    spec, data = prefix(family.layout(), 0.75), server.data
    weights = take(found.weights, family.layout(), spec)
    scores, bits, codec = [], [], Qsgd(bits=2)
    for i in range(2):
        sent = encode(codec, weights, seeds.derive(SEED, "supernet rounding", i))
        received = codec.decode(sent, dict(sorted(header_of(weights).items())))
        scores.append(evaluate(family, received, spec, data, data.test_x, data.test_y).value)
        bits.append(8 * bytes_of(header_of(sent)))
    (candidate,) = [each for each in found.table if (each.level, each.bits) == ("medium", 2)]
    assert candidate.accuracy == pytest.approx(sum(scores) / 2, rel=1e-12)
    assert candidate.encoded_bits == sum(bits) / 2


def test_seconds_of_a_local_round_by_hand(found: Supernet) -> None:
    """Forward and backward pass of all samples, two epochs, batches of 4; at the tier's speed. Multiply-adds of the
    whole network: conv 9*8*16, fc and extra 32*32, classifier 32*4."""
    samples = [12, 4] * 5
    tiers = {tier.name: tier for tier in FLEETS["4:3:3"]}
    members = [samples[d.client] for d in fleet(FLEETS["4:3:3"], 10, SEED) if d.tier == "strong"]
    macs = 9 * 8 * 16 + 32 * 32 * 2 + 32 * 4
    expected = 3 * macs * 2 * (sum(members) / len(members)) / (tiers["strong"].speed * 1e9)
    assert found.seconds_per_round["strong"]["large"] == pytest.approx(expected, rel=1e-12)


def test_search_levels_limits_the_candidates() -> None:
    made = prepared(NestedNet(), search_levels=1, **{"pretrain.epochs": 2})
    assert [level.name for level in made.levels] == ["small", "4-16", "medium", "8-24", "large"], "all are scored"
    assert {each.level for each in made.table} == {"small", "medium", "large"}
    every = prepared(NestedNet(), search_levels=None, **{"pretrain.epochs": 2})
    assert {each.level for each in every.table} == {level.name for level in made.levels}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"seconds": 1e-9}, "algorithm.seconds"),
        ({"q_max": {"waek": 8}}, "algorithm.q_max"),
        ({"level": "large", "fleet.tiers": OTHER_FLEET}, None),
    ],
)
def test_impossible_choice_is_refused_before_training(changes: dict[str, Any], path: str | None) -> None:
    server = server_for(TinyNet(), **changes)
    server.settings = {name: value for name, value in server.settings.items() if not name.startswith("pretrain.")}
    with pytest.raises(PoolError) as caught:  # training would raise KeyError
        TrainSupernet().prepare(TinyNet(), server)
    assert caught.value.path == path


def test_sub_network_is_scored_with_its_own_statistics() -> None:
    family = SmallCNN((1, 8, 8), 4, width=0.5, norm="static")
    server = server_for(family)
    made, data = TrainSupernet().prepare(family, server), server.data
    for level, spec in zip(made.levels, nested(family, (0.4, 0.75, 1.0), ("s", "m", "l")).values(), strict=True):
        weights = take(made.weights, family.layout(), spec)
        own = evaluate(family, weights, spec, data, data.test_x, data.test_y, static_bn=True)
        assert level.accuracy == own.value
    small = prefix(family.layout(), 0.4)
    weights = take(made.weights, family.layout(), small)
    own_statistics = recalibrated(family, weights, small, data, data.train_x)
    assert list(own_statistics) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(own_statistics[name], tensor) != is_statistic(name), name
    score, wanted = (
        evaluate(family, each, small, data, data.test_x, data.test_y, static_bn=static_bn)
        for each, static_bn in ((own_statistics, False), (weights, True))
    )
    assert (score.value, score.loss) == (wanted.value, pytest.approx(wanted.loss, rel=1e-6))


def test_supernet_depends_only_on_its_inputs(found: Supernet) -> None:
    torch.manual_seed(5)
    again = prepared(TinyNet())
    assert_same_bits(again.weights, found.weights)
    assert again.model_copy(update={"weights": {}, "seconds": 0.0}) == found.model_copy(
        update={"weights": {}, "seconds": 0.0}
    )
