"""No algorithm ignores an option that all algorithms share. Two rounds on 20 clients with two digits each, and a small
CNN with batch norm."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fl_engine.algorithms import (
    ALGORITHMS,
    QFFL,
    Decoupled,
    DepthFL,
    FedAvg,
    FedPer,
    FjORD,
    MultiBranch,
    QuantizedFedAvg,
    Scaffold,
)
from fl_engine.algorithms.pooled import Weighting
from fl_engine.algorithms.training import Training
from fl_engine.backends import InProcess
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.types import HEAD, ClientResult, ClientUpdate, Params, RoundPlan
from fl_engine.datasets import digits
from fl_engine.exchange.client import Site
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import CLIENTS, SEED, assert_same_bits, context_of, start_of, tiny_site
from fl_engine.training.evaluation import evaluate_pool, published
from tests.harness.made_up import without_fine_tuning

ROUNDS = 2
TRAINING = Training(fraction=0.2, epochs=1, batch_size=4, lr=0.05)
SIZES = tuple(8 + 3 * (client % 4) for client in range(CLIENTS))
FAMILY = SmallCNN((1, 8, 8), 10, width=0.25)
STATIC = SmallCNN((1, 8, 8), 10, width=0.25, norm="static")


@pytest.fixture(params=sorted(ALGORITHMS))
def algorithm(request: pytest.FixtureRequest) -> Any:
    return without_fine_tuning(ALGORITHMS[request.param](training=TRAINING))


def test_weighting_changes_the_mean_if_weights_differ(algorithm: Any) -> None:
    if isinstance(algorithm, QFFL):
        pytest.skip("its weights also depend on the losses")
    site = _site(algorithm, FAMILY)
    server, state = ServerSite(site), start_of(algorithm, site)
    plan, results = _round(algorithm, state, site, 0)

    def merged(weighting: Weighting) -> Params:
        return published(replace(algorithm, weighting=weighting).merge(state, plan, results, server))

    updates = [result for result in results if isinstance(result, ClientUpdate)]
    for weighting in get_args(Weighting):
        other = replace(algorithm, weighting=weighting)
        weights = defaultdict[Any, set[float]](set)
        for update in updates:
            level = plan.assignment_of[update.client].level if isinstance(algorithm, Decoupled) else None
            weights[level].add(other.weight(update, state, server))
        differ = any(len(each) > 1 for each in weights.values())
        assert _differ(merged(weighting), merged("uniform")) == differ, weighting
        assert differ or weighting != "examples"


def test_static_batch_norm_changes_only_the_scores(algorithm: Any) -> None:
    off, on = (_ran(replace(algorithm, static_bn=wanted)) for wanted in (False, True))
    assert_same_bits(off[0], on[0])
    assert all(on[3][level] != off[3][level] for level in off[3]), "each level has its own statistics"
    assert _scores(_site(replace(algorithm, static_bn="kept"), FAMILY), off[0]) == off[3], "the network keeps none"


def test_static_batch_norm_replaces_running_statistics(algorithm: Any) -> None:
    if isinstance(algorithm, FjORD):
        pytest.skip("it does not support networks with running statistics")
    if isinstance(algorithm, QFFL):
        pytest.skip("the losses that clients report depend on the statistics")
    off, on = (_ran(replace(algorithm, static_bn=wanted), STATIC) for wanted in (False, True))
    assert_same_bits(off[0], on[0])
    assert all(on[3][level] != off[3][level] for level in off[3])
    assert _scores(_site(replace(algorithm, static_bn="kept"), STATIC), off[0]) == on[3]


def test_scaler_changes_the_result_or_is_refused(algorithm: Any) -> None:
    scaled = replace(algorithm, scaler=True)
    if isinstance(algorithm, FedAvg | DepthFL | MultiBranch | QuantizedFedAvg):  # they train the full width
        with pytest.raises(ConfigError):
            _ran(scaled)
        return
    assert _differ(_ran(scaled)[0], _ran(replace(algorithm, scaler=False))[0])


def test_label_masks_change_the_result_and_omit_rows(algorithm: Any) -> None:
    if isinstance(algorithm, Scaffold):
        with pytest.raises(ConfigError):
            _ran(replace(algorithm, mask_labels=True))
        return
    masked, plain = (_ran(replace(algorithm, mask_labels=on)) for on in (True, False))
    assert _differ(masked[0], plain[0])
    site = masked[2]
    labels, parts, slots = site.data.train_y, site.partition.clients, site.family.layout().slots
    for _, update in masked[1]:
        held = torch.unique(labels[torch.from_numpy(parts[update.client])]).tolist()
        assert len(held) == 2
        assert update.spec.kept[HEAD] == tuple(held)
        heads = [t for name, t in update.payload.items() if slots[name].axes[0].group == HEAD]
        assert all(len(head) == 2 for head in heads)
        assert heads or isinstance(algorithm, FedPer)
    assert all(HEAD not in update.spec.kept for _, update in plain[1])


def _differ(left: Params, right: Params) -> bool:
    """Return whether weights differ by more than rounding."""
    return any(not torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-8) for name in left)


@cache
def _ran(
    algorithm: Any, family: ModelFamily = FAMILY
) -> tuple[Params, list[tuple[int, ClientUpdate]], Site, dict[str, Any]]:
    """Return the weights after two rounds, (level, update) of each client, the site, and the score of each level."""
    site = _site(algorithm, family)
    state, results = start_of(algorithm, site), list[tuple[int, ClientUpdate]]()
    for round in range(ROUNDS):
        plan, found = _round(algorithm, state, site, round)
        results += [(plan.assignment_of[a.client].level, a) for a in found if isinstance(a, ClientUpdate)]
        state = algorithm.merge(state, plan, found, ServerSite(site))
    assert results, "every client failed"
    weights = published(state)
    return weights, results, site, _scores(site, weights)


def _scores(site: Site, weights: Params) -> dict[str, Any]:
    return evaluate_pool(site.family, weights, site.pool, site.data)


def _round(algorithm: Any, state: Any, site: Site, round: int) -> tuple[RoundPlan, list[ClientResult]]:
    """Return a round's plan, and its results in client order."""
    plan: RoundPlan = algorithm.plan(state, context_of(site, round, SEED))
    return plan, sorted(InProcess(site).run(algorithm, plan), key=lambda result: result.client)


def _site(algorithm: Any, family: ModelFamily) -> Site:
    site = tiny_site(algorithm, family, sizes=SIZES, data=_data())
    return replace(site, fleet=tuple(replace(device, sigma=0.0) for device in site.fleet))


@cache
def _data() -> Data:
    """Return digits in client order. Client c has only the digits c and c + 3 (mod 10)."""
    whole = digits.load(Path())
    left = {label: torch.where(whole.train_y == label)[0].tolist() for label in range(10)}
    chosen = [left[(client + 3 * (i % 2)) % 10].pop() for client, size in enumerate(SIZES) for i in range(size)]
    return replace(
        whole,
        train_x=whole.train_x[chosen],
        train_y=whole.train_y[chosen],
        test_x=whole.test_x[:128],
        test_y=whole.test_y[:128],
    )
