"""DAdaQuant: its levels by hand, in time and between clients; what a liar can gain; the same bits after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.aggregation.rules import Median, Private, TrimmedMean
from fl_engine.algorithms.dadaquant import DAdaQuant, averaged, doubled, levels_of
from fl_engine.codecs.qsgd import MOST_LEVELS, Qsgd
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Codecs, Device
from fl_engine.testing.tiny import TRAINING, context_of, start_of, tiny_site

STRONG = tuple(Device(client, "strong", 110.0, 0.0) for client in range(5))
ALL = replace(TRAINING, fraction=1.0)


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
    order = sorted(range(len(counts)), key=lambda i: counts[i])
    assert [found[i] for i in order] == sorted(found), "who weighs more has no fewer"


def test_assignments_give_levels_for_the_way_up_only() -> None:
    algorithm = DAdaQuant(training=ALL, q_min=100)
    site = tiny_site(algorithm, fleet=STRONG[:2], sizes=(1, 8))
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0))
    assert [order.codecs for order in plan.orders] == [Codecs(up=Qsgd(levels=q, bucket=512)) for q in (28, 111)]
    alike = replace(algorithm, weighting="uniform", bucket=None)
    plan = alike.plan(start_of(alike, site), context_of(site, 0))
    assert [order.codecs for order in plan.orders] == [Codecs(up=Qsgd(levels=100, bucket=None))] * 2
    for counts_alike in (Median(), TrimmedMean(), Private()):
        other = replace(algorithm, aggregation=counts_alike, phi=None)
        plan = other.plan(start_of(other, site), context_of(site, 0))
        assert [order.codecs for order in plan.orders] == [Codecs(up=Qsgd(levels=100, bucket=512))] * 2
    with pytest.raises(ConfigError, match="levels follow from how many samples each client holds"):
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
    with pytest.raises(ConfigError, match=r"algorithm\.phi=null"):
        start_of(algorithm, site)
    assert start_of(replace(algorithm, phi=None), site).level == 1
