"""What devices do over time: when each is online, how fast it computes, and its bandwidth, all constant in pieces.

A trace decides on the server alone, by the simulated clock: who can be asked when a round begins, how long an order
takes, and who drops out. A client computes the same bits with it and without it.

FedScale (Lai et al., ICML 2022) does the same with its device traces: a client that is offline when it would be done
has dropped out (`Aggregator.tictak_client_tasks`). Departs from it: here a client that was offline in between has
dropped out too, since its work is lost; and the speed and the bandwidth may change while a client works, so that each
part of the work takes the time of what holds then.
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
"""The most pieces over which one order's work is followed. What is left of it after so many takes the time of the last
one, so that a client that hardly moves cannot hold up the server."""
REMEMBERED_BYTES = 2**25
"""The most bytes of factors that are remembered, so that they are not drawn again for each client."""


class Now(NamedTuple):
    """All clients at a moment, in client order."""

    online: Flags
    speed: Floats
    """Multiply-adds per second; of no meaning where a client is offline, like the next."""
    bandwidth: Floats
    """Bytes per second."""


class Piece(NamedTuple):
    """What holds for a client until a moment of the simulated clock."""

    until: float
    speed: float
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Varying:
    """A factor on each client's bandwidth, another one every `every_s` seconds, and the first one again after
    `repeat_s`."""

    every_s: float
    draw: Callable[[int], Floats]
    """(clients,): the factors of interval 0, 1, ..."""
    clients: int
    repeat_s: float = math.inf

    def interval(self, time: float) -> tuple[int, float]:
        """The interval that `time` is in, and when it ends."""
        turns, local = divmod(_late(time), self.repeat_s)
        base, number = turns * self.repeat_s if turns else 0.0, int(local // self.every_s)
        return number, base + min((number + 1) * self.every_s, self.repeat_s)

    @cached_property
    def of(self) -> Callable[[int], Floats]:
        """`draw`, remembered."""
        return lru_cache(maxsize=max(8, REMEMBERED_BYTES // (8 * self.clients)))(self.draw)


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows, each of which holds for one client until the next. Before its first row a client is offline.

    A moment is counted as a microsecond (or the last bits of a large number) later than it is said, so that at the time
    of a row, which a sum may round down, the row holds.
    """

    first: Rows
    """(clients + 1,): the rows of client c are first[c] to first[c + 1] - 1."""
    time: Floats
    """(rows,): seconds, ascending within a client, from 0, below its period."""
    online: Flags
    """(rows,)"""
    speed: Floats
    """(rows,): multiply-adds per second."""
    bandwidth: Floats
    """(rows,): bytes per second."""
    period: Floats
    """(clients,): seconds after which a client's rows begin anew; inf: its last row holds for ever."""
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
        """The next moment after `time` at which a row begins that finds a client coming online; inf: none does."""
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
        """When a client that is online at `time` goes offline; `time` if it is not; inf: never."""
        whole_turns = 2 * int(self.first[client + 1] - self.first[client]) + 2
        for row, until in islice(self._held(client, time), whole_turns):
            if row is None or not self.online[row]:
                return time
            time = until
        return math.inf

    def pieces(self, client: int, time: float) -> Iterator[Piece]:
        """What holds from `time` on, piece by piece, as long as the client is online."""
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
        """(row, until when it holds) from `time` on, without end where the rows begin anew. None: before the first."""
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
        """(clients,) each: when the turn began that a client is in, and for how long it has been in it."""
        turns, local = np.divmod(_late(time), self.period)
        return np.where(turns > 0, turns * np.where(turns > 0, self.period, 0.0), 0.0), local

    def _rows(self, local: Floats) -> Rows:
        """(clients,): the last row whose time has come; -1: none has. A bisection of all clients side by side."""
        start = self.first[:-1]
        low, high = start, self.first[1:]
        for _ in range(int(np.max(high - low, initial=0)).bit_length()):
            middle = (low + high) >> 1
            come = (low < high) & (self.time[np.minimum(middle, len(self.time) - 1)] <= local)
            low, high = np.where(come, middle + 1, low), np.where(come, high, np.maximum(middle, low))
        return np.where(low > start, low - 1, -1)

    @cached_property
    def _next_arrival(self) -> Rows:
        """(rows + 1,): the first row from this one on, of whatever client, with which a client comes online."""
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
    """A trace from (time, online, speed, bandwidth) by client. Raises ValueError where there are no rows."""
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
    """How long an order takes that begins at `begin`: first `down` bytes arrive, then `macs` multiply-adds are made,
    then `up` bytes leave, each at what holds at the time. None: the client goes offline before it is done."""
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
    """The devices that are online, with the speed and the bandwidth that they have now, in client order."""
    speeds, bandwidths = now.speed.tolist(), now.bandwidth.tolist()
    here = np.flatnonzero(now.online).tolist()
    return tuple(
        Device(d.client, d.tier, d.memory, d.sigma, d.limits, speeds[d.client], bandwidths[d.client])
        for d in map(fleet.__getitem__, here)
    )
