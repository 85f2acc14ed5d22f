"""What a person gives a trace: rows of CSV or JSON, and FedScale's data as JSON. A trace or the file and the line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError, DataError
from fl_engine.core.types import Device
from fl_engine.fleet import trace_files
from fl_engine.fleet.trace import Trace
from fl_engine.fleet.trace_files import FedScale, TraceFile
from fl_engine.fleet.trace_sources import digest
from tests.fuzz.mutations import altered, answer, anything, damaged, json_like, law

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


def test_columns_may_come_in_any_order_and_rates_be_left_out(tmp_path: Path) -> None:
    trace = rows(tmp_path / "t.csv", "online,time,client\n1,0,2\n")
    assert trace.now(0.0).online.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no rows"),
        ("client,time,online\n", "it has no rows"),
        ("client,time,compute,bandwidth\n0,0,1,1\n", "line 1: the columns client,time,.* see 'online'"),
        ("client,time,online,time\n0,0,1,1\n", "line 1: .* once each; see 'time'"),
        ("client,tiem,online\n", r"line 1: no column is called 'tiem' \(did you mean 'time'\?\)"),
        ("client,time,online\n0,0\n", "line 2: 3 columns are expected, got 2"),
        ("client,time,online\n\n4,0,1\n", r"line 3: there are clients 0 to 3 \(partition.clients\), got 4"),
        ("client,time,online\n-1,0,1\n", "line 2: there are clients 0 to 3 .*got -1"),
        ("client,time,online\n0.0,0,1\n", "line 2: client: a whole number is expected, got '0.0'"),
        ("client,time,online\n0,-1,1\n", "line 2: time: Input should be greater than or equal to 0"),
        ("client,time,online\n0,nan,1\n", "line 2: time: Input should be a finite number"),
        ("client,time,online\n0,1e10,1\n", "line 2: time: Input should be less than or equal to"),
        ("client,time,online\n0,1_0,1\n", "line 2: time: a number is expected, got '1_0'"),
        ("client,time,online\n0,0,2\n", "line 2: online: 0 or 1 is expected, got '2'"),
        ("client,time,online\n0,5,1\n1,0,1\n0,4,0\n", "line 4: the rows of a client ascend .* has 4 after 5"),
        ("client,time,online\n0,5,1\n0,5,0\n", "line 3: .* client 0 has 5 after 5"),
        ("client,time,online,compute\n0,0,1,0\n", "line 2: compute: Input should be greater than or equal to 0.000001"),
        ("client,time,online,bandwidth\n0,0,1,-3\n", "line 2: bandwidth: Input should be greater"),
        ("client,time,online,compute\n0,0,1,inf\n", "line 2: compute: Input should be a finite number"),
        ('{"client": 0, "time": 0, "online": 1}', "line 1: online: Input should be a valid boolean"),
        ('{"client": true, "time": 0, "online": true}', "line 1: client: "),
        ('{"client": 0, "time": 0, "online": true, "x": 1}', "line 1: x: Extra inputs"),
        ('{"client": 0, "time": 0, "online": true}\n{"client": 0, "client": 1, "time": 5, "online": true}',
         "line 2: 'client' is there twice"),
        ('client,time,online\n"0",0,1\n"1,0,1\n', "line 3: its quotes are not those of CSV "),
        ('client,time,online\n0,"0,5",1\n', "line 2: time: a number is expected, got '0,5'"),
        ('"client","tiem","online"\n', r"line 1: no column is called 'tiem' \(did you mean 'time'\?\)"),
        (LINES.replace("\n", "\n0,0,1,1,1\n", 1), "line 2: JSON is expected"),
        (CSV + LINES, "line 7: client,time,compute,bandwidth,online is expected"),
        ("client,time,online\n" + "0" * 2000, "line 2: it is longer than 1000 bytes"),
        (b"client,time,online\n\xff\n", "line 2: it is no text in UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_told_with_its_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"t.csv[:,] {said}"):
        rows(tmp_path / "t.csv", text)


def test_fields_of_csv_may_be_quoted(tmp_path: Path) -> None:
    plain = rows(tmp_path / "plain.csv", CSV)
    quoted = rows(tmp_path / "quoted.csv", re.sub(r"[^,\n]+", r'"\g<0>"', CSV).replace(",", ", "))
    assert all(np.array_equal(getattr(plain, of), getattr(quoted, of)) for of in ("first", "time", "online", "speed"))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, Path("a\0b")):
        answer(lambda path=path: TraceFile(path=str(path)).trace(FLEET, [1] * 4, 0), "fleet.trace", kind=DataError)  # type: ignore[misc]
    with pytest.raises(DataError, match=r"fleet\.trace: a.* cannot be read: embedded null"):
        digest(TraceFile(path="a\0b"))
    with pytest.raises(DataError, match=r"none\.csv cannot be read: No such file"):
        digest(TraceFile(path=str(tmp_path / "none.csv")))
    with pytest.raises(DataError, match=r"line 6: time 1000 is not below fleet.trace.repeat_s = 500"):
        rows(tmp_path / "t.csv", CSV, repeat_s=500.0)


def test_a_file_of_too_many_rows_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MOST_ROWS", 3)
    with pytest.raises(DataError, match="line 5: at most 3 rows are read"):
        rows(tmp_path / "t.csv", CSV + "\xff")
    monkeypatch.setattr(trace_files, "MOST_BYTES", 10)
    with pytest.raises(DataError, match=r"capacity.json has \d+ bytes, at most 10 are read"):
        scaled(tmp_path, CAPACITIES)


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


@law(60)
@given(st.lists(st.lists(anything.map(str), min_size=5, max_size=5).map(",".join), max_size=3))
def test_odd_values_are_whole_or_their_file_is_named(tmp_path: Path, lines: list[str]) -> None:
    text = "\n".join([CSV.splitlines()[0], *lines]).encode("utf-8", "surrogatepass")
    whole(answer(lambda: rows(tmp_path / "t.csv", text), "t.csv", kind=DataError))


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


def test_fedscale_s_odd_intervals_are_what_its_own_test_makes_of_them(tmp_path: Path) -> None:
    odd = BEHAVIOUR | {"active": [5, 50, 40, 30, 90], "inactive": [10, 60, 55, 20, 1e6], "finish_time": 100}
    trace = scaled(tmp_path, None, {"1": odd})
    seen = [at for at in range(0, 100, 5) if trace.now(at).online[0]]
    assert seen == [5, 40, 45, 50, 55, 90, 95]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "it has no entries"),
        ([], "expected "),
        ({"1": {"active": [1], "inactive": [2]}}, "1.finish_time: Field required"),
        ({"1": BEHAVIOUR | {"active": [1]}}, "entry 0 has 1 times of active and 3 of inactive"),
        ({"1": BEHAVIOUR | {"active": [], "inactive": []}}, "nobody is ever active in the first 1 entries"),
        ({"1": BEHAVIOUR | {"finish_time": 0}}, "1.finish_time: "),
        ({"1": BEHAVIOUR | {"active": [-5, 1, 2]}}, "1.active.0: "),
    ],
)
def test_what_is_no_behaviour_is_told(tmp_path: Path, values: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"availability.json: .*{said}|availability.json: {said}"):
        scaled(tmp_path, None, values)


def test_a_pickle_is_refused_and_no_file_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"capacity\.json: expected "):
        scaled(tmp_path, b"\x80\x04\x95\x1a\x00")
    with pytest.raises(ConfigError, match="set capacity, availability or both"):
        scaled(tmp_path)


@law(60)
@given(json_like(CAPACITIES))
def test_capacities_are_whole_or_their_file_is_named(tmp_path: Path, content: bytes) -> None:
    whole(answer(lambda: scaled(tmp_path, content), "capacity.json", kind=DataError))


@law(60)
@given(json_like(BEHAVIOURS))
def test_behaviours_are_whole_or_their_file_is_named(tmp_path: Path, content: bytes) -> None:
    whole(answer(lambda: scaled(tmp_path, CAPACITIES, content), "availability.json", kind=DataError))
