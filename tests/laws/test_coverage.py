"""How many rounds it takes until every channel was trained (FedRolex, section 3.2.4): a rolling window against random
draws. Lemma 1 is a coupon collector's time, Lemma 2 that of collecting every coupon m times."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from fl_engine.core.types import Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.core.widths import random_drop, rolling, window_start

RUNS = 400


def layout_of(indices: int) -> ParamLayout:
    return ParamLayout({"g": indices}, {"w": Slot("b", (Axis("g"),))})


def lemma_1(indices: int) -> float:
    """I (1/I + 1/(I-1) + ... + 1)."""
    return indices * sum(1 / i for i in range(1, indices + 1))


def lemma_2(indices: int, times: int) -> float:
    """I times the integral over t from 0 of 1 - (1 - S_m(t) e^-t)^I, S_m(t) = sum of t^l / l! for l < m (Eq. 3.8)."""
    t = np.linspace(0, 80, 200_001)
    partial_sum = sum(t**power / math.factorial(power) for power in range(times))
    return float(indices * np.trapezoid(1 - (1 - partial_sum * np.exp(-t)) ** indices, t))


def rounds_until(indices: int, times: int, draw: Callable[[ParamLayout, int], SubmodelSpec]) -> int:
    """How many rounds until every channel was kept so many times."""
    layout, seen = layout_of(indices), np.zeros(indices, dtype=int)
    for round in count():
        keep = layout.indices(draw(layout, round), "g")
        seen[list(range(keep)) if isinstance(keep, int) else list(keep)] += 1
        if seen.min() >= times:
            return round + 1
    raise AssertionError


def test_the_lemmas_by_hand() -> None:
    """Two coins: a first side, then the other after two tosses on average. Both sides twice: after n tosses one side is
    there once or never with probability (n + 1) / 2^(n - 1), from n = 3 on; the expectation is 5.5."""
    assert lemma_1(2) == 3
    assert lemma_2(2, 2) == pytest.approx(3 + sum((n + 1) / 2 ** (n - 1) for n in range(3, 60)), rel=1e-6)
    assert lemma_2(2, 2) == pytest.approx(5.5, rel=1e-6)
    for indices in (1, 2, 5, 16, 100):
        assert lemma_2(indices, 1) == pytest.approx(lemma_1(indices), rel=1e-6), "Lemma 2 with m = 1 is Lemma 1"


@pytest.mark.parametrize(("indices", "times"), [(4, 1), (8, 1), (16, 1), (4, 2), (8, 3)])
def test_random_draws_need_as_many_rounds_as_the_lemmas_say(indices: int, times: int) -> None:
    """Federated Dropout that keeps one of I channels; the mean of 400 runs, within four standard errors."""
    found = []
    for run in range(RUNS):
        rng = np.random.default_rng((run, indices, times))
        found.append(rounds_until(indices, times, lambda layout, _: random_drop(layout, 1 / indices, rng)))  # noqa: B023
    expected = lemma_2(indices, times)
    assert abs(float(np.mean(found)) - expected) < 4 * float(np.std(found)) / math.sqrt(RUNS)
    assert expected > indices * times, "more than a window needs"


@pytest.mark.parametrize(("indices", "kept", "times"), [(4, 1, 1), (16, 1, 1), (8, 1, 3), (16, 4, 1), (16, 4, 2)])
def test_a_window_needs_as_few_rounds_as_there_are_indices(indices: int, kept: int, times: int) -> None:
    """A window of w channels that moves by one: all were in it after I - w + 1 rounds, each in w of every I rounds."""
    width = kept / indices

    def window(layout: ParamLayout, round: int) -> SubmodelSpec:
        return rolling(layout, width, window_start(layout, width, round))

    # The channel before the first window comes in last, in round I - w + 1, and then stays for w rounds.
    full, more = divmod(times - 1, kept)
    assert rounds_until(indices, times, window) == full * indices + indices - kept + 1 + more
    layout, seen = layout_of(indices), np.zeros(indices, dtype=int)
    for round in range(indices):
        keep = layout.indices(window(layout, round), "g")
        seen[list(range(keep)) if isinstance(keep, int) else list(keep)] += 1
    assert set(seen) == {kept}
