"""AdaGQ as read here: bits by the change's norm and the clients' clocks, by hand and as laws; the same after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms.adagq import AdaGQ, distance, mean_bits, shared
from fl_engine.core.types import Device
from fl_engine.exchange.client import Site
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore
from fl_engine.testing import played
from fl_engine.testing.tiny import TRAINING, context_of, failure_of, start_of, tiny_site, update_of

ALL = replace(TRAINING, fraction=1.0)
FLEET = tuple(Device(c, "strong", 110.0, 0.0, speed=1e9, bandwidth=1e4 * (1 + c)) for c in range(5))
"""Each sends faster than the one before."""


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0.0, 0.0, 8.0),
        (2.0, 2.0, 8.0),
        (2.0, 0.5, 6.0),  # a quarter: two bits fewer
        (2.0, 4.0, 9.0),
        (1.0, 2**0.5, 8.5),
        (1.0, 1e-9, 4.0),
        (1e-300, 1e300, 12.0),
    ],
)
def test_the_mean_bits_follow_the_norm_by_hand(first: float, last: float, expected: float) -> None:
    assert mean_bits(8, first, last, 4, 12) == pytest.approx(expected, abs=1e-12)


def test_how_far_weights_moved_by_hand() -> None:
    """Running statistics and integers are no weights: sqrt(3^2 + 4^2)."""
    before = {"a": torch.zeros(2), "b": torch.ones(1), "bn.running_mean": torch.zeros(1), "n": torch.tensor([1])}
    after = {
        "a": torch.tensor([3.0, 0]),
        "b": torch.tensor([5.0]),
        "bn.running_mean": torch.ones(1),
        "n": torch.tensor([9]),
    }
    assert distance(before, after) == 5
    assert distance(before, before) == 0


def test_bits_go_to_the_client_that_finishes_first_by_hand() -> None:
    """The second needs twice as long for a bit. Both have 2; the first is done at 4, 5, 6 and 7 with its next four, the
    second at 8 with its next one."""
    assert shared([(0.0, 1.0), (0.0, 2.0)], 8, 2, 8) == [6, 2]
    assert shared([(0.0, 1.0), (0.0, 2.0)], 9, 2, 8) == [7, 2], "both would be done at 8: the lower number"
    assert shared([(0.0, 1.0), (0.0, 2.0)], 10, 2, 8) == [7, 3]
    assert shared([(3.0, 1.0), (0.0, 1.0)], 9, 2, 8) == [3, 6], "it computes three bits' time longer"
    assert shared([(0.0, 1.0), (0.0, 2.0)], 99, 2, 8) == [8, 8]
    assert shared([(0.0, 1.0), (0.0, 2.0)], 0, 2, 8) == [2, 2]
    assert shared([(1.0, 1.0)] * 3, 17, 4, 8) == [6, 6, 5]
    assert shared([(1.0, 1.0)] * 2, 12, 6, 6) == [6, 6]
    assert shared([], 0, 4, 8) == []


def federated(algorithm: Any, site: Site, folder: Path, stop: int) -> tuple[Any, list[Any]]:
    terms = RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, keep_updates=True)
    return played.federated(Run(algorithm, site, terms), FolderStore(folder))


def bits_of(algorithm: AdaGQ, state: Any, site: Site, round: int) -> list[int]:
    return [order.codecs.up.bits for order in algorithm.plan(state, context_of(site, round)).orders]  # type: ignore[union-attr]


def test_slow_clients_send_fewer_bits_and_finish_more_evenly(tmp_path: Path) -> None:
    adaptive = AdaGQ(training=ALL, least=2, most=16)
    alike = replace(adaptive, least=8, most=8)
    site = tiny_site(adaptive, fleet=FLEET)
    bits = bits_of(adaptive, start_of(adaptive, site), site, 0)
    assert bits == sorted(bits) and bits[0] < 8 < bits[-1] and sum(bits) == 8 * 5
    assert bits_of(alike, start_of(alike, site), site, 0) == [8] * 5
    (one, *_), (other, *_) = (
        federated(adaptive, site, tmp_path / "a", 1)[1],
        federated(alike, site, tmp_path / "b", 1)[1],
    )
    assert one.metrics["uniformity"] < other.metrics["uniformity"]
    assert one.metrics["seconds_simulated"] < other.metrics["seconds_simulated"]


def test_a_merge_by_hand_and_one_of_failures() -> None:
    """Everyone moves all weights by 0.5: the L2 norm is 0.5 sqrt(n); nobody: what was known stays."""
    algorithm = AdaGQ(training=ALL)
    site = tiny_site(algorithm, fleet=FLEET)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0))
    back = [update_of(o, o.spec, {n: t + 0.5 for n, t in o.payload.items()}) for o in plan.orders]
    merged = algorithm.merge(state, plan, back, ServerSite(site))
    numbers = sum(t.numel() for t in state.params.values())
    assert merged.first == merged.last == pytest.approx(0.5 * numbers**0.5, rel=1e-6)
    nobody = algorithm.merge(merged, plan, [failure_of(o) for o in plan.orders], ServerSite(site))
    assert (nobody.first, nobody.last) == (merged.first, merged.last)


def test_bits_of_a_round_are_the_mean_times_its_clients() -> None:
    """8 + log2(1.5) = 8.585 bits on average: 42.9 for five clients, so 43."""
    algorithm = AdaGQ(training=ALL)
    site = tiny_site(algorithm, fleet=FLEET)
    state = replace(start_of(algorithm, site), first=1.0, last=1.5)
    assert sum(bits_of(algorithm, state, site, 3)) == 43
    assert (algorithm.bits, algorithm.least, algorithm.most, algorithm.bucket) == (8, 4, 12, 512)
