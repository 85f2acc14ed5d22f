"""Sources of device behaviour for `fleet.trace`. To add a source, write a class and add it to TRACES.

A trace file is CSV with a header:

    client,time,compute,bandwidth,online
    0,0,2.0,30,1

A row is valid from its time until the client's next row. A client is offline before its first row, and a client without
rows never comes online. `compute` is in 10^9 multiply-adds per second and `bandwidth` in 10^6 bits per second. An empty
field has the value of the device's tier. The rows of each client must be sorted by time.

docs/guides/traces.md shows how to convert the traces of FedScale (Lai et al., ICML 2022).
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, ValidationError

from fl_engine.core.errors import DataError, brief, printable
from fl_engine.core.fields import Options, UserPath
from fl_engine.core.records import Strict
from fl_engine.core.registry import Contract
from fl_engine.core.system import hashed
from fl_engine.core.types import Device
from fl_engine.fleet.lognormal import LogNormal
from fl_engine.fleet.trace import MOST_ROWS, ROW, Trace

Moment = Annotated[float, Field(ge=0, le=1e9)]
"""Time in seconds. The maximum of 10^9 seconds is 31 years."""
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]


class TraceRow(Strict):
    client: int
    time: Moment
    online: bool
    compute: Rate | None = None
    bandwidth: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class TraceFile(Options):
    """A trace in a CSV file."""

    name: Literal["file"] = "file"
    path: UserPath
    repeat_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds after which the rows repeat; null: the last row of a client is valid forever."""

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        """Read the file. Raises DataError, which names the file and the line, if a row is invalid."""
        period = math.inf if self.repeat_s is None else self.repeat_s
        rows = np.fromiter(_rows(Path(self.path), fleet, period), ROW)
        if not len(rows):
            expected = f"{','.join(TraceRow.model_fields)}, and a line for each change"
            raise DataError(f"{self.path} has no rows. Expected {expected}")
        return Trace.of(rows, np.full(len(fleet), period))


def _rows(path: Path, fleet: Sequence[Device], period: float) -> Iterator[tuple[int, float, bool, float, float]]:
    """Read and check the rows line by line. An empty field is treated as missing."""
    number, last = 1, dict[int, float]()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True, strict=True)
            for count, values in enumerate(reader):
                number = reader.line_num
                row = TraceRow.model_validate({name: word for name, word in values.items() if word})
                before, wrong = last.get(row.client, -1.0), None
                if not 0 <= row.client < len(fleet):
                    wrong = f"client must be from 0 to {len(fleet) - 1} (partition.clients), got {row.client}"
                elif row.time <= before:
                    wrong = f"client {row.client}'s rows must be sorted by time, got {row.time:g} after {before:g}"
                elif row.time >= period:
                    wrong = f"time must be below fleet.trace.repeat_s = {period:g}, got {row.time:g}"
                elif count == MOST_ROWS:
                    wrong = f"a trace must have at most {MOST_ROWS} rows"
                if wrong is not None:
                    raise DataError(f"{path}, line {number}: {wrong}")
                last[row.client] = row.time
                device = fleet[row.client]
                speed = device.speed if row.compute is None else row.compute * 1e9
                bandwidth = device.bandwidth if row.bandwidth is None else row.bandwidth * 1e6 / 8
                yield row.client, row.time, row.online, speed, bandwidth
    except (UnicodeDecodeError, csv.Error, ValidationError) as error:
        reason = brief(error) if isinstance(error, ValidationError) else f"not CSV in UTF-8 ({printable(str(error))})"
        raise DataError(f"{path}, line {number}: {reason}") from error
    except OSError as error:
        raise DataError.at(f"fleet.trace: cannot read {path}: {error.strerror}") from error


class TraceSource(Protocol):
    """Source of device behaviour: a frozen dataclass whose fields are options."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `trace` reads."""

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        """Return the devices' behaviour, which may depend only on the arguments, the options and the files. `samples`
        contains the number of samples of each client. Raises ConfigError, or DataError for an invalid file."""


TRACES: dict[str, type[TraceSource]] = {"lognormal": LogNormal, "file": TraceFile}


@dataclass(frozen=True)
class OrFile(Contract[TraceSource]):
    """Contract that also accepts the path of a CSV file instead of a trace source."""

    def parse(self, section: Any) -> TraceSource:
        return super().parse({"name": "file", "path": section} if isinstance(section, str) else section)


Tracing = Annotated[TraceSource, OrFile("trace", TRACES, TraceSource)]
"""Type of an option that accepts a CSV file, the name of a source, or a custom source `package.module:NAME`."""


def digest(source: TraceSource) -> str:
    """Return the SHA-256 of the source's files. Raises DataError if a file cannot be read."""
    found = hashlib.sha256()
    for path in source.files:
        try:
            found.update(hashed(Path(path), hashlib.sha256()).digest())
        except OSError as error:
            raise DataError(f"fleet.trace: cannot read {printable(path)}: {error.strerror}") from error
    return found.hexdigest()
