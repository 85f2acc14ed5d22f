"""Oort: each formula by hand, whom it asks over several rounds, what a lie is worth, and that every algorithm takes
it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core import seeds
from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.types import FULL, ClientUpdate, WorkOrder
from fl_engine.selection import Oort
from fl_engine.selection.oort import Candidates, rms_loss
from fl_engine.selection.oort_state import ASKED, CLIENT, LAST, NOBODY, SECONDS, UTILITY, Pacer
from tests.harness.oort import FULL_ONLY, POOL, after, answer, asked, column, context, failure, fleet_of

law = settings(max_examples=25)
PACES: dict[str, Any] = {"step": 2, "delta": 5.0, "flat": 0.1, "sharp": 5.0}
NO_PACE = Oort(pacer_start=100.0)
"""Nobody is too slow."""


# --------------------------------------------------------------------------------------------------- the utility
class Client:
    def __init__(self, *losses: float) -> None:
        self.losses = torch.tensor(losses)


def test_a_client_reports_the_root_mean_square_of_its_losses() -> None:
    found: Any = Client(3.0, 4.0)
    assert rms_loss(found) == pytest.approx(math.sqrt(12.5))
    endless: Any = Client(1.0, math.inf)
    assert rms_loss(endless) == LARGEST_LOSS, "as large as anything may be, and clipped like any other"
    nothing: Any = Client(1.0, math.nan)
    assert math.isnan(rms_loss(nothing)), "no value within the declared bounds: the client fails"


def test_the_server_multiplies_it_by_the_samples_that_it_knows() -> None:
    update = ClientUpdate(0, 3, FULL, {}, 7, {"rms_loss": 2.0})
    tables = Oort().learn(Oort().init(fleet_of(4), FULL_ONLY), WorkOrder(0, 3, FULL, {}, 0, 0), update, 4.5)
    assert column(Oort(), tables, 1, UTILITY) == {3: 14.0}
    assert column(Oort(), tables, 1, SECONDS) == {3: 4.5}


# ----------------------------------------------------------------------------------------------------- the score
def test_the_score_by_hand() -> None:
    """Five clients in round 5. Of U = 10 .. 1000 the floor(4 * 0.9) = third from 0 is the clip, 40; least 9.99."""
    utility, last = np.asarray([10.0, 20, 30, 40, 1000]), np.asarray([1.0, 2, 3, 4, 1])
    expected = [(min(u, 40) - 9.99) / 30.01 + math.sqrt(0.1 * math.log(5) / r) for u, r in zip(utility, last)]  # noqa: B905
    assert Oort().scores(utility, last, 5).tolist() == pytest.approx(expected)
    assert expected[:2] == pytest.approx([0.0003332 + 0.4011781, 0.3335555 + 0.2836757], abs=1e-6)
    assert expected[3] - expected[4] == pytest.approx(math.sqrt(0.1 * math.log(5)) * (1 / 2 - 1)), "clipped alike"


def test_slow_clients_lose_by_the_square_of_their_time() -> None:
    """(T / t)^2 where T < t: 10 s preferred."""
    assert Oort().slow(np.asarray([0.0, 5.0, 10.0, 20.0, 40.0]), 10.0).tolist() == [1, 1, 1, 1 / 4, 1 / 16]
    assert Oort(penalty=0.5).slow(np.asarray([40.0]), 10.0).tolist() == [0.5]
    assert Oort().slow(np.asarray([40.0]), math.inf).tolist() == [1.0]


# ----------------------------------------------------------------------------------------------------- the pacer
def paced(percentile: float, brought: Sequence[float], **more: Any) -> list[float]:
    """The percentile before each round."""
    known = dict(enumerate(brought))
    start = Pacer(0, percentile)
    return [start.after(r, known, **{**PACES, **more}).percentile for r in range(len(brought) + 1)]


def test_the_pacer_by_hand() -> None:
    """Every 2 rounds from the fourth on: 10 + 10, then 11 + 11 (10 % more: flat, +5), then 66 + 66 (five times more:
    sharp, -5), then 99 + 99 (half as much again: nothing)."""
    found = paced(30.0, [10, 10, 11, 11, 66, 66, 99, 99, 99])
    assert found == [30, 30, 30, 30, 35, 35, 30, 30, 30, 30]


def test_t_is_a_percentile_of_the_times() -> None:
    seconds = np.asarray([50.0, 10, 40, 20, 30])
    assert [Pacer(0, p).preferred(seconds) for p in (1, 20, 30, 50, 99.9)] == [10, 20, 20, 30, 50]
    assert Pacer(0, 100.0).preferred(seconds) == math.inf


def test_the_time_of_an_order_by_hand() -> None:
    """Of a device with 10^9 multiply-adds and 10^6 bytes a second: three times the forward pass of each sample that is
    drawn, and the model both ways. What the last order took counts if it was of the same model, and only then."""
    (model,) = FULL_ONLY
    fleet = tuple(replace(d, bandwidth=1e6) for d in fleet_of(2))
    now = context(0, fleet, [70, 30], FULL_ONLY, draws=(20, 40))
    (first, second) = Candidates.of(now, np.asarray(NOBODY), "largest").seconds
    moved = (model.bytes + model.bytes_up) / 1e6
    assert model.bytes_up == model.bytes
    assert (first, second) == pytest.approx((3 * model.macs * 20 / 1e9 + moved, 3 * model.macs * 40 / 1e9 + moved))
    for level, expected in ((0, 7.5), (1, first)):
        known = np.asarray([[0.0], [1.0], [1.0], [1.0], [7.5], [float(level)]])
        assert Candidates.of(now, known, "largest").seconds.tolist() == pytest.approx([expected, second])


# ----------------------------------------------------------------------------------------------- exploration, draws


def test_the_round_is_divided_by_epsilon() -> None:
    """20 clients, the first ten asked before; 10 in round 0 and 55: 9 and 3 new ones."""
    oort, fleet = NO_PACE, fleet_of(20)
    tables = after(oort, [dict.fromkeys(range(10), 1.0)], 20)
    for round, new in ((0, 9), (1, 8), (55, 3)):
        found = asked(oort, tables, context(round, fleet, [5] * 20), 10)
        assert len(found) == 10 and sum(c >= 10 for c in found) == new


def test_oort_explores_in_proportion_to_samples() -> None:
    """Two of ten, window 2: of the four largest (40, 30, 20, 10) one is drawn first, then another of the rest."""
    oort, fleet = replace(NO_PACE, explore_window=2.0), fleet_of(10)
    samples = [1, 40, 1, 30, 9, 20, 8, 10, 7, 6]
    found = Counter(
        tuple(asked(oort, oort.init(fleet, FULL_ONLY), context(0, fleet, samples), 2, d)) for d in range(3000)
    )
    p = {1: 0.4, 3: 0.3, 5: 0.2, 7: 0.1}
    expected = {(a, b): p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b]) for a in p for b in p if a < b}
    assert set(found) == set(expected)
    chi = sum((found[pair] - 3000 * share) ** 2 / (3000 * share) for pair, share in expected.items())
    assert chi < 20.515, "five degrees of freedom, once in a thousand"


def scored(cut_off: float, pool: float, count: int, draws: int = 2000) -> Counter[int]:
    """Who is drawn of scores 0.8, 0.7, 0.6, 0.5, 0.1."""
    oort = Oort(cut_off=cut_off, cut_off_pool=pool)
    scores = np.asarray([0.5, 0.8, 0.1, 0.7, 0.6])
    return Counter(int(p) for d in range(draws) for p in oort.exploited(scores, count, seeds.rng(d, "cut off")))


def test_the_cut_off_by_hand() -> None:
    """Two wanted: the third score, 0.6, is the first not preferred. Times 0.7 that is 0.42: four are drawn from."""
    assert set(scored(0.7, 0, 2)) == {0, 1, 3, 4}
    assert set(scored(0.95, 0, 2)) == {1, 3, 4}
    assert set(scored(0.05, 0, 2)) == {0, 1, 2, 3, 4}
    assert set(scored(1.0, 2.0, 2)) == {0, 1, 3, 4}, "at least twice as many"
    first = scored(0.95, 0, 1)  # of 0.8 and 0.7
    assert first[1] / 2000 == pytest.approx(0.8 / 1.5, abs=0.04) and set(first) == {1, 3}
    assert scored(0.7, 0, 5) == Counter(dict.fromkeys(range(5), 2000))


def test_rest_of_oorts_round_is_drawn_uniformly() -> None:
    """Half of 4. Oort's two are the two largest, 8 and 9, which are the only ones preferred; the others come alike."""
    oort = replace(NO_PACE, preferred=0.5, exploration=0.0, exploration_min=0.0, uncertainty=0.0)
    tables = after(oort, [{**dict.fromkeys(range(5), 0.0), 8: 9.0, 9: 9.0}], 10)
    found = Counter[int]()
    for d in range(1500):
        four = asked(oort, tables, context(1, fleet_of(10), [5] * 10), 4, d)
        assert len(set(four)) == 4 and {8, 9} <= set(four)
        found.update(four)
    assert all(found[c] / 1500 == pytest.approx(2 / 8, abs=0.06) for c in range(8))
    nobody = replace(oort, preferred=0.0)
    assert len(asked(nobody, tables, context(1, fleet_of(10), [5] * 10), 4)) == 4


# ---------------------------------------------------------------------------------------------- several rounds


def test_oort_tables_equal_plain_loops_after_many_rounds() -> None:
    """40 rounds of late, failed and merged answers: the same clients, pacer and scores, one client and round at a
    time."""
    oort, fleet, rng = Oort(pacer_step=3, pacer_flat=0.3, pacer_sharp=1.0), fleet_of(12), np.random.default_rng(5)
    tables, plain, history, percentile = oort.init(fleet, FULL_ONLY), dict[int, dict[str, float]](), list[float](), 30.0
    moved = Counter[float]()
    for round in range(40):
        clients, pacer = oort.known(tables, round)
        names = {"utility": UTILITY, "asked": ASKED, "last": LAST, "seconds": SECONDS}
        assert clients[CLIENT].tolist() == sorted(plain)
        for name, row in names.items():
            assert clients[row].tolist() == pytest.approx([plain[c][name] for c in sorted(plain)]), name
        assert pacer.percentile == percentile
        if plain:
            known = sorted(plain)
            ordered = sorted(plain[c]["utility"] for c in known)
            clip, least = ordered[int((len(ordered) - 1) * 0.9)], 0.999 * ordered[0]
            by_hand = [
                (min(plain[c]["utility"], clip) - least) / max(clip - least, 1e-4)
                + math.sqrt(0.1 * math.log(round + 1) / plain[c]["last"])
                for c in known
            ]
            assert oort.scores(clients[UTILITY], clients[LAST], round + 1).tolist() == pytest.approx(by_hand)
        answers: dict[int, tuple[str, float, float]] = {}
        for client in asked(oort, tables, context(round, fleet, [5] * 12), 4, round):
            kind = str(rng.choice(["merged", "merged", "merged", "straggle", "train"]))
            answers[client] = (kind, float(rng.lognormal(round / 8, 1)), float(rng.integers(1, 9)))
            if kind == "merged":
                tables = answer(oort, tables, round, client, *answers[client][1:])
            else:
                late = answers[client][2] if kind == "straggle" else 0.0
                tables = failure(oort, tables, round, client, kind, late)  # type: ignore[arg-type]
        merged = {c: u for c, (kind, u, _) in answers.items() if kind == "merged"}
        old = [u for c, u in merged.items() if c in plain]
        history.append(sum(old) / len(old) if old else 0.0)
        for client, (kind, utility, seconds) in answers.items():
            was = plain.setdefault(client, {"utility": 0.0, "asked": 0.0, "last": 0.0, "seconds": 0.0})
            was["asked"] += 1
            was["last"] = round + 1
            if kind == "merged":
                was |= {"utility": utility, "seconds": seconds}
            elif kind == "train":
                was["utility"] = 0.0
            else:
                was["seconds"] = seconds
                if merged:
                    was["utility"] = sum(merged.values()) / len(merged)
        if len(history) >= 6 and len(history) % 3 == 0:
            before, now = sum(history[-6:-3]), sum(history[-3:])
            change = 5.0 if abs(now - before) <= 0.3 * before else -5.0 if abs(now - before) >= before else 0.0
            moved[change] += 1
            percentile = min(100.0, max(5.0, percentile + change))
    assert len(plain) == 12 and len(moved) == 3, "all cases came"


def test_the_blacklist_by_hand() -> None:
    """Asked 3, 2, 2, 1, 0, ... times. More than 1: clients 0, 1, 2, of which 20 % of ten clients, 2, are barred."""
    rounds = [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, {0: 1.0}]
    oort = replace(NO_PACE, blacklist_after=1, blacklist_most=0.2)
    tables, fleet = after(oort, rounds, 10), fleet_of(10)
    clients, _ = oort.known(tables, 3)
    assert oort.blacklist(clients, 10).tolist() == [0, 1]
    assert replace(oort, blacklist_most=1.0).blacklist(clients, 10).tolist() == [0, 1, 2]
    assert replace(oort, blacklist_after=2).blacklist(clients, 10).tolist() == [0]
    assert asked(oort, tables, context(3, fleet, [5] * 10), 10) == list(range(2, 10))
    off = replace(oort, blacklist_after=None)
    assert asked(off, tables, context(3, fleet, [5] * 10), 10) == list(range(10))


# ---------------------------------------------------------------------------------------------------- edge cases


@law
@given(
    clients=st.integers(1, 12), count=st.integers(0, 14), rounds=st.integers(0, 6), seed=st.integers(0, 2**30),
    preferred=st.floats(0, 1), data=st.data(),
)  # fmt: skip
def test_oort_picks_distinct_available_clients_in_order(
    clients: int, count: int, rounds: int, seed: int, preferred: float, data: st.DataObject
) -> None:
    after_ = data.draw(st.none() | st.integers(1, 3))
    oort = Oort(preferred=preferred, blacklist_after=after_, pacer_step=1)
    fleet, samples = fleet_of(clients), data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))
    tables = oort.init(fleet, POOL)
    for round in range(rounds):
        here = tuple(d for d in fleet if data.draw(st.booleans()))
        now = context(round, fleet, samples, POOL, available=here)
        before = json.dumps(tables)
        picks = oort.pick(tables, now, count, np.random.default_rng(seed + round))
        assert oort.pick(tables, now, count, np.random.default_rng(seed + round)) == picks
        assert json.dumps(tables) == before
        found = [client for client, _ in picks]
        assert found == sorted(set(found)) and set(found) <= {d.client for d in here}
        assert len(found) <= min(count, len(here))
        if after_ is None:
            assert len(found) == min(count, len(here))
        for client in found:
            said = data.draw(st.floats(0, 1e6) | st.sampled_from(["drop", "straggle"]))
            if isinstance(said, str):
                tables = failure(oort, tables, round, client, said)  # type: ignore[arg-type]
            else:
                tables = answer(oort, tables, round, client, said, data.draw(st.floats(0, 1e6)))
        stored = json.loads(json.dumps(tables))
        assert oort.known(stored, round + 1)[0].tolist() == oort.known(tables, round + 1)[0].tolist()


# ----------------------------------------------------------------------------------------------------------- lies
def test_the_largest_lie_is_worth_the_clip_and_moves_nobody_else() -> None:
    honest, last = np.linspace(1, 20, 20), np.full(21, 3.0)
    with_lie = Oort().scores(np.append(honest, 1e12), last, 10)
    assert with_lie[-1] == with_lie[18] == with_lie.max(), "as much as an ordinary client, no more"
    assert np.all(np.diff(with_lie[:19]) > 0.04), "the others still differ: they are not flattened"
    two = Oort().scores(np.asarray([3.0, 1e12]), np.ones(2), 1)
    assert two[0] == two[1], "also where few are known"


def test_oort_asks_lying_client_no_more_often_than_honest_ones() -> None:
    """40 clients, 4 a round, 300 rounds. Client 0 lies; clients 1 to 5 honestly have the largest utility."""
    oort, fleet = NO_PACE, fleet_of(40)
    tables, times = oort.init(fleet, FULL_ONLY), Counter[int]()
    for round in range(300):
        for client in asked(oort, tables, context(round, fleet, [5] * 40), 4, round):
            times[client] += 1
            said = LARGEST_LOSS if client == 0 else 10.0 if client < 6 else 1.0 + client / 40
            tables = answer(oort, tables, round, client, said)
    most = max(times[c] for c in range(1, 6))
    assert times[0] < 1.25 * most and times[0] < 150, f"{times[0]} of 300 rounds, the others {most}"
    assert min(times[c] for c in range(1, 6)) > max(times[c] for c in range(6, 40)), "utility still counts"
