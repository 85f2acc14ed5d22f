"""What Oort remembers of the clients: two tables of floats.

`clients` has six rows, with one entry each for every client that was asked before, in client order: its number, its
statistical utility, how often it was asked, in which round it was last (counted from 1), what the last order that it
answered took on the simulated clock (0: not measured), and the level that it was sent with that order. `heard` has a
row for each answer of the last round, which are entered in `clients` together, when the next round's first answer
comes: (round from 0, client, utility, seconds, level).
"""

from __future__ import annotations

import numpy as np

CLIENT, UTILITY, ASKED, LAST, SECONDS, LEVEL = range(6)
"""Rows of `clients`."""
NOBODY: tuple[tuple[float, ...], ...] = ((),) * 6
LATE, FAILED = -1.0, -2.0
"""What stands in `heard` instead of a utility."""


def entered(clients: np.ndarray, heard: np.ndarray) -> tuple[np.ndarray, int, float]:
    """`clients` (6, N) with the answers of one round, `heard` (M, 5), M >= 1, distinct clients; the round; and the mean
    utility of its updates from clients that were asked before, 0 without any: what the pacer looks at.

    A late client gets the mean utility of the round's updates, as in FedScale, or keeps its own where there are none;
    one that failed gets 0. Where no update came, the time stays.
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
    """For each of `who`, (M,), its place in `clients`, and whether it is there at all."""
    if not clients.shape[1]:
        return np.zeros(len(who), dtype=int), np.zeros(len(who), dtype=bool)
    place = np.minimum(np.searchsorted(clients[CLIENT], who), clients.shape[1] - 1)
    return place, clients[CLIENT, place] == who


def rows(clients: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """As a table."""
    return tuple(tuple(row) for row in clients.tolist())
