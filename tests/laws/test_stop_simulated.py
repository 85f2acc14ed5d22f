"""`rounds.stop_simulated_s`: a run ends after the first round at whose end so many simulated seconds have passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import Store
from tests.harness.ledgers import after

Make = Callable[[], Store]
Rows = Callable[[Store], list[Any]]
MODES: list[dict[str, Any]] = [
    {"commit_every": 1},
    {"commit_every": 3},
    {"commit_every": "auto", "keep_updates": True},
    {"commit_every": 1, "mode": "buffered", "buffer": 1, "norm_bound": None},
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.get("mode", str(mode["commit_every"])))


def clocks(store: Store) -> list[float]:
    """The simulated clock at the end of each round."""
    return list(accumulate(row.metrics.get("seconds_simulated", 0.0) for row in Checkpoints(store).rows()))


@pytest.mark.parametrize(
    ("stop", "limit", "seconds", "end"),
    [
        (9, 25.0, [10, 10, 10, 10], 3),  # 30 s is the first that is not below 25
        (9, 20.0, [10, 10, 10], 2),  # exactly
        (9, 25.0, [10, 10], None),
        (9, 25.0, [], None),
        (2, 25.0, [10, 10, 10], 2),  # rounds.stop comes first
        (9, None, [10] * 8, None),
        (9, None, [10] * 9, 9),
        (9, 5.0, [None, 10], 2),  # a round that takes no simulated time
    ],
)
def test_the_end_by_hand(stop: int, limit: float | None, seconds: Sequence[float | None], end: int | None) -> None:
    terms = RoundsConfig(stop=stop, stop_simulated_s=limit)
    measured = [{} if each is None else {"seconds_simulated": float(each)} for each in seconds]
    assert terms.end(measured) == end


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=30), st.integers(1, 30), st.one_of(st.none(), st.floats(1e-3, 1e5))
)
def test_the_end_is_the_first_round_that_is_over(seconds: list[float], stop: int, limit: float | None) -> None:
    terms = RoundsConfig(stop=stop, stop_simulated_s=limit)
    measured = [{"seconds_simulated": each} for each in seconds]
    over = [terms.over(i, clock) for i, clock in enumerate(accumulate(seconds, initial=0.0)) if i]
    assert over == sorted(over), "once over, always over"
    assert terms.end(measured) == (over.index(True) + 1 if True in over else None)
    for known in range(len(measured)):
        told = terms.end(measured[:known])
        assert told in (None, terms.end(measured))


@modes
def test_killed_and_resumed_it_ends_in_the_same_round(
    job: Any, new_store: Make, timeless: Rows, mode: dict[str, Any]
) -> None:
    job.federate(new := new_store(), stop=6, **mode)
    terms = {"stop": 6, "stop_simulated_s": clocks(new)[2], **mode}
    undisturbed = new_store()
    expected = job.federate(undisturbed, **terms)
    assert len(clocks(undisturbed)) == 3
    for answers in range(1, 7):
        store, stopped = new_store(), False
        try:
            job.federate(store, after(answers), **terms)
        except Stopped:
            stopped = True
        assert stopped or answers > 3, f"stopped after {answers} clients"
        assert job.federate(store, **terms) == expected, f"stopped after {answers} clients"
        assert timeless(store) == timeless(undisturbed)
        assert job.federate(store, **terms) == expected, "a finished run that is resumed makes no further round"
        assert clocks(store) == clocks(undisturbed)


def test_a_raised_limit_goes_on_and_a_lowered_one_is_refused(job: Any, new_store: Make) -> None:
    job.federate(new := new_store(), stop=6)
    times, store = clocks(new), new_store()
    job.federate(store, stop=6, stop_simulated_s=times[1])
    with pytest.raises(ConfigError, match=r"rounds\.stop_simulated_s = .* passes in round 1, but 2 rounds are commit"):
        job.federate(store, stop=6, stop_simulated_s=times[0])
    found = job.federate(store, stop=6, stop_simulated_s=times[3])
    assert len(clocks(store)) == 4
    assert found == job.federate(new_store(), stop=6, stop_simulated_s=times[3])
    assert job.federate(store, stop=5) == job.federate(new_store(), stop=5), "without the limit"
    with pytest.raises(ConfigError, match=r"rounds\.stop = 4, but 5 rounds are committed: a run cannot go back"):
        job.federate(store, stop=4)
