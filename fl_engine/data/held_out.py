"""Samples that each client holds out from its training, to evaluate the global model on them (`evaluate.on: clients`).

Which ones follows from the seed, the client's number and how many samples it has: not from other clients, so that a
device that holds its own data holds out the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fl_engine.core import seeds
from fl_engine.data.partition import Partition
from fl_engine.data.rules import Ints

LEAST = 2
"""Samples that are held out at least, and that are left to train on: networks that normalise by the batch take no
single sample. A client with fewer than twice as many holds out none."""


def held_count(samples: int, share: float) -> int:
    """How many of a client's samples are held out: the share, rounded half up."""
    if samples < 2 * LEAST:
        return 0
    return min(max(math.floor(samples * share + 0.5), LEAST), samples - LEAST)


def split(samples: int, share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """(positions to train on, positions held out), ascending, of a client's samples 0 .. samples - 1."""
    drawn = seeds.rng(seed, "held out", client=client).permutation(samples).astype(np.int64)
    count = held_count(samples, share)
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def hold_out(partition: Partition, share: float, seed: int) -> tuple[Partition, tuple[Ints, ...]]:
    """The partition without the samples that clients hold out; and these, ascending, by client. `counts` and `noise`
    stay those of all samples that a client has."""
    parts = [split(len(own), share, seed, client) for client, own in enumerate(partition.clients)]
    clients = tuple(own[train] for own, (train, _) in zip(partition.clients, parts, strict=True))
    held = tuple(own[out] for own, (_, out) in zip(partition.clients, parts, strict=True))
    return replace(partition, clients=clients), held
