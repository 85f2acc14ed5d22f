"""Local accuracy: how well a model serves each client's own distribution (FedRolex, Tables 3.3 and 3.4).

The test samples of a class are dealt to the clients that hold training samples of it, in the same proportions, and a
model chooses only among the client's classes. The authors' code sets the outputs of the other classes to 0, so one of
them is chosen if the outputs of all of the client's classes are below 0. Here the other classes are left out.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core import seeds

Ints = NDArray[np.int64]
NOBODY = -1


@dataclass(frozen=True)
class Local:
    """The clients' accuracies in [0, 1], each client counted once."""

    mean: float
    sd: float
    """Their standard deviation (n - 1); 0 for one client."""
    clients: int
    """The number of clients with test samples."""
    histogram: dict[int, int]
    """How many clients have an accuracy of so many whole % (0 to 100, rounded down)."""


def deal(labels: Ints, held: Ints, seed: int) -> Ints:
    """(N,): the client of each test sample; NOBODY if no client holds the class.

    A client gets the same share of a class's test samples as of its training samples, rounded up or down. Each class
    has another order of the clients, so that rounding does not always favour the same clients.

    Args:
        labels: (N,): the classes of the test samples.
        held: (classes, clients): how many training samples of each class each client holds.
    """
    rng, owner = seeds.rng(seed, "local accuracy"), np.full(len(labels), NOBODY, dtype=np.int64)
    for label, row in enumerate(held):
        places, clients = rng.permutation(np.flatnonzero(labels == label)), rng.permutation(np.flatnonzero(row))
        if len(clients):
            ends = np.cumsum(row[clients])
            owner[places] = np.repeat(clients, np.diff(ends * len(places) // ends[-1], prepend=0))
    return owner


class LocalAccuracy:
    """Collects which test samples each level gets right; `watch` is for `evaluate_pool`. The arguments are those of
    `deal`."""

    def __init__(self, labels: Ints, held: Ints, seed: int) -> None:
        self._owner = deal(labels, held, seed)
        self._labels, self._of = torch.from_numpy(labels), torch.from_numpy(self._owner)
        self._foreign = torch.from_numpy(held.T == 0)
        self._right: dict[str, Tensor] = {}

    def watch(self, level: str, outputs: Tensor, places: Tensor) -> None:
        """`outputs` (B, classes) of a level for the test samples at `places` (B,)."""
        right = self._right.setdefault(level, torch.zeros(len(self._labels), dtype=torch.bool))
        chosen = outputs.cpu().masked_fill(self._foreign[self._of[places]], -math.inf).argmax(1)
        right[places] = chosen == self._labels[places]

    def of(self, level: str) -> Local | None:
        """The local accuracy of a level whose outputs for all test samples were collected; None if no client has
        any."""
        dealt = self._owner != NOBODY
        counts, watched = np.bincount(self._owner[dealt]), self._right[level].numpy()[dealt]
        right = np.bincount(self._owner[dealt], weights=watched)[counts > 0].astype(np.int64)
        counts = counts[counts > 0]
        found = right / counts
        if not len(found):
            return None
        # Computed in integers, because 100 * 0.29 is less than 29.
        histogram = dict(sorted(Counter((100 * right // counts).tolist()).items()))
        sd = statistics.stdev(found) if len(found) > 1 else 0.0
        return Local(statistics.fmean(found), sd, len(found), histogram)
