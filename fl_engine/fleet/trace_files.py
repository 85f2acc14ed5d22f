"""Traces from files: rows of your own (CSV or JSON lines), and FedScale's device and availability data as JSON.

Rows are CSV with a heading, or JSON lines with the same names:

    client,time,compute,bandwidth,online          {"client": 0, "time": 0, "compute": 2.0, "online": true}
    0,0,2.0,30,1

A row holds for its client from its time on until the client's next row. Before the first row the client is offline, and
a client without rows never comes online. `compute` (10^9 multiply-adds per second) and `bandwidth` (10^6 bits per
second) may be empty, which means those of the device's tier. The rows of each client ascend in time.

FedScale (Lai et al., ICML 2022, benchmark/dataset/data/device_info) publishes pickles, which can run any code when they
are loaded, so they are never read here. docs/guides/traces.md says how to convert them.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fl_engine.core.errors import ConfigError, DataError, brief, nearest, printable
from fl_engine.core.fields import STRICT, UserPath
from fl_engine.core.text import need_plain
from fl_engine.core.types import Device
from fl_engine.fleet.trace import Trace, trace_of

T = TypeVar("T")

COLUMNS = ("client", "time", "compute", "bandwidth", "online")
NEEDED = ("client", "time", "online")
LONGEST_LINE = 1000
"""The most bytes of a line."""
MOST_ROWS = 50_000_000
MOST_BYTES = 2**29
"""The most bytes of one of FedScale's files, which are read whole."""
FLAGS = {"1": True, "0": False, "true": True, "false": False}

Number = Annotated[float, Field(allow_inf_nan=False)]
Moment = Annotated[Number, Field(ge=0, le=1e9)]
"""Seconds; 10^9 are 31 years."""
Rate = Annotated[Number, Field(ge=1e-6, le=1e9)]


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    client: int
    time: Moment
    online: bool
    compute: Rate | None = None
    bandwidth: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """Rows of your own."""

    __pydantic_config__ = STRICT
    name: Literal["file"] = "file"
    path: UserPath
    """CSV or JSON lines."""
    repeat_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds after which the rows repeat; null: a client's last row holds forever."""

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        return read_rows(Path(self.path), fleet, math.inf if self.repeat_s is None else self.repeat_s)


def read_rows(path: Path, fleet: Sequence[Device], period: float = math.inf) -> Trace:
    """Read a file line by line, keeping 34 bytes of each. Raises DataError, which names the file and the line."""
    owner, time, online = array("q"), array("d"), array("b")
    speed, bandwidth = array("d"), array("d")
    last: dict[int, float] = {}
    for number, row in _rows(path):
        if not 0 <= row.client < len(fleet):
            raise _at(path, number, f"client must be 0 to {len(fleet) - 1} (partition.clients), got {row.client}")
        if row.time <= last.get(row.client, -1.0):
            said = f"the rows of client {row.client} must ascend in time, got {row.time:g} after {last[row.client]:g}"
            raise _at(path, number, said)
        if row.time >= period:
            raise _at(path, number, f"time {row.time:g} is not below fleet.trace.repeat_s = {period:g}")
        if len(owner) == MOST_ROWS:
            raise _at(path, number, f"at most {MOST_ROWS} rows are read")
        last[row.client] = row.time
        device = fleet[row.client]
        owner.append(row.client)
        time.append(row.time)
        online.append(row.online)
        speed.append(device.speed if row.compute is None else row.compute * 1e9)
        bandwidth.append(device.bandwidth if row.bandwidth is None else row.bandwidth * 1e6 / 8)
    if not owner:
        raise DataError(f"{path}: it has no rows; expected {','.join(COLUMNS)}, one line for each change")
    clients = np.frombuffer(owner, dtype=np.int64)
    order = np.argsort(clients, kind="stable")
    return Trace(
        np.concatenate([[0], np.cumsum(np.bincount(clients, minlength=len(fleet)))]),
        np.frombuffer(time)[order],
        np.frombuffer(online, dtype=np.int8)[order].astype(np.bool_),
        np.frombuffer(speed)[order],
        np.frombuffer(bandwidth)[order],
        np.full(len(fleet), period),
    )


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the numbers of lines, from 1, with their rows."""
    columns: list[str] | None = None
    as_json: bool | None = None
    for number, line in _lines(path):
        if as_json is None:
            as_json = line.startswith("{")
        try:
            if as_json:
                yield number, Row.model_validate_json(line)
            elif columns is None:
                columns = _columns(path, number, line)
            else:
                yield number, Row.model_validate(_values(path, number, columns, line))
        except ValidationError as error:
            raise _at(path, number, brief(error)) from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty. A line longer than LONGEST_LINE is never held in memory."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise _at(path, number, f"it is longer than {LONGEST_LINE} bytes")
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield number, text
    except UnicodeDecodeError:
        raise _at(path, number, "it is not text in UTF-8") from None
    except OSError as error:
        raise DataError(f"fleet.trace: {path} cannot be read: {error.strerror}") from error


def _columns(path: Path, number: int, line: str) -> list[str]:
    found = _words(path, number, line)
    for name in found:
        if name not in COLUMNS:
            raise _at(path, number, f"no column is called {printable(name)[:60]!r}{nearest(name[:100], COLUMNS)}")
    wrong = [name for name in NEEDED if name not in found] or [name for name in found if found.count(name) > 1]
    if wrong:
        raise _at(path, number, f"expected the columns {','.join(COLUMNS)} once each; see {wrong[0]!r}")
    return found


def _words(path: Path, number: int, line: str) -> list[str]:
    try:
        return [word.strip() for word in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        raise _at(path, number, f"it is not CSV ({error})") from None


def _values(path: Path, number: int, columns: Sequence[str], line: str) -> dict[str, Any]:
    words = _words(path, number, line)
    if len(words) != len(columns):
        raise _at(path, number, f"expected {len(columns)} columns, got {len(words)}")
    found: dict[str, Any] = {}
    for name, word in zip(columns, words, strict=True):
        if word == "" and name not in NEEDED:
            continue
        try:
            need_plain([word])
            found[name] = FLAGS[word.lower()] if name == "online" else (int if name == "client" else float)(word)
        except (KeyError, ValueError):
            wanted = {"online": "0 or 1", "client": "a whole number"}.get(name, "a number")
            raise _at(path, number, f"{name}: expected {wanted}, got {printable(word)[:60]!r}") from None
    return found


def _at(path: Path, number: int, said: str) -> DataError:
    return DataError(f"{path}, line {number}: {said}")


# ------------------------------------------------------------------------------------------------------ FedScale
class Capacity(BaseModel):
    """An entry of `client_device_capacity`."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    computation: Annotated[Number, Field(ge=1e-6, le=1e9)]
    """Milliseconds of the inference of one sample."""
    communication: Annotated[Number, Field(ge=1e-3, le=1e12)]
    """10^3 bits per second."""


class Behaviour(BaseModel):
    """An entry of `client_behave_trace`: online from active[i] to inactive[i], repeated after finish_time, in
    seconds."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    active: list[Moment]
    inactive: list[Moment]
    finish_time: Annotated[Moment, Field(ge=1)]


CAPACITIES = TypeAdapter(dict[str, Capacity])
BEHAVIOURS = TypeAdapter(dict[str, Behaviour])


@dataclass(frozen=True)
class FedScale:
    """FedScale's data. Client c has entry number c of each file, modulo the number of entries."""

    __pydantic_config__ = STRICT
    name: Literal["fedscale"] = "fedscale"
    capacity: UserPath | None = None
    """`client_device_capacity` as JSON; null: speed and bandwidth of each device's tier."""
    availability: UserPath | None = None
    """`client_behave_trace` as JSON; null: all are always online."""
    inference: Annotated[float, Field(ge=1e-6, le=1e6)] = 0.3
    """10^9 multiply-adds of the inference that `computation` measures: MobileNetV2's (Sandler et al., CVPR 2018, Table
    4). FedScale does not name the model. It counts a training step as three inferences, as the simulated clock does."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.capacity, self.availability) if path is not None)

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        if not self.files:
            raise ConfigError("fleet.trace: fedscale needs a file: set capacity, availability or both")
        rates = [(d.speed, d.bandwidth) for d in fleet]
        if self.capacity is not None:
            found = [
                (self.inference * 1e9 * 1e3 / each.computation, each.communication * 1e3 / 8)
                for each in _entries(Path(self.capacity), CAPACITIES, "computation and communication", len(fleet))
            ]
            rates = [found[client % len(found)] for client in range(len(fleet))]
        if self.availability is None:
            return trace_of([[(0.0, True, *rate)] for rate in rates])
        path = Path(self.availability)
        behaviours = _entries(path, BEHAVIOURS, "active, inactive and finish_time", len(fleet))
        sessions = [_sessions(path, number, each) for number, each in enumerate(behaviours)]
        if not any(sessions):
            raise DataError(f"{path}: nobody is ever active in the first {len(sessions)} entries")
        chosen = [client % len(sessions) for client in range(len(fleet))]
        return trace_of(
            [[(at, state, *rate) for at, state in sessions[c]] for c, rate in zip(chosen, rates, strict=True)],
            [behaviours[c].finish_time for c in chosen],
        )


def _entries(path: Path, form: TypeAdapter[dict[str, T]], fields: str, most: int) -> list[T]:
    """Return the first entries of a file, at most `most`. Raises DataError, which names the file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} must have at most {MOST_BYTES} bytes. Convert fewer entries")
        found: Mapping[str, T] = form.validate_json(path.read_bytes())
    except ValidationError as error:
        said = f'expected {{"<client>": {{...}}, ...}} with {fields}: {brief(error)}'
        raise DataError(f"{path}: {said[:1000]}") from error
    except OSError as error:
        raise DataError(f"fleet.trace: {path} cannot be read: {error.strerror}") from error
    if not found:
        raise DataError(f"{path}: it has no entries")
    return list(found.values())[:most]


def _sessions(path: Path, number: int, of: Behaviour) -> list[tuple[float, bool]]:
    """Return (time, online) rows. An interval that ends before it begins never holds, as in FedScale."""
    if len(of.active) != len(of.inactive):
        raise DataError(
            f"{path}: entry {number} must have as many active as inactive times, got {len(of.active)} and "
            f"{len(of.inactive)}"
        )
    rows: list[tuple[float, bool]] = []
    for begin, end in sorted(zip(of.active, of.inactive, strict=True)):
        end = min(end, of.finish_time)
        if end <= begin:
            continue
        if rows and begin <= rows[-1][0]:  # it goes on
            end = max(end, rows.pop()[0])
        else:
            rows.append((begin, True))
        rows.append((end, False))
    return [row for row in rows if row[0] < of.finish_time]
