"""The paired comparison of two labels: Student's t, Holm's adjustment, and what few seeds can show."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError
from flexfleet.api.paired import Paired, paired, smallest_p
from flexfleet.experiments.ranking import holm


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


@pytest.mark.parametrize("n", range(1, 8))
def test_no_permutation_test_reaches_less(n: int) -> None:
    """All signs of n differences, counted: the most extreme mean comes twice."""
    means = [
        abs(fmean(s * d for s, d in zip(signs, range(1, n + 1), strict=True))) for signs in product((1, -1), repeat=n)
    ]
    assert sum(mean >= max(means) for mean in means) / len(means) == smallest_p(n)


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
