"""Partition rules: pure functions that return an ascending array of sample positions for each client.

`iid` splits the samples at random into equal parts (McMahan et al., AISTATS 2017; FedAIoT's "uniform partition").
`dirichlet` draws the clients' shares of each class from Dir(alpha) (Yurochkin et al., ICML 2019). Li et al., Federated
Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022, call the rule "distribution-based label imbalance".
The option `cap` is from the code of FedAIoT (Alam, Michigan State University 2023).
`dirichlet_per_client` draws each client's class proportions from Dir(alpha) (Hsu et al., arXiv:1909.06335). The
proportions of the clients' sample counts are also drawn from Dir(alpha) (FedAIoT, section 2.2.3.1).
`quantity` splits the samples at random into parts with sizes drawn from Dir(alpha) ("quantity skew" of Li et al.).
`disjoint_labels` gives each client samples of L labels ("quantity-based label imbalance", #C = L, of Li et al.).
`natural` groups samples by their writer or user in the data set.
`manual` reads the client of each sample from a file (`partition.map`).
`local` is for clients with their own data (`data.local_data`).

In this module, "class" and "label" are synonyms. Every sample belongs to one client, or to the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import PartitionError

Ints = NDArray[np.int64]
TO_MEASURE = 0.2
"""Fraction of the proxy data that is used for evaluation (in FlexFL, for APoZ) instead of training."""


def iid(labels: Ints, clients: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Split the samples at random into parts whose sizes differ by at most one."""
    return tuple(np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients))


def dirichlet(
    labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator, cap: bool = False
) -> tuple[Ints, ...]:
    """Split the shuffled samples of each class in proportions drawn from Dir(alpha), then top up small clients.

    With `cap`, a client that already has its equal share (samples / clients) gets no samples of the next class. The
    fractions of the other clients are scaled to a sum of 1, as in FedAIoT's published code. Topping up moves random
    samples, one at a time, from the largest to the smallest client until all clients have `minimum` samples (ties: the
    lower client number).
    """
    return _topped_up(dealt_by_label(labels, clients, alpha, rng, cap), clients, minimum, rng)


def dealt_by_label(labels: Ints, clients: int, alpha: float, rng: np.random.Generator, cap: bool = False) -> Ints:
    """Return the client of each sample according to `dirichlet`, before small clients are topped up."""
    order = rng.permutation(len(labels))
    owner, sizes = np.empty(len(labels), dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for label in np.unique(labels):
        samples = order[labels[order] == label]
        shares = _drawn(clients, alpha, rng)
        if cap:
            below = sizes < len(labels) / clients  # at least one client is below until all samples are assigned
            shares = np.where(below, shares, 0.0)
            shares = shares / shares.sum() if shares.any() else below / below.sum()
        cuts = np.floor(np.cumsum(shares)[:-1] * len(samples) + 0.5).astype(np.int64)
        for client, part in enumerate(np.split(samples, cuts)):
            owner[part] = client
            sizes[client] += len(part)
    return owner


def dirichlet_per_client(
    labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator
) -> tuple[Ints, ...]:
    """Draw the class proportions of each client from Dir(alpha), and the clients' shares of all samples from another
    Dir(alpha). While a client has fewer than `minimum` samples, one sample moves from the largest to the smallest
    client.

    Clients get one sample at a time, in random order. The class of the sample is drawn according to the client's class
    proportions, among the classes that still have samples. If the client's proportions of these classes are all 0, the
    sample is drawn uniformly from all remaining samples.
    """
    cuts = np.floor(np.cumsum(_drawn(clients, alpha, rng)) * len(labels) + 0.5).astype(np.int64)
    cuts[-1] = len(labels)
    sizes = np.diff(cuts, prepend=0)
    while sizes.min() < minimum:
        sizes[sizes.argmax()] -= 1
        sizes[sizes.argmin()] += 1
    order = rng.permutation(len(labels))
    samples = [order[labels[order] == label].tolist() for label in np.unique(labels)]
    mixtures = [_drawn(len(samples), alpha, rng) for _ in range(clients)]
    places = rng.permutation(np.repeat(np.arange(clients), sizes))
    left = np.array([len(each) for each in samples])
    owner = np.empty(len(labels), dtype=np.int64)
    for client, where in zip(places, rng.random(len(labels)), strict=True):
        there = np.flatnonzero(left)
        likely = np.cumsum(mixtures[client][there])
        if not likely[-1] > 0:
            likely = np.cumsum(left[there]).astype(np.float64)
        found = there[min(int(np.searchsorted(likely, where * likely[-1], side="right")), len(there) - 1)]
        left[found] -= 1
        owner[samples[found].pop()] = client
    return tuple(np.flatnonzero(owner == client) for client in range(clients))


def quantity(labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Split the samples at random in proportions drawn from Dir(alpha), then top up small clients as in `dirichlet`."""
    cuts = np.floor(np.cumsum(_drawn(clients, alpha, rng))[:-1] * len(labels) + 0.5).astype(np.int64)
    owner = np.empty(len(labels), dtype=np.int64)
    for client, part in enumerate(np.split(rng.permutation(len(labels)), cuts)):
        owner[part] = client
    return _topped_up(owner, clients, minimum, rng)


def _drawn(clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    if not (math.isfinite(alpha) and alpha > 0):
        raise PartitionError.at(f"partition.alpha must be positive and finite, got {alpha}")
    shares = rng.dirichlet(np.full(clients, alpha))
    if not math.isclose(shares.sum(), 1.0, rel_tol=1e-9):
        raise PartitionError.at(f"partition.alpha={alpha} is too large. Set partition.rule=iid")
    return shares


def _topped_up(owner: Ints, clients: int, minimum: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    sizes = np.bincount(owner, minlength=clients)
    while sizes.min() < minimum:
        rich, poor = int(sizes.argmax()), int(sizes.argmin())
        owner[rng.choice(np.flatnonzero(owner == rich))] = poor
        sizes[rich] -= 1
        sizes[poor] += 1
    return tuple(np.flatnonzero(owner == client) for client in range(clients))


def disjoint_labels(labels: Ints, clients: int, labels_per_client: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Give each client exactly `labels_per_client` labels, and split each label's samples evenly among its clients.

    The number of clients per label is as even as the sample counts allow. Raises PartitionError if a label would not
    have a client, or if a client would not get a sample of one of its labels.
    """
    classes, samples = np.unique(labels, return_counts=True)
    slots = clients * labels_per_client
    if not 1 <= labels_per_client <= len(classes):
        raise PartitionError(f"partition.labels_per_client must be from 1 to {len(classes)}, got {labels_per_client}")
    if slots < len(classes):
        least = -(-len(classes) // labels_per_client)
        raise PartitionError(f"partition.clients must be at least {least} to assign all labels, got {clients}")
    most = np.minimum(samples, clients)
    if most.sum() < slots:
        raise PartitionError(
            f"partition.clients={clients} with {labels_per_client} labels per client requires {slots} pairs of a "
            f"client and a label, but the samples suffice for only {most.sum()}. Lower partition.clients or "
            "partition.labels_per_client"
        )

    # Increase the number of clients of each class evenly, but not above the number of samples of the class.
    holders = np.ones(len(classes), dtype=np.int64)
    while (missing := slots - int(holders.sum())) > 0:
        growing = np.flatnonzero(holders < most)
        lowest = growing[holders[growing] == holders[growing].min()]
        holders[rng.permutation(lowest)[:missing]] += 1

    # Each client gets the L classes that still need the most clients. By the Gale-Ryser theorem (1957), this greedy
    # choice always succeeds, because L is the same for all clients.
    held_by: list[list[int]] = [[] for _ in classes]
    for client in range(clients):
        chosen = np.lexsort((rng.permutation(len(classes)), -holders))[:labels_per_client]
        holders[chosen] -= 1
        for i in chosen:
            held_by[i].append(client)

    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for i, label in enumerate(classes):
        dealt = np.array_split(rng.permutation(np.flatnonzero(labels == label)), len(held_by[i]))
        for client, part in zip(rng.permutation(held_by[i]), dealt, strict=True):
            parts[client].append(part)
    return tuple(np.sort(np.concatenate(part)) for part in parts)


def natural(groups: Ints, clients: int) -> tuple[Ints, ...]:
    """Assign the samples of each group (writer, user) to one client, in ascending order of group numbers.

    The g-th group belongs to client g mod `clients`, so a client may have several groups. Groups are never split.
    Raises PartitionError if there are more clients than groups.
    """
    names, rank = np.unique(groups, return_inverse=True)
    if not 1 <= clients <= len(names):
        most = f"{len(names)}, the number of natural clients with samples that are not in the proxy"
        raise PartitionError.at(f"partition.clients must be from 1 to {most}, got {clients}")
    return tuple(np.flatnonzero(rank % clients == client) for client in range(clients))


def manual(owner: Ints, clients: int, rest: Ints) -> tuple[Ints, ...]:
    """Assign the samples at the positions `rest` to clients. `owner` contains the client of each training sample.
    Raises PartitionError if the number of clients in `owner` is not `clients`."""
    found = int(owner.max()) + 1
    if clients != found:
        raise PartitionError.at(f"partition.clients must be {found}, as in partition.map, got {clients}")
    return tuple(np.flatnonzero(owner[rest] == client) for client in range(clients))


def split_proxy(samples: int, share: float, rng: np.random.Generator, shared: bool = False) -> tuple[Ints, Ints, Ints]:
    """Split the positions 0 .. samples - 1 at random; return the proxy data for training, the proxy data for
    evaluation, and the clients' data.

    The proxy contains the fraction `share` of the samples, of which the fraction TO_MEASURE is for evaluation. Sizes
    are rounded half up, to at least 1. If `share` is 0, the proxy is empty. With `shared`, the clients' data contain
    all positions.
    """
    if not (0 < share <= 1 if shared else 0 <= share < 1):
        allowed = "in (0, 1] with partition.proxy_shared" if shared else "in [0, 1) without partition.proxy_shared"
        raise PartitionError(f"partition.proxy must be {allowed}, got {share}")
    size = math.floor(samples * share + 0.5)
    if share > 0 and size < 2:
        raise PartitionError(f"partition.proxy must be 0 or select at least 2 samples, got {size} of {samples}")
    test = _to_measure(size) if size else 0
    order = rng.permutation(samples)
    rest = np.arange(samples) if shared else np.sort(order[size:])
    return np.sort(order[test:size]), np.sort(order[:test]), rest


def split_classes(
    classes_n: Ints, owned: Sequence[int], count: int, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Split the data by class; return the proxy data for training, the proxy data for evaluation, and the clients'
    data. The proxy contains exactly the samples of the classes `owned`. The fraction TO_MEASURE of the proxy is for
    evaluation. `classes_n` (N,) is the class of each sample, 0 .. count - 1."""
    if len(set(owned)) < len(owned) or len(owned) >= count or not all(0 <= each < count for each in owned):
        raise PartitionError(
            f"partition.server_classes must be distinct classes from 0 to {count - 1} and leave at least one class for "
            f"the clients, got {list(owned)}"
        )
    own = np.isin(classes_n, owned)
    size = int(own.sum())
    if size < 2:
        raise PartitionError(f"partition.server_classes must have at least 2 training samples, got {size}. Add classes")
    test, order = _to_measure(size), rng.permutation(np.flatnonzero(own))
    return np.sort(order[test:]), np.sort(order[:test]), np.flatnonzero(~own)


def _to_measure(size: int) -> int:
    return min(max(math.floor(size * TO_MEASURE + 0.5), 1), size - 1)


def check_room(samples: int, clients: int, minimum: int) -> None:
    """Raise PartitionError unless there are enough samples to give every client `minimum` samples."""
    if clients < 1 or minimum < 1 or clients * minimum > samples:
        raise PartitionError.at(
            f"partition.clients={clients} with partition.minimum={minimum} requires {clients * minimum} samples, but "
            f"only {samples} are available. Lower partition.clients or partition.minimum"
        )
