"""What a person gives a trace: rows of CSV or JSON, and FedScale's data as JSON. A trace or the file and the line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError, DataError
from fl_engine.core.types import Device
from fl_engine.fleet.trace import Trace
from fl_engine.fleet.trace_files import FedScale, TraceFile
from tests.fuzz.mutations import altered, answer, damaged, json_like, law

FLEET = tuple(Device(c, "t", 50.0, 0.0, speed=2e9 + c, bandwidth=3e6 + c) for c in range(4))
CSV = "client,time,compute,bandwidth,online\n0,0,2.5,8,1\n3,0,,,true\n1,5.5,1e-3,,0\n0,60,2.5,16,0\n3,1e3,4,4,FALSE\n"
ROWS = [
    {"client": 0, "time": 0, "compute": 2.5, "bandwidth": 8, "online": True}, {"client": 3, "time": 0, "online": True},
    {"client": 1, "time": 5.5, "compute": 1e-3, "online": False},
    {"client": 0, "time": 60, "compute": 2.5, "bandwidth": 16, "online": False},
    {"client": 3, "time": 1000.0, "compute": 4, "bandwidth": 4, "online": False},
]  # fmt: skip
LINES = "\n".join(map(json.dumps, ROWS))
CAPACITIES = {str(c): {"computation": 100.0 + c, "communication": 5648.5} for c in range(1, 4)}
BEHAVIOUR = {
    "duration": 211625, "model": "CPH1801", "finish_time": 518400,
    "active": [12788, 100044, 441193], "inactive": [65881, 133574, 475099],
}  # fmt: skip
BEHAVIOURS = {"1": BEHAVIOUR, "2": BEHAVIOUR | {"active": [0], "inactive": [518400], "model": None}}


def rows(path: Path, text: str | bytes, **options: Any) -> Trace:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return TraceFile(path=str(path), **options).trace(FLEET, [1] * 4, 0)


def scaled(folder: Path, capacity: Any = None, availability: Any = None, **options: Any) -> Trace:
    given: dict[str, str] = {}
    for name, value in (("capacity", capacity), ("availability", availability)):
        if value is not None:
            (folder / f"{name}.json").write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
            given[name] = str(folder / f"{name}.json")
    return FedScale(**given, **options).trace(FLEET, [1] * 4, 0)


def whole(trace: Trace | None) -> None:
    """What every trace of a reader is."""
    if trace is None:
        return
    assert (trace.first[0], trace.first[-1], trace.clients) == (0, len(trace.time), len(FLEET))
    for c in range(len(FLEET)):
        own = trace.time[trace.first[c] : trace.first[c + 1]]
        assert (np.diff(own) > 0).all() and (own >= 0).all() and (own < trace.period[c]).all()
    for rates in (trace.speed, trace.bandwidth):
        assert np.isfinite(rates).all() and (rates > 0).all()
    for at in (0.0, 7.0, 1e6):
        assert trace.now(at).online.shape == (len(FLEET),) and trace.arrives(at) > at


# ------------------------------------------------------------------------------------------------------ rows
@pytest.mark.parametrize("text", [CSV, LINES, CSV.replace("\n", "\r\n"), f"\ufeff{CSV}", f"\n{LINES}\n\n"])
def test_rows_say_who_is_online_and_how_fast(tmp_path: Path, text: str) -> None:
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
        ("client,time,compute,bandwidth\n0,0,1,1\n", "line 1.*online"),
        ("client,time,online,time\n0,0,1,1\n", "line 1.*time"),
        ("client,time,online\n0,0\n", "line 2"),
        ("client,time,online\n\n4,0,1\n", "line 3.*partition.clients"),
        ("client,time,online\n0,-1,1\n", "line 2: time"),
        ("client,time,online\n0,nan,1\n", "line 2: time"),
        ("client,time,online\n0,5,1\n1,0,1\n0,4,0\n", "line 4"),
        ("client,time,online,compute\n0,0,1,0\n", "line 2: compute"),
        ('{"client": 0, "time": 0, "online": 1}', "line 1: online"),
        ('{"client": 0, "time": 0, "online": true, "x": 1}', "line 1: x"),
        (LINES.replace("\n", "\n0,0,1,1,1\n", 1), "line 2"),
        (b"client,time,online\n\xff\n", "line 2"),
    ],
)
def test_wrong_row_is_refused_with_its_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"t.csv.*{said}"):
        rows(tmp_path / "t.csv", text)


@law(80)
@given(damaged(CSV.encode()) | damaged(LINES.encode()) | st.binary(max_size=200))
@example(b"client,time,online\n" + b"9" * 900 + b",0,1\n")
@example(b"client,time,online\n0," + b"9" * 900 + b",1\n")
@example(b'{"client": ' + b"[" * 900)
@example(b'{"client": ' + b"9" * 900 + b', "time": 0, "online": true}')
@example("client,time,online\n\u0663,0,1\n".encode())
@example(b"\x80\x04K\x01.")
def test_rows_are_whole_or_their_file_is_named(tmp_path: Path, content: bytes) -> None:
    whole(answer(lambda: rows(tmp_path / "t.csv", content), "t.csv", kind=DataError))


@law(80)
@given(altered(ROWS))
def test_json_rows_are_whole_or_their_file_is_named(tmp_path: Path, values: Any) -> None:
    lines = [json.dumps(value) for value in values] if isinstance(values, list) else [json.dumps(values)]
    whole(answer(lambda: rows(tmp_path / "t.jsonl", "\n".join(lines)), "t.jsonl", kind=DataError))


# -------------------------------------------------------------------------------------------------- FedScale
def test_fedscale_by_hand(tmp_path: Path) -> None:
    """101 ms for 0.3 * 10^9 multiply-adds; 5648.5 kbit per second."""
    trace = scaled(tmp_path, CAPACITIES, BEHAVIOURS)
    now = trace.now(12788.0)
    assert now.speed == pytest.approx([0.3e9 / (s / 1000) for s in (101, 102, 103, 101)])
    assert now.bandwidth == pytest.approx([5648.5e3 / 8] * 4)
    assert now.online.tolist() == [True, True, True, True]
    times = (0, 12787, 65881, 100044, 475098, 475099, 518400, 518400 + 12788)
    assert [bool(trace.now(at).online[2]) for at in times] == [False, False, False, True, True, False, False, True]
    assert trace.now(1e6 + 7).online[1] and trace.leaves(1, 5.0) == math.inf
    assert scaled(tmp_path, CAPACITIES, inference=0.6).now(0.0).speed[0] == pytest.approx(0.6e9 / 0.101)
    alone = scaled(tmp_path, None, BEHAVIOURS).now(20000.0)
    assert alone.speed.tolist() == [d.speed for d in FLEET] and alone.online.all()


def test_fedscale_overlapping_intervals_are_joined(tmp_path: Path) -> None:
    odd = BEHAVIOUR | {"active": [5, 50, 40, 30, 90], "inactive": [10, 60, 55, 20, 1e6], "finish_time": 100}
    trace = scaled(tmp_path, None, {"1": odd})
    seen = [at for at in range(0, 100, 5) if trace.now(at).online[0]]
    assert seen == [5, 40, 45, 50, 55, 90, 95]


@pytest.mark.parametrize(
    "values",
    [
        {},
        [],
        {"1": BEHAVIOUR | {"active": [1]}},
        {"1": BEHAVIOUR | {"active": [], "inactive": []}},
    ],
)
def test_wrong_behaviour_is_refused_with_its_file(tmp_path: Path, values: Any) -> None:
    with pytest.raises(DataError, match=r"availability\.json"):
        scaled(tmp_path, None, values)


def test_fedscale_refuses_a_pickle_and_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"capacity\.json"):
        scaled(tmp_path, b"\x80\x04\x95\x1a\x00")
    with pytest.raises(ConfigError, match=r"fleet\.trace"):
        scaled(tmp_path)


@law(60)
@given(json_like(BEHAVIOURS))
def test_behaviours_are_whole_or_their_file_is_named(tmp_path: Path, content: bytes) -> None:
    whole(answer(lambda: scaled(tmp_path, CAPACITIES, content), "availability.json", kind=DataError))
