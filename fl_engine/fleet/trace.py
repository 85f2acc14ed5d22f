"""Device behaviour over time: online or offline, speed and bandwidth, each piecewise constant.

Only the server uses a trace, with the simulated clock: who can be asked when a round begins, how long an assignment
takes, and who drops out. It does not change what a client computes.

As in FedScale (Lai et al., ICML 2022, `Aggregator.tictak_client_tasks`), a client that is offline at the end of its
work has dropped out. Departs from it: a client that was offline in between has dropped out too, since its work is lost,
and speed and bandwidth may change while a client works.
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

MOST_PIECES = 100_000
"""The most pieces over which one assignment is followed; the rest takes the rate of the last one. Bounds the server's
work for an extremely slow client."""
REMEMBERED_BYTES = 2**25
"""Bytes of the cache of factors."""


class Now(NamedTuple):
    """All clients at one moment, in client order."""

    online: Flags
    speed: Floats
    """Multiply-adds per second; undefined while offline, as is `bandwidth`."""
    bandwidth: Floats
    """Bytes per second."""


class Piece(NamedTuple):
    """A client's rates until a moment of the simulated clock."""

    until: float
    speed: float
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Varying:
    """A factor on each client's bandwidth that changes every `every_s` seconds and repeats after `repeat_s`."""

    every_s: float
    draw: Callable[[int], Floats]
    """Return the factors (clients,) of interval 0, 1, ..."""
    clients: int
    repeat_s: float = math.inf

    def interval(self, time: float) -> tuple[int, float]:
        """Return the interval of `time`, and its end."""
        turns, local = divmod(_late(time), self.repeat_s)
        base, number = turns * self.repeat_s if turns else 0.0, int(local // self.every_s)
        return number, base + min((number + 1) * self.every_s, self.repeat_s)

    @cached_property
    def of(self) -> Callable[[int], Floats]:
        """`draw` with a cache."""
        return lru_cache(maxsize=max(8, REMEMBERED_BYTES // (8 * self.clients)))(self.draw)


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows, each of which holds for one client until the next. A client is offline before its first row.

    Times are shifted by a microsecond (or the last bits of a large number), so that a row holds at its own time even if
    a sum was rounded down.
    """

    first: Rows
    """(clients + 1,): client c has the rows first[c] to first[c + 1] - 1."""
    time: Floats
    """(rows,): seconds, ascending within a client, from 0, below its period."""
    online: Flags
    """(rows,)"""
    speed: Floats
    """(rows,): multiply-adds per second."""
    bandwidth: Floats
    """(rows,): bytes per second."""
    period: Floats
    """(clients,): seconds after which a client's rows repeat; inf: never."""
    varying: Varying | None = None

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
        """Return the next moment after `time` at which a row finds a client coming online, or inf."""
        base, local = self._local(time)
        row = self._rows(local)
        after = self._next_arrival[np.where(row >= 0, row + 1, self.first[:-1])]
        again = self._next_arrival[self.first[:-1]]
        end, padded = self.first[1:], np.append(self.time, math.inf)
        this_turn = np.where(after < end, base + padded[np.minimum(after, len(self.time))], math.inf)
        next_turn = np.where(again < end, base + self.period + padded[np.minimum(again, len(self.time))], math.inf)
        return float(np.minimum(this_turn, next_turn).min(initial=math.inf))

    # ---------------------------------------------------------------------------------------------- one client
    def leaves(self, client: int, time: float) -> float:
        """Return when a client that is online at `time` goes offline, `time` if it is offline, or inf."""
        whole_turns = 2 * int(self.first[client + 1] - self.first[client]) + 2
        for row, until in islice(self._held(client, time), whole_turns):
            if row is None or not self.online[row]:
                return time
            time = until
        return math.inf

    def pieces(self, client: int, time: float) -> Iterator[Piece]:
        """Yield a client's rates from `time` on, as long as it is online."""
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
        """Yield (row, until when it holds) from `time` on, forever if the rows repeat. None: before the first row."""
        start, end, period = int(self.first[client]), int(self.first[client + 1]), float(self.period[client])
        turns, local = divmod(_late(time), period)
        base = turns * period if turns else 0.0
        row = start + int(np.searchsorted(self.time[start:end], local, side="right")) - 1
        while True:
            while row + 1 < end:
                until = base + float(self.time[row + 1])
                if until > time:  # else the row at 0, with which a turn begins
                    yield (row if row >= start else None), until
                row += 1
            yield (row if row >= start else None), base + period
            if period == math.inf:
                return
            base, time, row = base + period, base + period, start - 1

    # ------------------------------------------------------------------------------------------------- look-up
    def _local(self, time: float) -> tuple[Floats, Floats]:
        """Return, (clients,) each, when each client's current repetition began and the time since."""
        turns, local = np.divmod(_late(time), self.period)
        return np.where(turns > 0, turns * np.where(turns > 0, self.period, 0.0), 0.0), local

    def _rows(self, local: Floats) -> Rows:
        """Return each client's current row, (clients,), or -1. A vectorised bisection."""
        start = self.first[:-1]
        low, high = start, self.first[1:]
        for _ in range(int(np.max(high - low, initial=0)).bit_length()):
            middle = (low + high) >> 1
            come = (low < high) & (self.time[np.minimum(middle, len(self.time) - 1)] <= local)
            low, high = np.where(come, middle + 1, low), np.where(come, high, np.maximum(middle, low))
        return np.where(low > start, low - 1, -1)

    @cached_property
    def _next_arrival(self) -> Rows:
        """(rows + 1,): the next row at or after this one, of any client, with which a client comes online."""
        rows = len(self.time)
        before = np.zeros(rows, dtype=bool)
        before[1:] = self.online[:-1]
        before[self.first[:-1][self.first[:-1] < rows]] = False
        comes = np.where(self.online & ~before, np.arange(rows), rows)
        return np.append(np.minimum.accumulate(comes[::-1])[::-1], rows)


def _late(time: float) -> float:
    return time * (1 + 2**-50) + 1e-6


# ------------------------------------------------------------------------------------------------ made by hand
def trace_of(
    rows: Sequence[Sequence[tuple[float, bool, float, float]]], period: Sequence[float] | float = math.inf
) -> Trace:
    """Return a trace of rows (time, online, speed, bandwidth) by client. Raises ValueError without rows."""
    flat = [row for each in rows for row in each]
    if not flat:
        raise ValueError("a trace without rows")
    time, online, speed, bandwidth = zip(*flat, strict=True)
    return Trace(
        np.cumsum([0, *map(len, rows)], dtype=np.int64),
        np.array(time, dtype=np.float64),
        np.array(online, dtype=np.bool_),
        np.array(speed, dtype=np.float64),
        np.array(bandwidth, dtype=np.float64),
        np.broadcast_to(np.asarray(period, dtype=np.float64), len(rows)),
    )


# -------------------------------------------------------------------------------------------- the simulated clock
def took(trace: Trace, client: int, begin: float, down: float, macs: float, up: float) -> Took | None:
    """Return the time of an assignment that begins at `begin`: first `down` bytes arrive, then `macs` multiply-adds are
    computed, then `up` bytes are sent, each at the current rate. None if the client goes offline before the end."""
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
    """Return the devices that are online with their current speed and bandwidth, in client order."""
    speeds, bandwidths = now.speed.tolist(), now.bandwidth.tolist()
    here = np.flatnonzero(now.online).tolist()
    return tuple(
        Device(d.client, d.tier, d.memory, d.sigma, d.limits, speeds[d.client], bandwidths[d.client])
        for d in map(fleet.__getitem__, here)
    )
