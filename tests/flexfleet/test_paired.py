"""The paired comparison of two labels: Student's t, Holm's adjustment, and what few seeds can show."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError
from flexfleet.api.paired import Paired, paired, seeds_for, smallest_p
from flexfleet.experiments.ranking import LEVEL, holm, t_quantile, two_sided

PRINTED = {  # two-sided 5 % and 1 %: Student's t in any book's table
    1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 5: (2.571, 4.032), 9: (2.262, 3.250),
    10: (2.228, 3.169), 19: (2.093, 2.861), 30: (2.042, 2.750), 120: (1.980, 2.617),
}  # fmt: skip


@pytest.mark.parametrize("freedom", PRINTED)
def test_the_t_quantiles_are_those_of_printed_tables(freedom: int) -> None:
    for share, value in zip((0.975, 0.995), PRINTED[freedom], strict=True):
        assert t_quantile(share, freedom) == pytest.approx(value, abs=5.1e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 20, 99])
def test_the_t_distribution_is_scipys(freedom: int) -> None:
    student = pytest.importorskip("scipy.stats").t
    for t in (0.0, 0.1, 1.0, -2.5, 7.0, 40.0):
        assert two_sided(t, freedom) == pytest.approx(2 * student.sf(abs(t), freedom), rel=1e-9, abs=1e-14)
    for share in (0.5, 0.9, 0.975, 0.9995, 1 - 0.002 / 96):  # the last as a night of 96 figures asks
        assert t_quantile(share, freedom) == pytest.approx(student.ppf(share, freedom), rel=1e-9, abs=1e-12)


def test_one_and_two_degrees_of_freedom_by_hand() -> None:
    """Cauchy: P(|t| > 1) is a half. Two degrees: P(|t| > t) is 1 - t / sqrt(2 + t^2)."""
    assert two_sided(1.0, 1) == pytest.approx(0.5)
    assert two_sided(3.0, 2) == pytest.approx(1 - 3 / math.sqrt(11))


def test_holm_by_hand() -> None:
    # 4 x 0.01, 3 x 0.02, 2 x 0.03 = 0.06 and so is the one before, 1 x 0.04 is smaller than that.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_the_order_and_never_makes_smaller(p: list[float]) -> None:
    found = holm(p)
    assert all(before <= after <= 1 for before, after in zip(p, found, strict=True))
    assert all(found[i] <= found[j] for i in range(len(p)) for j in range(len(p)) if p[i] < p[j])


def test_interval_and_p_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, t = 2 sqrt 3, half the width 4.302653 / sqrt 3."""
    found = paired({"a": [2.0, 4.0, 6.0], "b": [1.0, 2.0, 3.0]}, (0, 1, 2), "a", "b", "full")
    assert found.differences == (1.0, 2.0, 3.0)
    assert found.mean == 2.0
    assert found.interval == pytest.approx((2 - 2.484137, 2 + 2.484137), abs=1e-5)
    assert found.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))  # 2 degrees of freedom, t^2 = 12
    assert found.p_holm == found.p
    assert found.pairs == 1


def test_it_is_scipys_test_and_the_other_way_round() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = {"a": [0.81, 0.79, 0.85, 0.83], "b": [0.80, 0.80, 0.82, 0.79], "c": [0.5, 0.61, 0.55, 0.52]}
    pairs = (("a", "b"), ("a", "c"), ("b", "c"))
    tests = {(a, b): float(stats.ttest_rel(values[a], values[b]).pvalue) for a, b in pairs}
    adjusted = dict(zip(tests, holm(list(tests.values())), strict=True))
    for a, b in tests:
        found, back = (paired(values, range(4), x, y) for x, y in ((a, b), (b, a)))
        assert found.p == pytest.approx(tests[a, b])
        assert found.p_holm == pytest.approx(adjusted[a, b])
        interval = stats.ttest_rel(values[a], values[b]).confidence_interval(0.95)
        assert found.interval == pytest.approx((interval.low, interval.high))
        assert back.interval is not None and found.interval is not None
        assert back.mean == pytest.approx(-found.mean)
        assert (back.p, back.p_holm) == (found.p, found.p_holm)
        assert back.interval == pytest.approx((-found.interval[1], -found.interval[0]))


@pytest.mark.parametrize("n", range(1, 8))
def test_no_permutation_test_reaches_less(n: int) -> None:
    """All signs of n differences, counted: the most extreme mean comes twice."""
    means = [
        abs(fmean(s * d for s, d in zip(signs, range(1, n + 1), strict=True))) for signs in product((1, -1), repeat=n)
    ]
    assert sum(mean >= max(means) for mean in means) / len(means) == smallest_p(n)


def test_three_seeds_say_what_they_cannot_show() -> None:
    found = paired({"a": [0.9, 0.8, 0.7], "b": [0.1, 0.2, 0.0]}, (0, 1, 2), "a", "b")
    text = str(found)
    assert "2 degrees of freedom" in text
    assert "With 3 seeds, no sign test and no permutation test can reach a two-sided p below 0.25: 6 seeds" in text
    assert "Holm" not in text, "one pair needs no adjustment"
    assert seeds_for(1) == 6 and smallest_p(6) <= LEVEL < smallest_p(5)


def test_more_pairs_want_more_seeds() -> None:
    values = {name: [0.1 * i * (k + 1) ** 2 for k in range(6)] for i, name in enumerate("abc", 1)}
    six = paired(values, range(6), "a", "b")
    assert six.pairs == 3
    assert "below 0.0312, and 0.0938 after Holm over 3 pairs: 7 seeds" in str(six)
    seven = paired({name: [*each, 0.3] for name, each in values.items()}, range(7), "a", "b")
    assert len(seven.limits) == 1, "with seven seeds such a test can reach 0.05"


def test_one_seed_and_equal_differences_have_no_test() -> None:
    one = paired({"a": [0.5], "b": [0.25]}, (3,), "a", "b")
    assert (one.mean, one.interval, one.p, one.p_holm) == (0.25, None, None, None)
    assert "neither an interval nor a test" in str(one)
    equal = paired({"a": [0.3, 0.4], "b": [0.2, 0.3]}, (0, 1), "a", "b")
    assert equal.differences[0] != equal.differences[1], "they differ in the last bit"
    assert (equal.interval, equal.p) == (None, None)
    assert "All differences are equal" in str(equal)
    same = paired({"a": [0.3, 0.4], "b": [0.3, 0.4]}, (0, 1), "a", "b")
    assert (same.mean, same.interval, same.p, same.p_holm) == (0.0, None, None, None)
    assert "All differences are equal" in str(same)
    assert "1 degree of freedom" in str(paired({"a": [0.3, 0.5], "b": [0.3, 0.4]}, (0, 1), "a", "b"))
    far = paired({"a": [1 + k * 1e-9 for k in range(9)], "b": [0.0] * 9}, range(9), "a", "b")
    assert far.p is not None and far.p < 1e-12 and "p < 1e-12" in str(far)


def test_labels_without_the_metric_are_in_no_pair() -> None:
    values: dict[str, list[float | None]] = {"a": [0.1, 0.3], "b": [0.2, 0.1], "large": [None, None]}
    found: Paired = paired(values, (0, 1), "a", "b")
    assert found.pairs == 1
    with pytest.raises(ConfigError, match="large has no avg: compare another metric"):
        paired(values, (0, 1), "a", "large")
    with pytest.raises(ConfigError, match=r"no label 'lage'.*did you mean 'large'"):
        paired(values, (0, 1), "a", "lage")
    with pytest.raises(ConfigError, match="itself"):
        paired(values, (0, 1), "a", "a")
