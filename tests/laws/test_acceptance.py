"""Which updates a round takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.acceptance import Arrival, refused, unconditional
from fl_engine.config import RoundsConfig
from fl_engine.types import ClientFailure

NO_TERMS = RoundsConfig(norm_bound=None)


def arrivals(*seconds: float) -> dict[int, Arrival]:
    return {client: Arrival(1.0, s) for client, s in enumerate(seconds)}


def stages(found: dict[int, ClientFailure]) -> dict[int, str]:
    return {client: failure.stage for client, failure in found.items()}


def test_without_terms_all_are_taken() -> None:
    assert unconditional(NO_TERMS)
    assert refused(0, 5, arrivals(1, 2, 1e9), NO_TERMS) == {}
    assert not unconditional(RoundsConfig()), "the norm bound is on"
    for term in ({"norm_bound": 2.0}, {"deadline_s": 1.0}, {"over_provision": 1.5}, {"quorum": 0.5}):
        assert not unconditional(NO_TERMS.model_copy(update=term))


def test_who_moved_much_further_than_the_median_is_not_taken() -> None:
    terms = RoundsConfig(norm_bound=10.0)
    assert refused(0, 3, {}, terms) == {}
    just = {client: Arrival(moved, 0.0) for client, moved in enumerate((1.0, 1.1, 0.9, 10.5))}
    assert refused(0, 4, just, terms) == {}
    (failure,) = refused(7, 4, just | {3: Arrival(11.0, 0.0)}, terms).values()
    assert (failure.round, failure.client, failure.stage) == (7, 3, "validate")
    assert failure.reason == "norm: moved 11 a weight, 10 times the median is 10.5"
    endless = refused(0, 4, just | {3: Arrival(float("inf"), 0.0)}, terms)
    assert stages(endless) == {3: "validate"}


def test_who_comes_after_the_deadline_is_late() -> None:
    found = refused(0, 3, arrivals(1.0, 5.0, 5.1), RoundsConfig(norm_bound=None, deadline_s=5.0))
    assert stages(found) == {2: "straggle"}
    assert "took 5.1 s on the simulated clock, the deadline is 5 s" in found[2].reason


def test_of_more_than_are_wanted_the_first_are_taken() -> None:
    """Three are wanted of six; clients that come at the same time count by number."""
    terms = RoundsConfig(norm_bound=None, over_provision=2.0)
    assert stages(refused(0, 6, arrivals(3, 1, 2, 3, 9, 8), terms)) == {3: "straggle", 5: "straggle", 4: "straggle"}
    assert refused(0, 6, {4: Arrival(1.0, 9.0)}, terms) == {}, "fewer came: all are taken"


def test_one_that_is_refused_for_what_it_is_takes_nobodys_place() -> None:
    terms = RoundsConfig(norm_bound=10.0, over_provision=2.0)
    quick_liar = arrivals(3, 1, 2, 4) | {1: Arrival(1e6, 0.0)}
    assert stages(refused(0, 4, quick_liar, terms)) == {1: "validate", 3: "straggle"}
    late_liar = arrivals(1, 1, 9) | {2: Arrival(1e6, 9.0)}
    assert stages(refused(0, 3, late_liar, RoundsConfig(norm_bound=10.0, deadline_s=5.0))) == {2: "validate"}


def test_with_fewer_than_the_quorum_the_model_is_carried_forward() -> None:
    terms = RoundsConfig(norm_bound=None, quorum=0.6)
    assert refused(0, 5, arrivals(1, 1, 1), terms) == {}
    found = refused(0, 5, arrivals(1, 1), terms)
    assert stages(found) == {0: "quorum", 1: "quorum"}
    assert found[0].reason == "2 of 5 updates, 3 are needed: the model is carried forward"


def test_the_quorum_counts_those_that_were_wanted_not_those_that_were_asked() -> None:
    terms = RoundsConfig(norm_bound=None, quorum=1.0, over_provision=1.5)
    assert stages(refused(0, 6, arrivals(1, 2, 3, 4, 5), terms)) == {4: "straggle"}
    assert set(stages(refused(0, 6, arrivals(1, 2, 3), terms)).values()) == {"quorum"}


@given(
    st.dictionaries(st.integers(0, 30), st.tuples(st.floats(0, 1e3), st.floats(0, 100)), max_size=20),
    st.floats(1, 4), st.none() | st.floats(0.1, 100), st.floats(0, 1), st.none() | st.floats(0.5, 100),
)  # fmt: skip
def test_the_order_in_which_updates_arrive_decides_nothing(
    found: dict[int, tuple[float, float]], over: float, deadline_s: float | None, quorum: float, bound: float | None
) -> None:
    terms = RoundsConfig(norm_bound=bound, over_provision=over, deadline_s=deadline_s, quorum=quorum)
    came = {client: Arrival(*values) for client, values in found.items()}
    backwards = dict(reversed(came.items()))
    assert refused(0, 31, came, terms) == refused(0, 31, backwards, terms)
    taken = len(came) - len(refused(0, 31, came, terms))
    assert taken == 0 or taken >= quorum * 31 / over - 1 - 1e-6


def test_an_impossible_setting_is_refused() -> None:
    for wrong in ({"over_provision": 0.5}, {"quorum": 1.5}, {"deadline_s": 0.0}, {"norm_bound": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RoundsConfig(**wrong)
