"""What Oort remembers: two tables about the clients, and the pacer.

`clients` has six rows, with one entry for every client that was asked before, in client order: its number, its
statistical utility, how often it was asked, its last round (from 1), the simulated seconds of the last assignment with
a result (0: not measured), and the level of that assignment. `heard` has a row for each result of the last round:
(round from 0, client, utility, seconds, level). They are entered in `clients` at the next round's first result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CLIENT, UTILITY, ASKED, LAST, SECONDS, LEVEL = range(6)
"""Rows of `clients`."""
NOBODY: tuple[tuple[float, ...], ...] = ((),) * 6
LATE, FAILED = -1.0, -2.0
"""Values in `heard` instead of a utility."""


def entered(clients: np.ndarray, heard: np.ndarray) -> tuple[np.ndarray, int, float]:
    """Return `clients` (6, N) with the results of one round, `heard` (M, 5), M >= 1, entered; the round; and the mean
    utility of its updates from clients that were asked before, 0 without any, for the pacer.

    A straggler gets the mean utility of the round's updates, as in FedScale, or keeps its own without updates. A client
    that failed otherwise gets 0. Without an update the time stays.
    """
    round, who, utility, seconds, level = int(heard[0, 0]), *heard[:, 1:].T
    unknown = who[~places(clients, who)[1]]
    new = np.zeros((6, len(unknown)))
    new[CLIENT] = unknown
    clients = np.concatenate([clients, new], axis=1)
    clients = clients[:, np.argsort(clients[CLIENT], kind="stable")]
    at = np.searchsorted(clients[CLIENT], who)
    good, before = utility >= 0, clients[ASKED, at] > 0
    usual = utility[good].mean() if good.any() else clients[UTILITY, at]
    clients[UTILITY, at] = np.where(good, utility, np.where(utility == LATE, usual, 0.0))
    clients[ASKED, at] += 1
    clients[LAST, at] = round + 1
    clients[SECONDS, at] = np.where(seconds > 0, seconds, clients[SECONDS, at])
    clients[LEVEL, at] = np.where(seconds > 0, level, clients[LEVEL, at])
    preferred = utility[good & before]
    return clients, round, float(preferred.mean()) if preferred.size else 0.0


def places(clients: np.ndarray, who: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place in `clients` of each of `who`, (M,), and whether it is there at all."""
    if not clients.shape[1]:
        return np.zeros(len(who), dtype=int), np.zeros(len(who), dtype=bool)
    place = np.minimum(np.searchsorted(clients[CLIENT], who), clients.shape[1] - 1)
    return place, clients[CLIENT, place] == who


def rows(clients: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """As a table."""
    return tuple(tuple(row) for row in clients.tolist())


Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Pacer:
    """Oort's pacer (Lai et al., OSDI 2021, Sec. 4.3, Alg. 1 lines 7-8). T, the preferred time of a round, is a
    percentile of the clients' times. Every `step` rounds, the utility of the preferred clients' updates is compared
    with the `step` rounds before. If it has become flat, T rises, to reach slower clients with other data; if it has
    changed sharply, T falls."""

    rounds: int
    """Number of rounds that are over."""
    percentile: float
    """No T from 100 on."""
    history: tuple[float, ...] = ()
    """The mean utility of each of the last 2 * `step` rounds."""

    def after(
        self, rounds: int, brought: Mapping[int, float], *, step: int, delta: float, flat: float, sharp: float
    ) -> Pacer:
        """Return the pacer after `rounds` rounds. `brought` maps rounds (from 0) to the mean utility of the preferred
        clients; an absent round counts 0.

        As in the code, a change of exactly `flat` is flat, one of exactly `sharp` is sharp, 0 after 0 is flat, and the
        percentile stays between `delta` and 100.
        """
        percentile, history = self.percentile, list(self.history)
        for over in range(self.rounds + 1, rounds + 1):
            history = [*history[1 - 2 * step :], brought.get(over - 1, 0.0)]
            if over >= 2 * step and over % step == 0:
                before, now = sum(history[:step]), sum(history[step:])
                if abs(now - before) <= flat * before:
                    percentile = min(100.0, percentile + delta)
                elif abs(now - before) >= sharp * before:
                    percentile = max(delta, percentile - delta)
        return Pacer(max(rounds, self.rounds), percentile, tuple(history))

    def preferred(self, seconds: np.ndarray) -> float:
        """Return T for clients with these times, (N,) with N >= 1."""
        if self.percentile >= 100:
            return math.inf
        place = min(int(len(seconds) * self.percentile / 100), len(seconds) - 1)
        return float(np.partition(seconds, place)[place])

    @property
    def rows(self) -> Rows:
        """As a table."""
        return (float(self.rounds), self.percentile), self.history

    @staticmethod
    def of(rows: Rows) -> Pacer:
        (rounds, percentile), history = rows
        return Pacer(int(rounds), percentile, history)
