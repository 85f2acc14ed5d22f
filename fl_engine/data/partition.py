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

CLASS = "class"
"""The label of a classification, the default, which `partition.json` leaves out."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in the training data, ascending int64, and how they came about.

    `counts` (labels, clients) says how many samples of each label a client holds (one row if the task has no labels),
    and `label` is the word for a label. If the labels are clusters, `clusters` (N_train,) holds them. `noise` holds the
    clients' wrong labels, or is None. `parameters` are the rule's; `data` is the fingerprint of the data set that the
    positions belong to. `server_classes`, ascending: those whose samples make up the proxy; empty: it is a share of all
    samples.
    """

    proxy_train: Ints
    proxy_test: Ints
    clients: tuple[Ints, ...]
    rule: str
    parameters: Mapping[str, bool | int | float]
    data: str
    counts: Ints
    label: str = CLASS
    clusters: Ints | None = None
    noise: LabelNoise | None = None
    server_classes: tuple[int, ...] = ()


def labels_of(data: Data) -> Ints:
    """The label of each training sample; all 0 if the task has no labels."""
    return data.task.labels(data.train_y) if data.task.label_count else np.zeros(len(data.train_y), dtype=np.int64)


def as_told(data: Data, partition: Partition) -> Data:
    """The data with the clients' labels, some of them wrong; `data` itself without label noise."""
    if partition.noise is None:
        return data
    return replace(data, train_y=told(data.train_y, partition.clients, partition.noise))


def statistics(clients: tuple[Ints, ...], labels: Ints, classes: int) -> Ints:
    """(classes, clients): how many samples of each class each client holds; `labels` of all training data."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in clients], axis=1).astype(np.int64)


LEAST_HELD_OUT = 2
"""Samples that are held out at least, and that are left to train on: networks that normalise by the batch take no
single sample. A client with fewer than twice as many holds out none."""


def held_count(samples: int, share: float) -> int:
    """How many of a client's samples are held out: the share, rounded half up."""
    if samples < 2 * LEAST_HELD_OUT:
        return 0
    return min(max(math.floor(samples * share + 0.5), LEAST_HELD_OUT), samples - LEAST_HELD_OUT)


def split_held_out(samples: int, share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """(positions to train on, positions held out), ascending, of a client's samples 0 .. samples - 1."""
    drawn = seeds.rng(seed, "held out", client=client).permutation(samples).astype(np.int64)
    count = held_count(samples, share)
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def hold_out(partition: Partition, share: float, seed: int) -> tuple[Partition, tuple[Ints, ...]]:
    """The partition without the samples that clients hold out; and these, ascending, by client. `counts` and `noise`
    stay those of all samples that a client has."""
    parts = [split_held_out(len(own), share, seed, client) for client, own in enumerate(partition.clients)]
    clients = tuple(own[train] for own, (train, _) in zip(partition.clients, parts, strict=True))
    held = tuple(own[out] for own, (_, out) in zip(partition.clients, parts, strict=True))
    return replace(partition, clients=clients), held
