"""Partitions the training samples into the server's proxy and the clients' parts, adds label noise, and holds out data.

The proxy contains a fraction of all samples, or all samples of the server's classes. The proxy is drawn before clients
get samples, so the server evaluates models on data that no client trains on. Neither the server nor the clients get
test samples. With `proxy_shared`, clients also get the samples of the proxy. For a given seed, the proxy does not
depend on the rule or on `proxy_shared`.

The task defines the label of a sample, which is the class, or the quantile bin of a numeric target. If a task has no
labels, rules that distribute samples by label require clusters of the samples instead (`data.clusters`).

Every sample belongs either to the proxy or to exactly one client; only the samples of a shared proxy belong to both.
All randomness comes from `seeds.rng(seed, "proxy")` and `seeds.rng(seed, "partition")`.

Label noise imitates the mistakes of a centrally trained model, as in FedAIoT (Alam, Federated Learning Benchmarks and
Frameworks for Artificial Intelligence of Things, Michigan State University 2023, section 2.2.3.5). Q[i, j] is the
fraction of samples of class i that the model predicts as class j. From the n training samples of a client, int(n *
share) samples are drawn at random. The label y of a drawn sample is replaced by another label, drawn from row Q[y].

As in the authors' code, the labels of class i do not change if row Q[i] has an entry of 0.95 or more. The fraction of
wrong labels may therefore be smaller than `share`. The authors' code draws from Q[y] until the label differs. This
module draws once from Q[y] without the diagonal entry, scaled to a sum of 1. The resulting distribution is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fl_engine.core import seeds
from fl_engine.core.errors import PartitionError
from fl_engine.core.fields import Count, Index, Moves, Section, UserPath
from fl_engine.core.samples import Data
from fl_engine.core.task import class_count, has, label_word
from fl_engine.data import partition_rules as rules
from fl_engine.data.partition import NoiseFigures, Partition
from fl_engine.data.partition_rules import Ints
from fl_engine.data.transforms import fingerprint

Rule = Literal["iid", "dirichlet", "dirichlet_per_client", "quantity", "disjoint_labels", "natural", "manual", "local"]
"""Rules that assign samples to clients. With `local`, each client has its own data (`data.local_data`)."""
BY_LABEL = ("dirichlet", "dirichlet_per_client", "disjoint_labels")
CLUSTER = "cluster"
LEAST_HELD_OUT = 2
"""Minimum number of held-out samples and of remaining training samples at a client, because batch norm requires two
samples. A client with fewer than twice this number of samples does not hold out any samples."""


class PartitionConfig(Section):
    rule: Rule = "dirichlet"
    clients: Count = 20
    """Number of clients."""
    alpha: float = 0.6
    """Concentration of dirichlet, dirichlet_per_client and quantity. Smaller values make clients more heterogeneous."""
    cap: bool = False
    """With dirichlet, split classes only among clients with fewer samples than in an equal split."""
    labels_per_client: Count = 2
    """With disjoint_labels, the number of labels of each client."""
    minimum: Count = 20
    """Minimum number of samples of a client. The dirichlet rules and quantity ensure this minimum. Other rules fail if
    a client has fewer samples."""
    map: UserPath | None = None
    """With manual, a JSON file with each client's training samples: {"clients": [[0, 3, ...], ...]}."""
    folders: Annotated[UserPath | None, Moves.PLACE] = None
    """With local, a folder that contains a data folder for each simulated client. If null, the data are on the
    devices."""
    most: Count = 100_000
    """With local, the largest number of training samples that a client may report."""
    features: UserPath | None = None
    """Features whose clusters replace the labels: an .npy file with one row per training sample, or the name of an
    untrained network, whose last hidden features are used. If null, labels are used."""
    clusters: Annotated[int, Field(ge=2)] = 10
    """Number of k-means clusters of `features`."""
    proxy: float = 0.05
    """Fraction of the training data for the server, which pre-trains on 80 % of it and measures APoZ on 20 %."""
    proxy_shared: bool = False
    """If true, clients also get the samples of the proxy (FlexFL's Table III). Use this option only for studies,
    because the server then has data of clients."""
    server_classes: tuple[Index, ...] = ()
    """Classes that only the server has, e.g. [8, 9], as in FedX. The proxy then contains all samples of these
    classes."""
    seed: int | None = None
    """Seed of the partition; null: the run's seed."""


def partition(
    data: Data, config: PartitionConfig, seed: int, clusters: Ints | None = None, owner: Ints | None = None
) -> Partition:
    """Draw the proxy, and distribute the other samples with the configured rule, which must not be local.

    Rules that distribute samples by label use `clusters` (N_train,), if given, instead of labels. The rule `manual`
    reads the client of each sample from `owner` (N_train,). The result depends only on the arguments and is the same on
    every machine. Raises PartitionError if the rule cannot be applied to the data or with the configuration.
    """
    rule, clients, minimum = config.rule, config.clients, config.minimum
    clusters = clusters if rule in BY_LABEL else None
    if rule in BY_LABEL and clusters is None:
        _check_labels(data, rule)
    labels = labels_of(data) if clusters is None else clusters
    proxy_train, proxy_test, rest = _proxy(data, len(labels), config, seed)
    rules.check_room(len(rest), clients, minimum)
    rng, own = seeds.rng(seed, "partition"), dict[str, Any]()
    match rule:
        case "natural":
            if data.natural_client is None:
                text = f"because {data.name} does not contain the source (writer, user) of each sample"
                raise PartitionError.at(f"partition.rule must not be natural, {text}")
            parts = rules.natural(data.natural_client.numpy()[rest], clients)
        case "manual":
            if owner is None:
                raise PartitionError.at("partition.map must be a JSON file if partition.rule=manual")
            parts = rules.manual(owner, clients, rest)
        case "iid":
            parts = rules.iid(labels[rest], clients, rng)
        case "disjoint_labels":
            own = {"labels_per_client": config.labels_per_client}
            parts = rules.disjoint_labels(labels[rest], clients, rng=rng, **own)
        case "dirichlet" | "dirichlet_per_client" | "quantity":
            own = {"alpha": config.alpha} | ({"cap": True} if config.cap and rule == "dirichlet" else {})
            parts = getattr(rules, rule)(labels[rest], clients, minimum=minimum, rng=rng, **own)
        case _:
            raise PartitionError(f"partition.rule={rule} does not assign samples to clients")
    held = tuple(rest[part] for part in parts)
    sizes = [len(part) for part in held]
    if min(sizes) < minimum:
        raise PartitionError(
            f"partition.minimum must be at most {min(sizes)}, the number of samples of client {np.argmin(sizes)}, got "
            f"{minimum}"
        )
    rows, word = max(1, data.task.label_count), label_word(data.task)
    if clusters is not None:
        rows, word = int(clusters.max()) + 1, CLUSTER
    parameters: dict[str, bool | int | float] = {"clients": clients}
    parameters |= {} if config.server_classes else {"proxy_share": config.proxy}
    parameters |= {"proxy_shared": True} if config.proxy_shared else {}
    parameters |= {"seed": seed, "minimum": minimum, **own}
    counts, classes = statistics(held, labels, rows), tuple(sorted(config.server_classes))
    return Partition(
        proxy_train, proxy_test, held, rule, parameters, fingerprint(data), counts, word, clusters, classes
    )


def _proxy(data: Data, samples: int, config: PartitionConfig, seed: int) -> tuple[Ints, Ints, Ints]:
    """Draw the proxy; return the proxy data for training, the proxy data for evaluation, and the clients' data."""
    rng, server_classes = seeds.rng(seed, "proxy"), config.server_classes
    if not server_classes:
        return rules.split_proxy(samples, config.proxy, rng, shared=config.proxy_shared)
    if config.proxy_shared:
        raise PartitionError("partition.proxy_shared must be false with partition.server_classes")
    count = class_count(data.task)
    if not count:
        raise PartitionError(
            f"partition.server_classes must be [] because the targets of {data.name} ({data.task.name}) are not classes"
        )
    return rules.split_classes(labels_of(data), server_classes, count, rng)


def _check_labels(data: Data, rule: str) -> None:
    if not data.task.label_count:
        raise PartitionError.at(
            f"partition.rule={rule} requires labels, but the targets of {data.name} ({data.task.name}) have no labels. "
            "Choose another rule, set partition.features, or define quantile bins for the task"
        )
    if rule == "disjoint_labels" and (has(data.task, "boxes") or has(data.task, "maps")):
        raise PartitionError.at(
            f"partition.rule must not be {rule}, because the samples of {data.name} have several labels"
        )


def labels_of(data: Data) -> Ints:
    """Return the label of each training sample. All labels are 0 if the task does not define labels."""
    return data.task.labels(data.train_y) if data.task.label_count else np.zeros(len(data.train_y), dtype=np.int64)


def statistics(clients: tuple[Ints, ...], labels: Ints, classes: int) -> Ints:
    """Return an array (classes, clients) with the number of samples of each class at each client. `labels` contains the
    label of every training sample."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in clients], axis=1).astype(np.int64)


def likely_mistakes(confusion: NDArray[np.int64], sure: float, unknown: Sequence[int] = ()) -> NDArray[np.float64]:
    """Return an array (classes, classes) in which row c is the distribution of wrong labels for class c. The row is
    zero if labels of class c do not change.

    Entry [i, j] of `confusion` (classes, classes) is the number of samples of class i that were predicted as class j.
    Labels of a class do not change if at least the fraction `sure` of its samples was predicted as one class, or if the
    class has no samples. Clients do not have samples of the `unknown` classes, so labels never change to an unknown
    class. Labels of a class that was confused only with unknown classes do not change.
    """
    counts = confusion.astype(np.float64)
    of_class = counts.sum(1, keepdims=True)
    unsure = (of_class > 0) & (counts.max(1, keepdims=True) < sure * of_class)
    others = np.where(unsure, counts * (1 - np.eye(len(counts))), 0.0)
    others[:, list(unknown)] = 0.0
    total = others.sum(1, keepdims=True)
    return others / np.where(total > 0, total, 1.0)


def draw_noise(
    targets: Ints,
    clients: Sequence[Ints],
    mistakes: NDArray[np.float64],
    share: float,
    seed: int,
    held_out: Sequence[Ints] = (),
) -> tuple[NoiseFigures, tuple[Ints, ...]]:
    """Return statistics of the noise, and the noisy labels of each client's samples. Each client has a separate random
    generator.

    `targets` (N_train,) contains the correct classes, and `mistakes` is the result of `likely_mistakes`. `held_out`
    contains the held-out samples of each client; it is empty if clients train on all samples.
    """
    labels, left_out = [], 0
    for client, indices in enumerate(clients):
        rng = seeds.rng(seed, "label noise", client=client)
        held = targets[indices]  # a copy
        trained = np.flatnonzero(~np.isin(indices, held_out[client])) if held_out else np.arange(len(indices))
        left_out += len(indices) - len(trained)
        for i in trained[rng.permutation(len(trained))[: int(len(trained) * share)]]:
            if mistakes[held[i]].any():
                held[i] = rng.choice(len(mistakes), p=mistakes[held[i]])
        labels.append(held)
    wrong = tuple(int((targets[indices] != held).sum()) for indices, held in zip(clients, labels, strict=True))
    return NoiseFigures(share=share, wrong=wrong, held_out=left_out), tuple(labels)


def with_noise(data: Data, partition: Partition) -> Data:
    """Return the data with the clients' noisy labels, or `data` itself if the partition has no label noise."""
    if partition.noise is None:
        return data
    targets = data.train_y.clone()
    targets[torch.from_numpy(np.concatenate(partition.clients))] = torch.from_numpy(np.concatenate(partition.noisy))
    return replace(data, train_y=targets)


def split_held_out(samples: int, share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """Split a client's positions 0 .. samples - 1 into training positions and held-out positions, both ascending. The
    split does not depend on other clients, so a device holds out the same samples as in a simulation."""
    drawn = seeds.rng(seed, "held out", client=client).permutation(samples).astype(np.int64)
    count = 0
    if samples >= 2 * LEAST_HELD_OUT:  # the fraction is rounded half up
        count = min(max(math.floor(samples * share + 0.5), LEAST_HELD_OUT), samples - LEAST_HELD_OUT)
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def hold_out(partition: Partition, share: float, seed: int, data: Data) -> tuple[Partition, tuple[Ints, ...]]:
    """Return the partition without held-out samples, and the positions of each client's held-out samples in ascending
    order. Clients evaluate models on these samples (`evaluate.on: clients`). The partition's `counts` and `noise` do
    not change.

    If the rule is natural and the sources of the test samples are known, clients hold out no training samples. Each
    client then evaluates models on the test samples of its own sources, whose positions (`Data.at`) are returned.
    """
    if partition.rule == "natural" and data.natural_client is not None and data.natural_test_client is not None:
        trained, tests = data.natural_client.numpy(), data.natural_test_client.numpy()
        sources = (np.unique(trained[own]) for own in partition.clients)
        return partition, tuple(len(trained) + np.flatnonzero(np.isin(tests, each)) for each in sources)
    parts = [split_held_out(len(own), share, seed, client) for client, own in enumerate(partition.clients)]
    clients = tuple(own[train] for own, (train, _) in zip(partition.clients, parts, strict=True))
    held = tuple(own[out] for own, (_, out) in zip(partition.clients, parts, strict=True))
    return replace(partition, clients=clients), held
