"""What devices do over time: looked up, integrated, drawn, and what the simulated clock makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Device
from fl_engine.fleet.devices import Took
from fl_engine.fleet.lognormal import LogNormal, efficiency
from fl_engine.fleet.trace import Trace, Varying, took, trace_of
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore
from fl_engine.testing import played
from fl_engine.testing.tiny import TRAINING, assert_same_bits, tiny_site

law = settings(max_examples=80)

ON, OFF = (True, 2.0, 10.0), (False, 1.0, 1.0)
"""(online, multiply-adds per second, bytes per second)"""


def always(*clients: tuple[bool, float, float]) -> Trace:
    return trace_of([[(0.0, *state)] for state in clients])


def devices(clients: int) -> tuple[Device, ...]:
    return tuple(Device(c, "t", 50.0, 0.0, speed=1e9, bandwidth=1e6) for c in range(clients))


# ------------------------------------------------------------------------------------------------ looked up
def test_trace_online_arrivals_and_departures_by_hand() -> None:
    trace = trace_of([[(0, *ON), (10, *OFF), (15, *ON)], [(5, *ON)], [], [(0, *OFF)]])
    seen = {at: np.flatnonzero(trace.now(at).online).tolist() for at in (0, 4.9, 5, 9.9, 10, 14.9, 15, 1e6)}
    assert seen == {0: [0], 4.9: [0], 5: [0, 1], 9.9: [0, 1], 10: [1], 14.9: [1], 15: [0, 1], 1e6: [0, 1]}
    assert [trace.arrives(at) for at in (0, 5, 14, 15, 99)] == [5, 15, 15, math.inf, math.inf]
    assert [trace.leaves(0, at) for at in (0, 9, 10, 15)] == [10, 10, 10, math.inf]
    assert [trace.leaves(c, 7) for c in (1, 2, 3)] == [math.inf, 7, 7]


@law
@given(st.data())
def test_a_look_at_all_clients_and_at_each_agree(data: st.DataObject) -> None:
    moments = st.lists(st.integers(0, 19), min_size=1, max_size=6, unique=True).map(sorted)
    rows = [
        [(at, data.draw(st.booleans()), 1.0 + at, 5.0 + c) for at in data.draw(moments)]
        for c in range(data.draw(st.integers(1, 4)))
    ]
    period = data.draw(st.sampled_from((math.inf, 20.0, 23.1)))
    trace = trace_of(rows, period)
    at = data.draw(st.one_of(st.integers(0, 90), st.floats(0, 90)))
    now, arrival = trace.now(at), trace.arrives(at)
    assert arrival > at
    local = math.fmod(at + 2e-6, period)
    for c, each in enumerate(rows):
        held = [row for row in each if row[0] <= local]
        assert bool(now.online[c]) == bool(held and held[-1][1])
        leaves = trace.leaves(c, at)
        assert (leaves > at) == now.online[c]
        if now.online[c]:
            first = next(trace.pieces(c, at))
            assert (first.speed, first.bandwidth) == (now.speed[c], now.bandwidth[c])
            assert leaves == math.inf or not trace.now(leaves).online[c]
            assert trace.now(min(leaves - 1e-3, at + 100)).online[c] or leaves - 1e-3 < at
    if arrival < math.inf:
        assert trace.now(arrival).online.any()
        before = [trace.now(at + (arrival - at) * share).online for share in (0.3, 0.9)]
        assert not (~before[0] & before[1]).any(), "nobody comes before the next arrival"


@pytest.mark.parametrize("turn", [0, 1, 3, 10**3, 10**6])
def test_at_the_time_of_a_row_it_holds_however_late(turn: int) -> None:
    period = 518400.1
    trace = trace_of([[(0.1, *ON), (65881.3, *OFF)], [(70000.7, *ON), (518400.0, *OFF)]], period)
    at = turn * period
    for client in (0, 1):
        arrival = trace.arrives(at)
        assert trace.now(arrival).online[client] and arrival > at
        at = trace.leaves(client, arrival)
        assert not trace.now(at).online[client] and at > arrival


# ----------------------------------------------------------------------------------------------- integrated
def test_an_order_takes_the_time_of_what_holds_by_hand() -> None:
    """Down 100 bytes: 5 s at 10/s, then 50 bytes at 25/s: 2 s. 12 multiply-adds: 3 s at 2/s until 10, then 6 more at
    3/s: 2 s. Up 30 bytes at 5/s: 6 s."""
    rows = [(0, True, 9, 10), (5, True, 2, 25), (10, True, 3, 5)]
    assert took(trace_of([rows]), 0, 0.0, 100, 12, 30) == Took(5.0, 13.0)
    assert took(trace_of([[*rows, (18.0, *OFF)]]), 0, 0.0, 100, 12, 30) == Took(5.0, 13.0), "done when it leaves"
    assert took(trace_of([[*rows, (17.9, *OFF)]]), 0, 0.0, 100, 12, 30) is None
    away = [*rows[:2], (8.0, *OFF), (9.0, *ON), *rows[2:]]
    assert took(trace_of([away]), 0, 0.0, 100, 12, 30) is None, "though it comes back"


@law
@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=8), st.floats(0, 60))
def test_the_work_that_fits_is_the_work_that_is_done(rates: list[tuple[float, float]], macs: float) -> None:
    trace = trace_of([[(float(i), True, speed, bandwidth) for i, (speed, bandwidth) in enumerate(rates)]])
    found = took(trace, 0, 0.0, 0, macs, 0)
    assert found is not None and found.communication == 0
    steps = [min(max(found.compute - i, 0.0), 1.0) for i in range(len(rates) - 1)]
    steps.append(max(found.compute - len(rates) + 1, 0.0))
    assert sum(step * speed for step, (speed, _) in zip(steps, rates, strict=True)) == pytest.approx(macs)


def test_a_bandwidth_that_varies_holds_for_its_interval() -> None:
    """Factors 1, 2, 3, ... on 10 bytes/s: from second 5 on, 50 of 60 bytes take 5 s, the rest 0.5 s at 20/s."""
    draw: Callable[[int], Any] = lambda interval: np.full(1, 1.0 + interval)  # noqa: E731
    trace = replace(always((True, 1.0, 10.0)), varying=Varying(10.0, draw, 1))
    assert took(trace, 0, 5.0, 60, 0, 0) == Took(0.0, 5.5)
    assert [trace.now(at).bandwidth[0] for at in (0, 9.9, 10, 25)] == [10, 10, 20, 30]


# --------------------------------------------------------------------------------------------------- drawn
N = 4000
SIZES = list(np.random.default_rng(0).integers(1, 500, N))


def drawn(seed: int = 1, **options: Any) -> Trace:
    return LogNormal(**({"repeat_s": 86400.0} | options)).trace(devices(N), SIZES, seed)


def shares(trace: Trace) -> Any:
    """Share of its period that each client is online."""
    ends = np.append(trace.time[1:], 0.0)
    ends[trace.first[1:] - 1] = trace.period
    lasts = np.where(trace.online, ends - trace.time, 0.0)
    return np.add.reduceat(lasts, trace.first[:-1]) / trace.period


def test_medians_and_spreads_are_those_that_were_asked_for() -> None:
    now = drawn(speed=2.0, speed_sigma=0.6, bandwidth=8.0, bandwidth_sigma=1.0, bandwidth_varies=0.0).now(0.0)
    for values, median, sigma in ((now.speed, 2e9, 0.6), (now.bandwidth, 1e6, 1.0)):
        logs = np.log(values)
        assert logs.mean() == pytest.approx(math.log(median), abs=0.06)
        assert logs.std() == pytest.approx(sigma, rel=0.05)
    kept = drawn(speed_sigma=0.0, bandwidth_sigma=0.0, bandwidth_varies=0.0).now(0.0)
    assert set(kept.speed) == {1e9} and set(kept.bandwidth) == {1e6}, "those of the tier"


@pytest.mark.parametrize(
    ("name", "value"), [("speed_data", 0.8), ("speed_data", -0.5), ("data_online", 0.6), ("speed_online", -0.7),
    ("speed_bandwidth", 0.9), ("speed_data", 1.0)],
)  # fmt: skip
def test_correlations_are_those_that_were_asked_for(name: str, value: float) -> None:
    trace = drawn(**{name: value}, bandwidth_varies=0.0, online_s=600.0, offline_s=600.0)
    now, odds = trace.now(0.0), shares(trace)
    rank = {
        "speed": np.log(now.speed), "bandwidth": np.log(now.bandwidth),
        "data": np.argsort(np.argsort(SIZES)).astype(float), "online": odds,
    }  # fmt: skip
    for one, other in (("speed", "data"), ("data", "online"), ("speed", "online"), ("speed", "bandwidth")):
        found = np.corrcoef(rank[one], rank[other])[0, 1]
        assert found == pytest.approx(value if f"{one}_{other}" == name else 0.0, abs=0.09), (one, other)


def test_correlations_that_cannot_all_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speed_data = 0\.9, data_online = 0\.9 and speed_online = -0\.9 cannot all"):
        drawn(speed_data=0.9, data_online=0.9, speed_online=-0.9)
    drawn(speed_data=0.9, data_online=0.9, speed_online=0.8)
    with pytest.raises(ConfigError, match="Lower repeat_s"):
        drawn(online_s=1.0, offline_s=1.0, repeat_s=1e8)


@pytest.mark.parametrize("sessions", ["exponential", "lognormal"])
def test_sessions_have_the_configured_mean_from_the_start(sessions: str) -> None:
    trace = drawn(sessions=sessions, online_s=600.0, offline_s=1800.0, online_sigma=0.0, session_sigma=0.8)
    lasted = np.diff(trace.time)
    inner = np.ones(len(lasted), dtype=bool)
    inner[trace.first[1:-1] - 1] = False  # from one client to the next
    inner[trace.first[:-1][trace.first[:-1] < len(lasted)]] = False  # under way at 0
    assert lasted[inner & trace.online[:-1]].mean() == pytest.approx(600, rel=0.04)
    assert lasted[inner & ~trace.online[:-1]].mean() == pytest.approx(1800, rel=0.04)
    assert [trace.now(at).online.mean() for at in (0, 300, 3600, 40000)] == pytest.approx([0.25] * 4, abs=0.03)
    spread = np.log(lasted[inner & trace.online[:-1]]).std()
    assert spread == pytest.approx(0.8 if sessions == "lognormal" else math.pi / 6**0.5, rel=0.05)


@pytest.mark.parametrize("bandwidth_s", [300.0, 7000.0, 100_000.0])
@pytest.mark.parametrize("sessions", ["always", "exponential"])
def test_lognormal_trace_repeats_after_repeat_s(sessions: str, bandwidth_s: float) -> None:
    trace = drawn(sessions=sessions, bandwidth_s=bandwidth_s, repeat_s=86400.0)
    for at in (0.0, 50.0, 6000.0, 69000.0, 86399.0):
        now, again = trace.now(at), trace.now(at + 86400.0)
        assert all((a == b).all() for a, b in zip(now, again, strict=True))


def test_the_achievable_rate_by_hand() -> None:
    """0 dB: as strong as the noise, 1 bit; 20 dB: log2(101)."""
    assert efficiency(np.array([0.0, 20.0, -200.0])) == pytest.approx([1.0, math.log2(101), 1e-20 / math.log(2)])
    options = {"bandwidth": 8.0, "bandwidth_sigma": 0.0, "bandwidth_varies": 0.0, "sessions": "always"}
    flat = drawn(**options, rate="shannon", snr_db=20.0, snr_sigma_db=0.0).now(0.0)
    assert flat.bandwidth == pytest.approx(1e6 * math.log2(101), rel=1e-6)
    db = 10 * np.log10(2 ** (drawn(**options, rate="shannon", snr_db=20.0).now(0.0).bandwidth / 1e6) - 1)
    assert (db.mean(), db.std()) == pytest.approx((20, 6), rel=0.05)


# --------------------------------------------------------------------------------------------------- in rounds
@dataclass(frozen=True)
class Noting(FedAvg):
    """Notes when each round begins, and who could be asked."""

    noted: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def plan(self, state: Any, context: Any) -> Any:
        self.noted.append((context.clock, tuple(d.client for d in context.available)))
        return super().plan(state, context)


def federate(
    algorithm: Any, site: Any, folder: Path, trace: Trace | None, wait_s: float = 1e5, **terms: Any
) -> tuple[Any, list[Any]]:
    settings = RoundsConfig(**({"evaluate_every": 100, "commit_every": 1} | terms))
    return played.federated(Run(algorithm, site, settings, trace=trace, wait_s=wait_s), FolderStore(folder))


def alike(*, speed: float = 1e9, bandwidth: float = 1e6) -> tuple[bool, float, float]:
    return (True, speed, bandwidth)


ALGORITHM = FedAvg(training=TRAINING, eligible="all")
SITE = tiny_site(ALGORITHM)
CLIENTS = len(SITE.fleet)


def noting() -> Noting:
    return Noting(training=TRAINING, eligible="all")


def test_a_trace_in_which_nothing_happens_changes_no_bit(tmp_path: Path) -> None:
    quiet = trace_of([[(0.0, True, d.speed, d.bandwidth)] for d in SITE.fleet])
    plain, rows = federate(ALGORITHM, SITE, tmp_path / "plain", None, stop=3)
    traced, others = federate(ALGORITHM, SITE, tmp_path / "traced", quiet, stop=3)
    assert_same_bits(plain.params, traced.params)
    for row, other in zip(rows, others, strict=True):
        assert other.metrics["seconds_simulated"] == pytest.approx(row.metrics["seconds_simulated"], rel=1e-6)
        assert (other.metrics["simulated_wait"], other.metrics["clients_online"]) == (0.0, CLIENTS)
        assert "simulated_wait" not in row.metrics


def test_those_who_are_online_are_asked_with_what_they_have_now() -> None:
    trace = trace_of([[(0.0, c % 2 == 0, 5.0 + c, 7.0 + c), (50.0, True, 1.0, 2.0)] for c in range(CLIENTS)])
    run = Run(ALGORITHM, SITE, RoundsConfig(), trace=trace)
    early, late = run.context(0, 10.0), run.context(0, 60.0)
    assert [d.client for d in early.available] == list(range(0, CLIENTS, 2))
    assert [(d.speed, d.bandwidth) for d in early.available[:2]] == [(5.0, 7.0), (7.0, 9.0)]
    assert early.fleet == SITE.fleet, "nominal"
    assert early.available[1] == replace(SITE.fleet[2], speed=7.0, bandwidth=9.0)
    assert late.available == tuple(replace(d, speed=1.0, bandwidth=2.0) for d in SITE.fleet)


def test_nobody_there_is_waited_for_and_the_wait_is_time(tmp_path: Path) -> None:
    algorithm = noting()
    trace = trace_of([[(100.0 if c else 500.0, *alike())] for c in range(CLIENTS)])
    _, rows = federate(algorithm, SITE, tmp_path, trace, stop=2)
    first, second = (row.metrics for row in rows)
    longest = max(line["seconds_simulated"] for line in rows[0].clients)
    assert algorithm.noted[0] == (100.0, tuple(range(1, CLIENTS)))
    assert (first["simulated_wait"], first["seconds_simulated"]) == (100.0, 100.0 + longest)
    assert algorithm.noted[1][0] == first["seconds_simulated"] and second["simulated_wait"] == 0


def test_the_wait_has_a_limit_and_finished_rounds_stay(tmp_path: Path) -> None:
    def session(end: float) -> Trace:
        return trace_of([[(0.0, *alike()), (end, *OFF), (9e4, *alike())] for _ in range(CLIENTS)])

    took = federate(ALGORITHM, SITE, tmp_path / "whole", session(80000.0), stop=1)[1][0].metrics["seconds_simulated"]
    short = session(took)
    with pytest.raises(ConfigError, match=r"round 2: no client is online .* the next comes after .*wait_s = 1000 "):
        federate(ALGORITHM, SITE, tmp_path / "a", short, wait_s=1000.0, stop=3, commit_every=100)
    final, rows = federate(ALGORITHM, SITE, tmp_path / "a", short, wait_s=1e5, stop=3)
    assert len(rows) == 3 and rows[1].metrics["simulated_wait"] > 8e4
    assert_same_bits(final.params, federate(ALGORITHM, SITE, tmp_path / "b", short, stop=3)[0].params)
    gone = trace_of([[(0.0, *OFF)]] * CLIENTS)
    with pytest.raises(ConfigError, match="nobody comes any more"):
        federate(ALGORITHM, SITE, tmp_path / "c", gone, stop=1)


def test_who_leaves_before_it_is_done_has_dropped_out(tmp_path: Path) -> None:
    one = federate(ALGORITHM, SITE, tmp_path / "whole", trace_of([[(0.0, *alike())]] * CLIENTS), stop=1)[1][0]
    victim = one.clients[1]["client"]
    ends = {line["client"]: line["seconds_simulated"] for line in one.clients}

    def until(share: float) -> Trace:
        return trace_of(
            [[(0.0, *alike()), *([(share * ends[c], *OFF)] if c == victim else [])] for c in range(CLIENTS)]
        )

    _, (left,) = federate(ALGORITHM, SITE, tmp_path / "left", until(0.99), stop=1)
    (line,) = [line for line in left.clients if "failure" in line]
    assert (line["client"], line["failure"]) == (victim, "drop: went offline before it was done (fleet.trace)")
    assert left.metrics["clients_dropped"] == 1
    assert left.metrics["seconds_simulated"] == max(s for c, s in ends.items() if c != victim)
    _, (stayed,) = federate(ALGORITHM, SITE, tmp_path / "stayed", until(1.01), stop=1)
    assert stayed.metrics["clients_trained"] == len(ends)


@pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
def test_a_run_that_was_stopped_goes_on_with_the_same_picks(tmp_path: Path, keep_updates: bool) -> None:
    source = LogNormal(online_s=2.0, offline_s=2.0, speed=3e-4, repeat_s=1000.0, bandwidth_s=1.0)
    trace = source.trace(SITE.fleet, [8] * CLIENTS, 3)
    algorithm = noting()
    whole, rows = federate(algorithm, SITE, tmp_path / "whole", trace, stop=9, keep_updates=keep_updates)
    noted = list(algorithm.noted)
    algorithm.noted.clear()
    for stop in (1, 2, 5, 9):
        again = source.trace(SITE.fleet, [8] * CLIENTS, 3)
        final, others = federate(algorithm, SITE, tmp_path / "again", again, stop=stop, keep_updates=keep_updates)
    assert algorithm.noted == noted and len({asked for _, asked in noted}) > 3
    assert_same_bits(whole.params, final.params)
    failed = [[line.get("failure") for line in row.clients] for row in rows]
    assert failed == [[line.get("failure") for line in row.clients] for row in others]
    assert any(map(any, failed)), "some drop out"
