"""Local accuracy: the accuracy of a model on the class distribution of each client (FedRolex, Tables 3.3 and 3.4).

The test samples of a class are distributed over the clients in proportion to the clients' training samples of this
class. A prediction is always one of the client's classes. In the authors' code, the outputs of all other classes are 0,
so another class is predicted if all outputs of the client's classes are negative.
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
    """Unweighted statistics of the clients' accuracies in [0, 1]."""

    mean: float
    sd: float
    """Sample standard deviation (divided by n - 1); 0 for a single client."""
    clients: int
    """Number of clients with test samples."""
    histogram: dict[int, int]
    """Maps each accuracy in whole percent (0 to 100, rounded down) to the number of clients."""


def deal(labels: Ints, held: Ints, seed: int) -> Ints:
    """Assign each test sample to a client. Returns the client of each sample, (N,). The value is NOBODY for samples of
    a class that no client has.

    For each class, the fraction of test samples assigned to a client equals the client's fraction of the training
    samples, up to rounding. The order of the clients differs between classes, so that rounding does not favour certain
    clients.

    Args:
        labels: Classes of the test samples, (N,).
        held: Number of training samples per class and client, (classes, clients).
    """
    rng, owner = seeds.rng(seed, "local accuracy"), np.full(len(labels), NOBODY, dtype=np.int64)
    for label, row in enumerate(held):
        places, clients = rng.permutation(np.flatnonzero(labels == label)), rng.permutation(np.flatnonzero(row))
        if len(clients):
            ends = np.cumsum(row[clients])
            owner[places] = np.repeat(clients, np.diff(ends * len(places) // ends[-1], prepend=0))
    return owner


class LocalAccuracy:
    """Records the test samples that each level classifies correctly. Pass the method `watch` to `evaluate_pool`. The
    arguments are described in `deal`."""

    def __init__(self, labels: Ints, held: Ints, seed: int) -> None:
        self._owner = deal(labels, held, seed)
        self._labels, self._owner_of = torch.from_numpy(labels), torch.from_numpy(self._owner)
        self._foreign = torch.from_numpy(held.T == 0)
        self._correct: dict[str, Tensor] = {}

    def watch(self, level: str, outputs: Tensor, places: Tensor) -> None:
        """Record a level's `outputs` (B, classes) for the test samples with the indices `places` (B,)."""
        correct = self._correct.setdefault(level, torch.zeros(len(self._labels), dtype=torch.bool))
        chosen = outputs.cpu().masked_fill(self._foreign[self._owner_of[places]], -math.inf).argmax(1)
        correct[places] = chosen == self._labels[places]

    def of(self, level: str) -> Local | None:
        """Return a level's local accuracy; None if no client has test samples. Call `watch` for all samples first."""
        dealt = self._owner != NOBODY
        counts, watched = np.bincount(self._owner[dealt]), self._correct[level].numpy()[dealt]
        correct = np.bincount(self._owner[dealt], weights=watched)[counts > 0].astype(np.int64)
        counts = counts[counts > 0]
        found = correct / counts
        if not len(found):
            return None
        # Compute the percentage from integers, because the float 100 * 0.29 is less than 29.
        histogram = dict(sorted(Counter((100 * correct // counts).tolist()).items()))
        sd = statistics.stdev(found) if len(found) > 1 else 0.0
        return Local(statistics.fmean(found), sd, len(found), histogram)
