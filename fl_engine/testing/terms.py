"""The suite of the options that all algorithms share: no algorithm ignores one silently. Subclass `TermsSuite` and give
it an `algorithm` fixture.

Two rounds on 20 clients, with two digits each and different numbers of samples, and a small CNN with batch norm.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fl_engine.algorithms.pooled import Weighting
from fl_engine.algorithms.training import Training
from fl_engine.backends import InProcess
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.types import HEAD, ClientUpdate, Outcome, Params, RoundPlan
from fl_engine.datasets import digits
from fl_engine.exchange.client import Site
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import CLIENTS, SEED, assert_same_bits, context_of, start_of, tiny_site
from fl_engine.training.evaluation import evaluate_pool, published

ROUNDS = 2
TRAINING = Training(fraction=0.2, epochs=1, batch_size=4, lr=0.05)
SIZES = tuple(8 + 3 * (client % 4) for client in range(CLIENTS))
FAMILY = SmallCNN((1, 8, 8), 10, width=0.25)
STATIC = SmallCNN((1, 8, 8), 10, width=0.25, norm="static")


class TermsSuite:
    """Needs a fixture `algorithm`. `aggregates_by_level`, `keeps_statistics` and `scales` may be overridden."""

    @pytest.fixture
    def algorithm(self) -> Any:
        raise NotImplementedError("a TermsSuite needs an `algorithm` fixture")

    def aggregates_by_level(self, algorithm: Any) -> bool:
        """Whether each level has a mean of its own."""
        return False

    def keeps_statistics(self, algorithm: Any) -> bool:
        """Whether it takes networks with running statistics."""
        return True

    def scales(self, algorithm: Any) -> bool:
        """Whether its sub-models have width ratios to divide by."""
        return True

    def test_each_weighting_changes_the_mean_where_weights_differ(self, algorithm: Any) -> None:
        """All of them merge the same updates."""
        site = _site(algorithm, FAMILY)
        server, told = ServerSite(site), set()
        state = start_of(algorithm, site)
        plan, answers = _round(algorithm, state, site, 0)

        def merged(weighting: Weighting) -> Params:
            return published(replace(algorithm, weighting=weighting).merge(state, plan, answers, server))

        alike = merged("uniform")
        for weighting in get_args(Weighting):
            other = replace(algorithm, weighting=weighting)
            together = defaultdict[Any, set[float]](set)
            for update in answers:
                if isinstance(update, ClientUpdate):
                    level = plan.order_of[update.client].level
                    together[level if self.aggregates_by_level(algorithm) else None].add(
                        other.weight(update, state, server)
                    )
            differ = any(len(weights) > 1 for weights in together.values())
            assert _differ(merged(weighting), alike) == differ, weighting
            told |= {weighting} if differ else set()
        assert "examples" in told

    def test_static_batch_norm_changes_the_scores_alone(self, algorithm: Any) -> None:
        off, on = (_ran(replace(algorithm, static_bn=wanted)) for wanted in (False, True))
        assert_same_bits(off[0], on[0])
        assert all(on[3][level] != off[3][level] for level in off[3]), "each level has its own statistics"
        assert _scores(_site(replace(algorithm, static_bn="kept"), FAMILY), off[0]) == off[3], "the network keeps none"

    def test_static_batch_norm_takes_the_place_of_running_statistics(self, algorithm: Any) -> None:
        if not self.keeps_statistics(algorithm):
            pytest.skip("this algorithm takes no network that keeps statistics")
        off, on = (_ran(replace(algorithm, static_bn=wanted), STATIC) for wanted in (False, True))
        assert_same_bits(off[0], on[0])
        assert all(on[3][level] != off[3][level] for level in off[3])
        assert _scores(_site(replace(algorithm, static_bn="kept"), STATIC), off[0]) == on[3]

    def test_the_scaler_changes_what_is_trained_or_is_refused(self, algorithm: Any) -> None:
        scaled = replace(algorithm, scaler=True)
        if not self.scales(algorithm):
            with pytest.raises(ConfigError, match=r"algorithm\.scaler"):
                _ran(scaled)
            return
        assert _differ(_ran(scaled)[0], _ran(replace(algorithm, scaler=False))[0])

    def test_masks_change_what_is_trained_and_leave_rows_out(self, algorithm: Any) -> None:
        masked, plain = (_ran(replace(algorithm, mask_labels=on)) for on in (True, False))
        assert _differ(masked[0], plain[0])
        site = masked[2]
        labels, parts, slots = site.data.train_y, site.partition.clients, site.family.layout().slots
        for _, update in masked[1]:
            held = torch.unique(labels[torch.from_numpy(parts[update.client])]).tolist()
            assert len(held) == 2
            assert update.spec.kept[HEAD] == tuple(held)
            heads = [t for name, t in update.payload.items() if slots[name].axes[0].group == HEAD]
            assert all(len(head) == 2 for head in heads) and heads
        assert all(HEAD not in update.spec.kept for _, update in plain[1])


def _differ(left: Params, right: Params) -> bool:
    """By more than the order of a sum can make."""
    return any(not torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-8) for name in left)


@cache
def _ran(
    algorithm: Any, family: ModelFamily = FAMILY
) -> tuple[Params, list[tuple[int, ClientUpdate]], Site, dict[str, Any]]:
    """The weights after two rounds, the updates with the levels that were sent, and the levels' scores."""
    site = _site(algorithm, family)
    state, answers = start_of(algorithm, site), list[tuple[int, ClientUpdate]]()
    for round in range(ROUNDS):
        plan, found = _round(algorithm, state, site, round)
        answers += [(plan.order_of[a.client].level, a) for a in found if isinstance(a, ClientUpdate)]
        state = algorithm.merge(state, plan, found, ServerSite(site))
    assert answers, "every client failed"
    weights = published(state)
    return weights, answers, site, _scores(site, weights)


def _scores(site: Site, weights: Params) -> dict[str, Any]:
    return evaluate_pool(site.family, weights, site.pool, site.data)


def _round(algorithm: Any, state: Any, site: Site, round: int) -> tuple[RoundPlan, list[Outcome]]:
    """Its plan, and the answers in the clients' order."""
    plan: RoundPlan = algorithm.plan(state, context_of(site, round, SEED))
    return plan, sorted(InProcess(site).run(algorithm, plan), key=lambda answer: answer.client)


def _site(algorithm: Any, family: ModelFamily) -> Site:
    site = tiny_site(algorithm, family, sizes=SIZES, data=_data())
    return replace(site, fleet=tuple(replace(device, sigma=0.0) for device in site.fleet))


@cache
def _data() -> Data:
    """Digits, in the order of the clients: client c has samples of the digits c and c + 3 (mod 10) alone."""
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
