"""AdaGQ: bits by the norm of the change and by the clients' clocks. DAdaQuant: its levels by hand, in time and between
clients, and what a liar can gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.aggregation.privacy import Private
from fl_engine.aggregation.rules import Median, TrimmedMean
from fl_engine.algorithms.adagq import AdaGQ, distance, mean_bits, share_bits
from fl_engine.algorithms.dadaquant import DAdaQuant, averaged, doubled, levels_of
from fl_engine.codecs.qsgd import MOST_LEVELS, Qsgd
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Codecs, Device
from fl_engine.exchange.client import Site
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import FolderStore
from fl_engine.testing import rounds
from fl_engine.testing.tiny import TRAINING, context_of, failure_of, first_plan, start_of, tiny_site, update_of

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
def test_mean_bits_follow_the_norm_by_hand(first: float, last: float, expected: float) -> None:
    assert mean_bits(8, first, last, 4, 12) == pytest.approx(expected, abs=1e-12)


def test_distance_ignores_statistics_and_integers() -> None:
    """sqrt(3^2 + 4^2)"""
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
    """The second takes twice as long for a bit. With 2 bits each, the first finishes its next four bits at 4, 5, 6 and
    7, the second its next one at 8."""
    assert share_bits([(0.0, 1.0), (0.0, 2.0)], 8, 2, 8) == [6, 2]
    assert share_bits([(0.0, 1.0), (0.0, 2.0)], 9, 2, 8) == [7, 2], "both would finish at 8: the lower number"
    assert share_bits([(0.0, 1.0), (0.0, 2.0)], 10, 2, 8) == [7, 3]
    assert share_bits([(3.0, 1.0), (0.0, 1.0)], 9, 2, 8) == [3, 6], "its computation takes as long as three bits"
    assert share_bits([(0.0, 1.0), (0.0, 2.0)], 99, 2, 8) == [8, 8]
    assert share_bits([(0.0, 1.0), (0.0, 2.0)], 0, 2, 8) == [2, 2]
    assert share_bits([(1.0, 1.0)] * 3, 17, 4, 8) == [6, 6, 5]
    assert share_bits([(1.0, 1.0)] * 2, 12, 6, 6) == [6, 6]
    assert share_bits([], 0, 4, 8) == []


def federated(algorithm: Any, site: Site, folder: Path, stop: int) -> tuple[Any, list[Any]]:
    options = RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, keep_updates=True)
    return rounds.federated(Run(algorithm, site, options), FolderStore(folder))


def bits_of(algorithm: AdaGQ, state: Any, site: Site, round: int) -> list[int]:
    return [assignment.codecs.up.bits for assignment in algorithm.plan(state, context_of(site, round)).assignments]  # type: ignore[union-attr]


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


def test_merge_measures_the_norm_of_the_change() -> None:
    """All move all weights by 0.5: the L2 norm is 0.5 sqrt(n). Failures leave the norms unchanged."""
    algorithm = AdaGQ(training=ALL)
    site = tiny_site(algorithm, fleet=FLEET)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0))
    back = [update_of(o, o.spec, {n: t + 0.5 for n, t in o.payload.items()}) for o in plan.assignments]
    merged = algorithm.merge(state, plan, back, ServerSite(site))
    numbers = sum(t.numel() for t in state.params.values())
    assert merged.first == merged.last == pytest.approx(0.5 * numbers**0.5, rel=1e-6)
    nobody = algorithm.merge(merged, plan, [failure_of(o) for o in plan.assignments], ServerSite(site))
    assert (nobody.first, nobody.last) == (merged.first, merged.last)


def test_bits_of_a_round_are_the_mean_times_its_clients() -> None:
    """8 + log2(1.5) = 8.585 bits on average: 42.9 for five clients, so 43."""
    algorithm = AdaGQ(training=ALL)
    site = tiny_site(algorithm, fleet=FLEET)
    state = replace(start_of(algorithm, site), first=1.0, last=1.5)
    assert sum(bits_of(algorithm, state, site, 3)) == 43
    assert (algorithm.bits, algorithm.least, algorithm.most, algorithm.bucket) == (8, 4, 12, 512)


STRONG = tuple(Device(client, "strong", 110.0, 0.0) for client in range(5))


def test_levels_by_hand() -> None:
    """w = 1/9 and 8/9, q = 100: w^(2/3) is 1 and 4 times 9^(-2/3), a = 5 * 9^(-2/3), b = 65 / 81 / 100^2, so that
    sqrt(a / b) w^(2/3) = 100 sqrt(5 / 65) = 27.7 for the first, four times that, 110.9, for the second."""
    assert levels_of([1.0, 8.0], 100) == [28, 111]
    assert levels_of([125.0, 1000.0], 100) == [28, 111], "in any unit"
    assert levels_of([1.0, 8.0], 1) == [1, 1], "0.28 is rounded up to the least that there is"
    assert levels_of([1.0, 0.0], 4) == [4, 1], "w = 0 says nothing: a = 1, b = 1 / 16"
    assert levels_of([0.0, 0.0, 0.0], 7) == levels_of([3.0, 3.0, 3.0], 7) == [7, 7, 7]
    assert levels_of([], 7) == []


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.integers(100, 2047))
def test_levels_have_the_variance_of_equal_ones(counts: list[int], level: int) -> None:
    """sum w^2 / q_k^2 is what it is with q for everyone, to the rounding; the sum of q_k is at most K q."""
    found = levels_of([float(count) for count in counts], level)
    assert all(1 <= each <= MOST_LEVELS for each in found)
    wide = [(count, each) for count, each in zip(counts, found, strict=True) if 20 <= each < MOST_LEVELS]
    if len(wide) == len(counts):
        variance = sum((count / each) ** 2 for count, each in zip(counts, found, strict=True))
        assert variance == pytest.approx(sum((count / level) ** 2 for count in counts), rel=0.06)
    assert sum(found) <= len(counts) * (level + 1)
    assignment = sorted(range(len(counts)), key=lambda i: counts[i])
    assert [found[i] for i in assignment] == sorted(found), "who weighs more has no fewer"


def test_assignments_give_levels_for_the_way_up_only() -> None:
    algorithm = DAdaQuant(training=ALL, q_min=100)
    site = tiny_site(algorithm, fleet=STRONG[:2], sizes=(1, 8))
    plan = first_plan(algorithm, site)
    assert [assignment.codecs for assignment in plan.assignments] == [
        Codecs(up=Qsgd(levels=q, bucket=512)) for q in (28, 111)
    ]
    alike = replace(algorithm, weighting="uniform", bucket=None)
    plan = first_plan(alike, site)
    assert [assignment.codecs for assignment in plan.assignments] == [Codecs(up=Qsgd(levels=100, bucket=None))] * 2
    for counts_alike in (Median(), TrimmedMean(), Private()):
        other = replace(algorithm, aggregation=counts_alike, phi=None)
        plan = first_plan(other, site)
        assert [assignment.codecs for assignment in plan.assignments] == [Codecs(up=Qsgd(levels=100, bucket=512))] * 2
    with pytest.raises(ConfigError):
        algorithm.plan(start_of(algorithm, site), context_of(site, 0, samples=()))


def test_the_moving_average_by_hand() -> None:
    assert averaged([1.0, 2.0, 6.0], [], 0.9) == (1 + 2 + 4) / 3, "6 counts as 4, twice the median"
    assert averaged([1.0, 2.0, 1e6], [], 0.9) == (1 + 2 + 4) / 3
    assert averaged([-1e6, 2.0, 3.0], [], 0.9) == pytest.approx((0 + 2 + 3) / 3)
    assert averaged([2.0, 2.0], [9.0, 1.0], 0.9) == pytest.approx(0.9 * 1 + 0.1 * 2)
    assert averaged([-5.0], [], 0.9) == 0


def levels_over(averages: Sequence[float], phi: int, q_max: int = 64) -> list[int]:
    found, level, kept = list[int](), 1, tuple[float, ...]()
    for average in averages:
        level, kept = doubled(level, (*kept, average), phi, q_max)
        assert len(kept) <= phi + 1
        found.append(level)
    return found


def test_level_doubles_if_the_average_has_not_fallen() -> None:
    assert levels_over([5.0, 4.0, 3.0, 2.0], 2) == [1, 1, 1, 1], "it falls"
    assert levels_over([5.0, 4.0, 4.5, 4.0, 4.2], 2) == [1, 1, 1, 2, 2], "4.0 is not below 4.0, two rounds before"
    assert levels_over([1.0] * 7, 2) == [1, 1, 2, 2, 4, 4, 8], "again only after two rounds more"
    assert levels_over([1.0] * 5, 1, q_max=3) == [1, 2, 3, 3, 3]


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), max_size=40),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_level_never_falls_and_doubles_every_phi_rounds(
    rounds: list[list[float]], phi: int, q_min: int, psi: float
) -> None:
    level, kept, q_max = q_min, tuple[float, ...](), 100
    for number, losses in enumerate(rounds, 1):
        average = averaged(losses, kept, psi)
        assert 0 <= average <= 2e6
        before = level
        level, kept = doubled(level, (*kept, average), phi, q_max)
        assert before <= level <= min(q_max, q_min * 2 ** ((number - 1) // phi))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.data())
def test_minority_of_liars_moves_the_mean_loss_within_bounds(honest: list[float], data: st.DataObject) -> None:
    lies = data.draw(st.lists(st.floats(-1e6, 1e6), max_size=len(honest) - 1))
    found, largest, clients = averaged([*honest, *lies], [], 0.9), max(honest), len(honest) + len(lies)
    assert found <= (sum(honest) + 2 * largest * len(lies)) / clients * (1 + 1e-12)


def test_losses_that_a_private_aggregation_hides_set_no_levels() -> None:
    algorithm = DAdaQuant(training=TRAINING, aggregation=Private())
    site = tiny_site(algorithm)
    with pytest.raises(ConfigError):
        start_of(algorithm, site)
    assert start_of(replace(algorithm, phi=None), site).level == 1
