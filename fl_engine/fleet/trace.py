"""Device behaviour over time: piecewise constant availability, speed and bandwidth.

Only the server uses a trace, together with the simulated clock. The trace determines which clients can be selected at
the start of a round, how long an assignment takes, and which clients drop out. A trace does not affect a client's
training.

As in FedScale (Lai et al., ICML 2022, `Aggregator.tictak_client_tasks`), a client drops out if it is offline at the end
of its training. Departs from FedScale: a client that goes offline at any time during its assignment drops out, because
its work is lost. Speed and bandwidth may change during an assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.types import Device
from fl_engine.fleet.devices import Took

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]
ROW = np.dtype([("client", "i8"), ("time", "f8"), ("online", "?"), ("speed", "f8"), ("bandwidth", "f8")])
"""Type of a row, which contains a client's behaviour from `time` on, in the units of `Trace`."""

MOST_ROWS = 50_000_000
MOST_PIECES = 100_000
"""Maximum number of pieces (`Piece`) in the simulation of one assignment, which bounds the computation for slow
clients. After the last piece, speed and bandwidth are constant."""
REMEMBERED_BYTES = 2**25
"""Maximum bytes of the cache for bandwidth factors."""


class Now(NamedTuple):
    """State of all clients at one time, as arrays in client order."""

    online: Flags
    speed: Floats
    """Multiply-adds per second. `speed` and `bandwidth` are undefined for offline clients."""
    bandwidth: Floats
    """Bytes per second."""


class Piece(NamedTuple):
    """Interval in which a client's speed and bandwidth are constant. `until` is the end of the interval."""

    until: float
    speed: float
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Varying:
    """A bandwidth factor for each client, which changes every `every_s` seconds and repeats after `repeat_s`."""

    every_s: float
    draw: Callable[[int], Floats]
    """Function that returns the factors (clients,) for the interval with a given number, from 0."""
    clients: int
    repeat_s: float = math.inf

    def interval(self, time: float) -> tuple[int, float]:
        """Return the number and the end time of the interval that contains `time`."""
        turns, local = divmod(_late(time), self.repeat_s)
        base, number = turns * self.repeat_s if turns else 0.0, int(local // self.every_s)
        return number, base + min((number + 1) * self.every_s, self.repeat_s)

    @cached_property
    def of(self) -> Callable[[int], Floats]:
        """`draw` with a cache."""
        return lru_cache(maxsize=max(8, REMEMBERED_BYTES // (8 * self.clients)))(self.draw)


@dataclass(frozen=True, eq=False)
class Trace:
    """Device behaviour over time, as rows of all clients. A row is valid until the client's next row. A client is
    offline before the first row.

    Look-ups increase the time by a microsecond and by 2^-50 of the time. A row is therefore valid at its start time,
    even if the computed time was rounded down.
    """

    first: Rows
    """(clients + 1,): index of each client's first row. Client c has the rows first[c] to first[c + 1] - 1."""
    time: Floats
    """(rows,): seconds from 0 to the client's period, ascending within each client."""
    online: Flags
    """(rows,)"""
    speed: Floats
    """(rows,): multiply-adds per second."""
    bandwidth: Floats
    """(rows,): bytes per second."""
    period: Floats
    """(clients,): seconds after which a client's rows repeat; inf if the rows do not repeat."""
    varying: Varying | None = None

    @classmethod
    def of(cls, rows: NDArray[np.void], period: Floats, varying: Varying | None = None) -> Trace:
        """Create a trace from rows (n,) of the type ROW. The rows of each client must be sorted by time."""
        rows = rows[np.argsort(rows["client"], kind="stable")]
        first = np.concatenate([[0], np.cumsum(np.bincount(rows["client"], minlength=len(period)))])
        time, online, speed, bandwidth = (
            np.ascontiguousarray(rows[name]) for name in ("time", "online", "speed", "bandwidth")
        )
        return cls(first, time, online, speed, bandwidth, period, varying)

    @property
    def clients(self) -> int:
        return len(self.period)

    # --------------------------------------------------------------------------------------------- all clients
    def now(self, time: float) -> Now:
        row = self._rows(self._local(time)[1])
        held = np.maximum(row, 0)
        bandwidth = self.bandwidth[held]
        if self.varying is not None:
            bandwidth = bandwidth * self.varying.of(self.varying.interval(time)[0])
        return Now((row >= 0) & self.online[held], self.speed[held], bandwidth)

    def arrives(self, time: float) -> float:
        """Return the first time after `time` at which any client comes online, or inf."""
        base, local = self._local(time)
        client, at = self._arrivals
        turn = np.where(at > local[client], 0.0, self.period[client])
        return float((base[client] + turn + at).min(initial=math.inf))

    # ---------------------------------------------------------------------------------------------- one client
    def leaves(self, client: int, time: float) -> float:
        """Return the time when a client goes offline; `time` if the client is offline, inf if it never goes offline."""
        whole_turns = 2 * int(self.first[client + 1] - self.first[client]) + 2
        for row, until in islice(self._held(client, time), whole_turns):
            if row is None or not self.online[row]:
                return time
            time = until
        return math.inf

    def pieces(self, client: int, time: float) -> Iterator[Piece]:
        """Yield a client's pieces from `time` until the client goes offline."""
        for row, until in self._held(client, time):
            if row is None or not self.online[row]:
                return
            speed, bandwidth = float(self.speed[row]), float(self.bandwidth[row])
            if self.varying is None:
                yield Piece(until, speed, bandwidth)
            else:
                while time < until:
                    interval, ends = self.varying.interval(time)
                    time = min(until, ends)
                    yield Piece(time, speed, bandwidth * float(self.varying.of(interval)[client]))
            time = until

    def _held(self, client: int, time: float) -> Iterator[tuple[int | None, float]]:
        """Yield each row from `time` on and the time at which it ends. Rows that repeat are yielded forever. Before the
        first row, None is yielded instead of a row."""
        start, end, period = int(self.first[client]), int(self.first[client + 1]), float(self.period[client])
        turns, local = divmod(_late(time), period)
        base = turns * period if turns else 0.0
        row = start + int(np.searchsorted(self.time[start:end], local, side="right")) - 1
        while True:
            while row + 1 < end:
                until = base + float(self.time[row + 1])
                if until > time:  # Skip the empty interval at the start of a repetition.
                    yield (row if row >= start else None), until
                row += 1
            yield (row if row >= start else None), base + period
            if period == math.inf:
                return
            base, time, row = base + period, base + period, start - 1

    # ------------------------------------------------------------------------------------------------- look-up
    def _local(self, time: float) -> tuple[Floats, Floats]:
        """Return two arrays (clients,): the start of each client's current repetition, and the time since then."""
        turns, local = np.divmod(_late(time), self.period)
        return np.where(turns > 0, turns * np.where(turns > 0, self.period, 0.0), 0.0), local

    def _rows(self, local: Floats) -> Rows:
        """Return an array (clients,) with the index of each client's current row, or -1 before the first row."""
        start = self.first[:-1]
        low, high = start, self.first[1:]
        for _ in range(int(np.max(high - low, initial=0)).bit_length()):
            middle = (low + high) >> 1
            come = (low < high) & (self.time[np.minimum(middle, len(self.time) - 1)] <= local)
            low, high = np.where(come, middle + 1, low), np.where(come, high, np.maximum(middle, low))
        return np.where(low > start, low - 1, -1)

    @cached_property
    def _arrivals(self) -> tuple[Rows, Floats]:
        """Return two arrays: the client and the time of each row in which a client comes online."""
        client, comes = np.repeat(np.arange(self.clients), np.diff(self.first)), self.online.copy()
        comes[1:] &= ~self.online[:-1] | (client[1:] != client[:-1])
        return client[comes], self.time[comes]


def _late(time: float) -> float:
    return time * (1 + 2**-50) + 1e-6


def took(trace: Trace, client: int, begin: float, down: float, macs: float, up: float) -> Took | None:
    """Return the duration of an assignment that begins at `begin`; None if the client goes offline before the end. The
    client receives `down` bytes, computes `macs` multiply-adds, and sends `up` bytes, each at the current rate."""
    pieces = trace.pieces(client, begin)
    piece, at, number = next(pieces, None), begin, 1
    spent = []
    for work, rate in ((down, "bandwidth"), (macs, "speed"), (up, "bandwidth")):
        seconds = 0.0
        while piece is not None:
            needed = work / getattr(piece, rate)
            if number >= MOST_PIECES or at + needed <= piece.until:
                seconds, at = seconds + needed, at + needed
                break
            seconds, work = seconds + (piece.until - at), work - (piece.until - at) * getattr(piece, rate)
            at, piece, number = piece.until, next(pieces, None), number + 1
        if piece is None:
            return None
        spent.append(seconds)
    fetched, trained, sent = spent
    return Took(trained, fetched + sent)


def online(fleet: Sequence[Device], now: Now) -> tuple[Device, ...]:
    """Return the online devices with their current speed and bandwidth, sorted by client."""
    speeds, bandwidths = now.speed.tolist(), now.bandwidth.tolist()
    return tuple(
        Device(d.client, d.tier, d.memory, d.sigma, d.limits, speeds[d.client], bandwidths[d.client])
        for d in map(fleet.__getitem__, np.flatnonzero(now.online).tolist())
    )
