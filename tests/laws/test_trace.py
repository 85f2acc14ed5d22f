"""What devices do over time: looked up, integrated, drawn, and what the simulated clock makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.core.errors import ConfigError, DataError
from fl_engine.core.types import Device
from fl_engine.fleet.devices import Took
from fl_engine.fleet.lognormal import LogNormal
from fl_engine.fleet.trace import Trace, Varying, took
from fl_engine.fleet.trace_files import TraceFile
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore
from fl_engine.testing import rounds
from fl_engine.testing.tiny import TRAINING, assert_same_bits, tiny_site
from tests.harness.made_up import trace_of

ON, OFF, ALIKE = (True, 2.0, 10.0), (False, 1.0, 1.0), (True, 1e9, 1e6)
"""(online, multiply-adds per second, bytes per second)"""


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


# ----------------------------------------------------------------------------------------------- integrated
def test_time_of_an_assignment_by_hand() -> None:
    """Down 100 bytes: 5 s at 10/s, then 50 bytes at 25/s: 2 s. 12 multiply-adds: 3 s at 2/s until 10, then 6 more at
    3/s: 2 s. Up 30 bytes at 5/s: 6 s."""
    rows = [(0, True, 9, 10), (5, True, 2, 25), (10, True, 3, 5)]
    assert took(trace_of([rows]), 0, 0.0, 100, 12, 30) == Took(5.0, 13.0)
    assert took(trace_of([[*rows, (18.0, *OFF)]]), 0, 0.0, 100, 12, 30) == Took(5.0, 13.0), "done when it leaves"
    assert took(trace_of([[*rows, (17.9, *OFF)]]), 0, 0.0, 100, 12, 30) is None
    away = [*rows[:2], (8.0, *OFF), (9.0, *ON), *rows[2:]]
    assert took(trace_of([away]), 0, 0.0, 100, 12, 30) is None, "though it comes back"


def test_a_bandwidth_that_varies_holds_for_its_interval() -> None:
    """Factors 1, 2, 3, ... on 10 bytes/s: from second 5 on, 50 of 60 bytes take 5 s, the rest 0.5 s at 20/s."""
    draw: Callable[[int], Any] = lambda interval: np.full(1, 1.0 + interval)  # noqa: E731
    trace = replace(trace_of([[(0.0, True, 1.0, 10.0)]]), varying=Varying(10.0, draw, 1))
    assert took(trace, 0, 5.0, 60, 0, 0) == Took(0.0, 5.5)
    assert [trace.now(at).bandwidth[0] for at in (0, 9.9, 10, 25)] == [10, 10, 20, 30]


# ----------------------------------------------------------------------------------------------- from a file
CSV_FLEET = tuple(replace(d, speed=2e9 + d.client, bandwidth=3e6 + d.client) for d in devices(4))
CSV = "client,time,compute,bandwidth,online\n0,0,2.5,8,1\n3,0,,,true\n1,5.5,1e-3,,0\n0,60,2.5,16,0\n3,1e3,4,4,FALSE\n"


def rows(path: Path, text: str | bytes, **options: Any) -> Trace:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return TraceFile(path=str(path), **options).trace(CSV_FLEET, [1] * 4, 0)


@pytest.mark.parametrize("text", [CSV, CSV.replace("\n", "\r\n"), f"\ufeff{CSV}"])
def test_csv_rows_become_a_trace(tmp_path: Path, text: str) -> None:
    trace = rows(tmp_path / "t", text)
    early, late = trace.now(10.0), trace.now(60.0)
    assert early.online.tolist() == [True, False, False, True] and late.online.tolist() == [False, False, False, True]
    assert (early.speed[0], early.bandwidth[0]) == (2.5e9, 1e6), "10^9 multiply-adds and 10^6 bits per second"
    assert (early.speed[3], early.bandwidth[3]) == (2e9 + 3, 3e6 + 3), "empty: the device's own"
    assert (early.speed[1], late.bandwidth[0]) == (1e6, 2e6)
    assert rows(tmp_path / "t", text, repeat_s=2000.0).now(2010.0).online.tolist() == early.online.tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("client,time,compute,bandwidth\n0,0,1,1\n", "line 2.*online"),
        ("client,time,online\n0,0\n", "line 2"),
        ("client,time,online\n\n4,0,1\n", "line 3.*partition.clients"),
        ("client,time,online\n0,-1,1\n", "line 2: time"),
        ("client,time,online\n0,nan,1\n", "line 2: time"),
        ("client,time,online\n0,5,1\n1,0,1\n0,4,0\n", "line 4"),
        ("client,time,online,compute\n0,0,1,0\n", "line 2: compute"),
        (b"client,time,online\n\xff\n", "UTF-8"),
    ],
)
def test_wrong_row_is_refused_with_its_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"t.csv.*{said}"):
        rows(tmp_path / "t.csv", text)


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


def test_lognormal_medians_and_spreads() -> None:
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
def test_lognormal_correlations(name: str, value: float) -> None:
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
    with pytest.raises(ConfigError):
        drawn(speed_data=0.9, data_online=0.9, speed_online=-0.9)
    drawn(speed_data=0.9, data_online=0.9, speed_online=0.8)
    with pytest.raises(ConfigError):
        drawn(online_s=1.0, offline_s=1.0, repeat_s=1e8)


def test_sessions_have_the_configured_mean_from_the_start() -> None:
    trace = drawn(online_s=600.0, offline_s=1800.0, online_sigma=0.0)
    lasted = np.diff(trace.time)
    inner = np.ones(len(lasted), dtype=bool)
    inner[trace.first[1:-1] - 1] = False  # from one client to the next
    inner[trace.first[:-1][trace.first[:-1] < len(lasted)]] = False  # under way at 0
    assert lasted[inner & trace.online[:-1]].mean() == pytest.approx(600, rel=0.04)
    assert lasted[inner & ~trace.online[:-1]].mean() == pytest.approx(1800, rel=0.04)
    assert [trace.now(at).online.mean() for at in (0, 300, 3600, 40000)] == pytest.approx([0.25] * 4, abs=0.03)
    spread = np.log(lasted[inner & trace.online[:-1]]).std()
    assert spread == pytest.approx(math.pi / 6**0.5, rel=0.05)


# --------------------------------------------------------------------------------------------------- in rounds
@dataclass(frozen=True)
class Noting(FedAvg):
    """Notes when each round begins, and who could be asked."""

    noted: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def plan(self, state: Any, context: Any) -> Any:
        self.noted.append((context.clock, tuple(d.client for d in context.available)))
        return super().plan(state, context)


def federate(
    algorithm: Any, site: Any, folder: Path, trace: Trace | None, wait_s: float = 1e5, **options: Any
) -> tuple[Any, list[Any]]:
    settings = RoundsConfig(**({"evaluate_every": 100, "commit_every": 1} | options))
    return rounds.federated(Run(algorithm, site, settings, trace=trace, wait_s=wait_s), FolderStore(folder))


ALGORITHM = FedAvg(training=TRAINING, eligible="all")
SITE = tiny_site(ALGORITHM)
CLIENTS = len(SITE.fleet)


def test_online_devices_have_their_current_rates() -> None:
    trace = trace_of([[(0.0, c % 2 == 0, 5.0 + c, 7.0 + c), (50.0, True, 1.0, 2.0)] for c in range(CLIENTS)])
    run = Run(ALGORITHM, SITE, RoundsConfig(), trace=trace)
    early, late = run.context(0, 10.0), run.context(0, 60.0)
    assert [d.client for d in early.available] == list(range(0, CLIENTS, 2))
    assert [(d.speed, d.bandwidth) for d in early.available[:2]] == [(5.0, 7.0), (7.0, 9.0)]
    assert early.fleet == SITE.fleet, "nominal"
    assert early.available[1] == replace(SITE.fleet[2], speed=7.0, bandwidth=9.0)
    assert late.available == tuple(replace(d, speed=1.0, bandwidth=2.0) for d in SITE.fleet)


def test_wait_for_an_online_client_counts_as_time(tmp_path: Path) -> None:
    algorithm = Noting(training=TRAINING, eligible="all")
    trace = trace_of([[(100.0 if c else 500.0, *ALIKE)] for c in range(CLIENTS)])
    _, rows = federate(algorithm, SITE, tmp_path, trace, stop=2)
    first, second = (row.metrics for row in rows)
    longest = max(line["seconds_simulated"] for line in rows[0].clients)
    assert algorithm.noted[0] == (100.0, tuple(range(1, CLIENTS)))
    assert (first["simulated_wait"], first["seconds_simulated"]) == (100.0, 100.0 + longest)
    assert algorithm.noted[1][0] == first["seconds_simulated"] and second["simulated_wait"] == 0


def test_the_wait_has_a_limit_and_finished_rounds_stay(tmp_path: Path) -> None:
    def session(end: float) -> Trace:
        return trace_of([[(0.0, *ALIKE), (end, *OFF), (9e4, *ALIKE)] for _ in range(CLIENTS)])

    took = federate(ALGORITHM, SITE, tmp_path / "whole", session(80000.0), stop=1)[1][0].metrics["seconds_simulated"]
    short = session(took)
    with pytest.raises(ConfigError, match="round 2"):
        federate(ALGORITHM, SITE, tmp_path / "a", short, wait_s=1000.0, stop=3, commit_every=100)
    final, rows = federate(ALGORITHM, SITE, tmp_path / "a", short, wait_s=1e5, stop=3)
    assert len(rows) == 3 and rows[1].metrics["simulated_wait"] > 8e4
    assert_same_bits(final.params, federate(ALGORITHM, SITE, tmp_path / "b", short, stop=3)[0].params)
    gone = trace_of([[(0.0, *OFF)]] * CLIENTS)
    with pytest.raises(ConfigError, match="comes online again"):
        federate(ALGORITHM, SITE, tmp_path / "c", gone, stop=1)


def test_client_that_goes_offline_early_drops_out(tmp_path: Path) -> None:
    one = federate(ALGORITHM, SITE, tmp_path / "whole", trace_of([[(0.0, *ALIKE)]] * CLIENTS), stop=1)[1][0]
    victim = one.clients[1]["client"]
    ends = {line["client"]: line["seconds_simulated"] for line in one.clients}

    def until(share: float) -> Trace:
        return trace_of([[(0.0, *ALIKE), *([(share * ends[c], *OFF)] if c == victim else [])] for c in range(CLIENTS)])

    _, (left,) = federate(ALGORITHM, SITE, tmp_path / "left", until(0.99), stop=1)
    (line,) = [line for line in left.clients if "failure" in line]
    assert (line["client"], line["failure"]) == (victim, "drop: the client went offline too early (fleet.trace)")
    assert left.metrics["clients_dropped"] == 1
    assert left.metrics["seconds_simulated"] == max(s for c, s in ends.items() if c != victim)
    _, (stayed,) = federate(ALGORITHM, SITE, tmp_path / "stayed", until(1.01), stop=1)
    assert stayed.metrics["clients_trained"] == len(ends)
