"""A partition: the positions of the proxy's and of each client's training samples; labels, and samples held out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fl_engine.core import seeds
from fl_engine.core.samples import Data
from fl_engine.data.label_noise import LabelNoise, told
from fl_engine.data.partition_rules import Ints

LEAST_HELD_OUT = 2
"""Samples that are at least held out, and at least left to train on, because networks that normalise by the batch need
two. A client with fewer than twice as many holds out none."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in the training data, ascending int64, and how they were chosen."""

    proxy_train: Ints
    proxy_test: Ints
    clients: tuple[Ints, ...]
    rule: str
    parameters: Mapping[str, bool | int | float]
    """The parameters of the rule."""
    data: str
    """The fingerprint of the data set."""
    counts: Ints
    """(labels, clients): how many samples of each label a client has; one row if the task has no labels."""
    label: str = "class"
    """The word for a label."""
    clusters: Ints | None = None
    """(N_train,): the label of each sample, if labels are clusters."""
    noise: LabelNoise | None = None
    """The wrong labels of clients."""
    server_classes: tuple[int, ...] = ()
    """The classes, ascending, whose samples make up the proxy; empty if the proxy is a share of all samples."""


def labels_of(data: Data) -> Ints:
    """Return the label of each training sample; all 0 if the task has no labels."""
    return data.task.labels(data.train_y) if data.task.label_count else np.zeros(len(data.train_y), dtype=np.int64)


def as_told(data: Data, partition: Partition) -> Data:
    """Return the data with the clients' labels, some of them wrong; `data` itself without label noise."""
    if partition.noise is None:
        return data
    return replace(data, train_y=told(data.train_y, partition.clients, partition.noise))


def statistics(clients: tuple[Ints, ...], labels: Ints, classes: int) -> Ints:
    """Return (classes, clients), the number of samples of each class at each client. `labels` are those of all training
    samples."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in clients], axis=1).astype(np.int64)


# ------------------------------------------------------------------------------------------------- held out
def held_count(samples: int, share: float) -> int:
    """Return how many of a client's samples are held out: the share, rounded half up."""
    if samples < 2 * LEAST_HELD_OUT:
        return 0
    return min(max(math.floor(samples * share + 0.5), LEAST_HELD_OUT), samples - LEAST_HELD_OUT)


def split_held_out(samples: int, share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """Return the positions to train on and those held out, ascending, of a client's samples 0 .. samples - 1. They do
    not depend on other clients, so a device with its own data holds out the same samples."""
    drawn = seeds.rng(seed, "held out", client=client).permutation(samples).astype(np.int64)
    count = held_count(samples, share)
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def hold_out(partition: Partition, share: float, seed: int) -> tuple[Partition, tuple[Ints, ...]]:
    """Return the partition without the samples that clients hold out to evaluate the global model on them
    (`evaluate.on: clients`), and these samples, ascending, for each client. `counts` and `noise` do not change."""
    parts = [split_held_out(len(own), share, seed, client) for client, own in enumerate(partition.clients)]
    clients = tuple(own[train] for own, (train, _) in zip(partition.clients, parts, strict=True))
    held = tuple(own[out] for own, (_, out) in zip(partition.clients, parts, strict=True))
    return replace(partition, clients=clients), held
