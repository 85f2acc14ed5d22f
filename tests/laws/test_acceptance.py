"""Which updates a round takes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.types import FULL, ClientFailure, RoundPlan, WorkOrder
from fl_engine.rounds.acceptance import AVERAGED, FIRST, REMEMBERED, Arrival, History, Moved, refused, remembered
from fl_engine.rounds.terms import RoundsConfig


def of_others(moved: Moved, n: int = 3) -> History:
    """A round of clients that are not asked again."""
    return History(rounds=((moved,) * n,))


USUAL = of_others(Moved(1.0))
SIZE = Moved(10.0, 0.7)
"""Of the weights that are sent, and of their statistics."""


def asking(round: int, clients: int, over: float = 1.0) -> RoundPlan:
    """A plan that asks so many clients, `over` times as many as it wants."""
    orders = tuple(WorkOrder(round, client, FULL, {}, client, 0) for client in range(clients))
    return RoundPlan(round, orders, math.ceil(clients / over - 1e-9))


def arrivals(*seconds: float) -> dict[int, Arrival]:
    return {client: Arrival(Moved(1.0), s) for client, s in enumerate(seconds)}


def stages(found: dict[int, ClientFailure]) -> dict[int, str]:
    return {client: failure.stage for client, failure in found.items()}


def moving(*moved: float) -> dict[int, Arrival]:
    return {client: Arrival(Moved(far), 0.0) for client, far in enumerate(moved)}


def test_who_moved_much_further_than_the_median_is_not_taken() -> None:
    terms = RoundsConfig(norm_bound=10.0)
    assert refused(asking(0, 3), {}, terms, USUAL) == {}
    just = moving(1.0, 1.1, 0.9, 10.0)
    assert refused(asking(0, 4), just, terms, USUAL) == {}
    (failure,) = refused(asking(7, 4), just | {3: Arrival(Moved(11.0), 0.0)}, terms, USUAL).values()
    assert (failure.round, failure.client, failure.stage) == (7, 3, "validate")
    assert failure.code == "norm" and "rounds.norm_bound = 10" in failure.reason and "null" in failure.reason
    for no_number in (float("inf"), float("nan")):
        assert stages(refused(asking(0, 4), just | {3: Arrival(Moved(no_number), 0.0)}, terms, USUAL)) == {
            3: "validate"
        }


def test_statistics_are_compared_with_statistics() -> None:
    terms, history = RoundsConfig(norm_bound=10.0), of_others(Moved(1.0, 0.01))
    honest = {0: Arrival(Moved(1.1, 0.02), 0.0), 1: Arrival(Moved(9.0, 0.01), 0.0)}
    assert refused(asking(0, 2), honest, terms, history) == {}
    (failure,) = refused(asking(0, 2), honest | {1: Arrival(Moved(0.9, 0.2), 0.0)}, terms, history).values()
    assert failure.code == "statistics"


@pytest.mark.parametrize("others", [(), (1.2,), (1.2, 0.8)])
def test_the_first_round_has_a_bound_too(others: tuple[float, ...]) -> None:
    terms = RoundsConfig(norm_bound=8.0)
    assert refused(asking(0, 3), moving(1.0, *others), terms, History(), SIZE) == {}
    for attack in (90.0, 1e3, 1e30):
        assert list(refused(asking(0, 3), moving(attack, *others), terms, History(), SIZE)) == [0]
    alone = {0: Arrival(Moved(1.0, 8.1 * FIRST.statistics * 0.7), 0.0)}
    assert "statistics" in refused(asking(0, 1), alone, terms, History(), SIZE)[0].reason


def working(*moved: tuple[float, float]) -> dict[int, Arrival]:
    """(how far, in how many steps)."""
    return {client: Arrival(Moved(far, 0.0, steps), 0.0) for client, (far, steps) in enumerate(moved)}


def test_movement_may_grow_with_the_root_of_the_steps() -> None:
    """By hand: in the median one step moves 1, and one over its root too, so that 100 steps usually move 10."""
    terms, others = RoundsConfig(norm_bound=5.0), [(1.0, 1.0)] * 4
    history = History(rounds=((Moved(1.0),) * 4,))
    assert refused(asking(0, 5), working(*others, (50.0, 100.0)), terms, history) == {}
    (failure,) = refused(asking(0, 5), working(*others, (51.0, 100.0)), terms, history).values()
    assert failure.code == "norm"
    assert set(refused(asking(0, 5), working(*others, (5.1, 1.0)), terms, history)) == {4}, "nobody else may"


@given(
    far=st.lists(st.floats(0.5, 2.0), min_size=5, max_size=20),
    steps=st.lists(st.integers(1, 10_000), min_size=20, max_size=20),
)
def test_a_random_walk_of_any_number_of_steps_is_taken(far: list[float], steps: list[int]) -> None:
    arrived = working(*((each * math.sqrt(count), count) for each, count in zip(far, steps, strict=False)))
    assert refused(asking(0, len(far)), arrived, RoundsConfig(norm_bound=5.0), History()) == {}


def rounds_of(history: History, bad: Callable[[History], float], rounds: int, bound: float) -> tuple[History, int]:
    """Three honest clients and a bad one each; (what is remembered, honest ones refused)."""
    terms, honest_refused = RoundsConfig(norm_bound=bound), 0
    for round in range(rounds):
        arrived = moving(0.5, 1.0, 2.0, bad(history))
        found = refused(asking(round, 4), arrived, terms, history, SIZE)
        honest_refused += len(found.keys() - {3})
        history = remembered(history, {client: arrival.moved for client, arrival in arrived.items()}, SIZE)
    return history, honest_refused


def test_nobody_raises_the_bound_by_staying_just_below_it() -> None:
    bound, taken = 8.0, list[float]()

    def as_far_as_is_taken(history: History) -> float:
        terms, others = RoundsConfig(norm_bound=bound), (0.5, 1.0, 2.0)

        def too_far(hundredths: int) -> bool:
            return 3 in refused(asking(0, 4), moving(*others, 0.01 * hundredths), terms, history, SIZE)

        taken.append(0.01 * (bisect_left(range(4001), True, key=too_far) - 1))
        return taken[-1]

    _, honest_refused = rounds_of(History(), as_far_as_is_taken, 40, bound)
    assert honest_refused == 0
    assert max(taken[1:]) <= bound * 1.0 and fmean(taken[4:]) == pytest.approx(bound / 2 * 1.0, rel=0.01)


@pytest.mark.parametrize(("before", "now", "taken"), [
    ((), 7.9, True),  # once, nobody knows
    ((1.0,), 7.0, True), ((1.0,), 7.1, False),
    ((2.0, 2.0, 2.0), 7.9, True), ((3.0, 3.0, 3.0), 6.9, True), ((3.0, 3.0, 3.0), 7.1, False),
    ((1e6, 1.0, 1.0), 1.0, True), ((1e6, 1.0, 1.0), 4.0, True), ((1e6, 1.0, 1.0), 4.1, False),
])  # fmt: skip
def test_long_update_is_taken_after_short_ones(before: tuple[float, ...], now: float, taken: bool) -> None:
    assert AVERAGED == 4
    history = replace(of_others(Moved(1.0), 40), times={0: tuple(Moved(times) for times in before), 7: (Moved(9.0),)})
    arrived = {client: Arrival(Moved(far), 0.0) for client, far in ((0, now), (1, 1.0), (2, 1.0))}
    found = refused(asking(0, 3), arrived, RoundsConfig(norm_bound=8.0), history)
    assert list(found) == ([] if taken else [0])


def test_who_comes_after_the_deadline_is_late() -> None:
    found = refused(asking(0, 3), arrivals(1.0, 5.0, 5.1), RoundsConfig(norm_bound=None, deadline_s=5.0))
    assert stages(found) == {2: "straggle"}
    assert "5.1 s" in found[2].reason and "rounds.deadline_s = 5" in found[2].reason
    found = refused(asking(0, 1), arrivals(0.034), RoundsConfig(norm_bound=None, deadline_s=0.02))
    assert "0.034 s" in found[0].reason and "rounds.deadline_s = 0.02" in found[0].reason


def test_of_more_than_are_wanted_the_first_are_taken() -> None:
    terms = RoundsConfig(norm_bound=None, over_provision=2.0)
    assert stages(refused(asking(0, 6, 2.0), arrivals(3, 1, 2, 3, 9, 8), terms)) == {
        3: "straggle",
        5: "straggle",
        4: "straggle",
    }
    assert refused(asking(0, 6, 2.0), {4: Arrival(Moved(1.0), 9.0)}, terms) == {}, "fewer came: all are taken"


def test_one_that_is_refused_for_what_it_is_takes_nobodys_place() -> None:
    terms = RoundsConfig(norm_bound=10.0, over_provision=2.0)
    quick_liar = arrivals(3, 1, 2, 4) | {1: Arrival(Moved(1e6), 0.0)}
    assert stages(refused(asking(0, 4, 2.0), quick_liar, terms, USUAL)) == {1: "validate", 3: "straggle"}
    late_liar = arrivals(1, 1, 9) | {2: Arrival(Moved(1e6), 9.0)}
    late_terms = RoundsConfig(norm_bound=10.0, deadline_s=5.0)
    assert stages(refused(asking(0, 3), late_liar, late_terms, USUAL)) == {2: "validate"}


def test_quorum_counts_wanted_updates_not_asked_clients() -> None:
    terms = RoundsConfig(norm_bound=None, quorum=1.0, over_provision=1.5)
    assert stages(refused(asking(0, 6, 1.5), arrivals(1, 2, 3, 4, 5), terms)) == {4: "straggle"}
    assert set(stages(refused(asking(0, 6, 1.5), arrivals(1, 2, 3), terms)).values()) == {"quorum"}


@given(
    st.dictionaries(st.integers(0, 30), st.tuples(st.floats(0, 1e3), st.floats(0, 100)), max_size=20),
    st.floats(1, 4), st.none() | st.floats(0.1, 100), st.floats(0, 1), st.none() | st.floats(0.5, 100),
)  # fmt: skip
def test_the_order_in_which_updates_arrive_decides_nothing(
    found: dict[int, tuple[float, float]], over: float, deadline_s: float | None, quorum: float, bound: float | None
) -> None:
    terms = RoundsConfig(norm_bound=bound, over_provision=over, deadline_s=deadline_s, quorum=quorum)
    came = {client: Arrival(Moved(values[0]), values[1]) for client, values in found.items()}
    backwards = dict(reversed(came.items()))
    assert refused(asking(0, 31, over), came, terms) == refused(asking(0, 31, over), backwards, terms)
    taken = len(came) - len(refused(asking(0, 31, over), came, terms))
    assert taken == 0 or taken >= quorum * 31 / over - 1 - 1e-6


def test_a_run_whose_honest_updates_come_to_move_further_goes_on() -> None:
    """What is refused is remembered: after as many as are remembered of before, they are the usual."""
    history, terms = of_others(Moved(0.01), REMEMBERED), RoundsConfig(norm_bound=8.0)
    rounds = 0
    while refused(asking(rounds, 2), moving(1.0, 1.0), terms, history, SIZE):
        history = remembered(history, {0: Moved(1.0), 1: Moved(1.0)}, SIZE)
        rounds += 1
    assert rounds == REMEMBERED // 2
