"""Partition rules: pure functions from labels (or groups) to an ascending index array for each client.

    iid                   equal random parts (McMahan et al., AISTATS 2017); the "uniform partition" of FedAIoT
    dirichlet             one Dir(alpha) over the clients for every class (Yurochkin et al., ICML 2019;
                          "distribution-based label imbalance" of Li et al., Federated Learning on Non-IID Data
                          Silos: An Experimental Study, ICDE 2022); with `cap` as in the code of FedAIoT (Alam,
                          Michigan State University 2023)
    dirichlet_per_client  one Dir(alpha) over the classes for every client (Hsu et al., arXiv:1909.06335), and one over
                          the clients for how many samples each gets (FedAIoT, section 2.2.3.1)
    quantity              equal mixtures of classes in shares drawn from Dir(alpha) ("quantity skew" of Li et al.)
    disjoint_labels       every client holds L labels ("quantity-based label imbalance", #C = L, of Li et al.)
    natural               by the writer or user whom the data set names
    manual                by a map that is given
    local                 nothing is dealt: each client has data of its own (`data.local_data`)

Below, "class" means label. Every sample belongs to one client, or to the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import PartitionError

Ints = NDArray[np.int64]
TO_MEASURE = 0.2
"""Share of the proxy to measure on; the rest is to train on (FlexFL: 80 % to pre-train, 20 % for APoZ)."""


def iid(labels: Ints, clients: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Deal random parts whose sizes differ by one at most. Raises PartitionError for more clients than samples."""
    check_room(len(labels), clients, 1)
    return tuple(np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients))


def dirichlet(
    labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator, cap: bool = False
) -> tuple[Ints, ...]:
    """For each class cut its shuffled samples by one draw from Dir(alpha), then top up small clients.

    With `cap`, a client that holds samples / clients or more when a class is dealt gets none of it, and the others'
    shares grow in proportion (FedAIoT, the authors' code). If the others' shares are all 0, they share equally.

    Topping up: while the smallest client has fewer than `minimum` samples, it gets a random sample of the largest
    client (ties: the lower client number). The shares are not drawn again, so this ends for every alpha.

    Raises PartitionError for an alpha that is not positive and finite, and if clients x minimum > samples.
    """
    _check_alpha(alpha)
    check_room(len(labels), clients, minimum)
    return _fed(dealt_by_label(labels, clients, alpha, rng, cap), clients, minimum, rng)


def dealt_by_label(labels: Ints, clients: int, alpha: float, rng: np.random.Generator, cap: bool = False) -> Ints:
    """Return the client of each sample, as `dirichlet` deals them before it tops up small clients."""
    order = rng.permutation(len(labels))
    owner, sizes = np.empty(len(labels), dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for label in np.unique(labels):
        samples = order[labels[order] == label]
        shares = _drawn(clients, alpha, rng)
        if cap:
            shares = _capped(shares, sizes < len(labels) / clients)
        cuts = np.floor(np.cumsum(shares)[:-1] * len(samples) + 0.5).astype(np.int64)
        for client, part in enumerate(np.split(samples, cuts)):
            owner[part] = client
            sizes[client] += len(part)
    return owner


def _capped(shares: NDArray[np.float64], below: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The shares, scaled to sum to 1, with 0 for clients that are not `below` the cap. Until all samples are dealt, at
    least one client is below."""
    left = np.where(below, shares, 0.0)
    total = left.sum()
    capped: NDArray[np.float64] = left / total if total > 0 else below / below.sum()
    return capped


def dirichlet_per_client(
    labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator
) -> tuple[Ints, ...]:
    """Draw each client's mixture of classes from Dir(alpha) over the classes, and the clients' numbers of samples from
    one Dir(alpha) over the clients. Numbers below `minimum` grow, one by one, at the cost of the largest.

    All clients' places are filled in random order. For each place a class is drawn from the client's mixture,
    restricted to the classes that have samples left. If the mixture has none of these, a remaining sample is drawn
    uniformly. So every sample is dealt, and late places have less choice. Raises as `dirichlet` does.
    """
    _check_alpha(alpha)
    check_room(len(labels), clients, minimum)
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
    """Draw the sizes of the clients' random parts from Dir(alpha), then top up small clients as in `dirichlet`, with
    the same errors."""
    _check_alpha(alpha)
    check_room(len(labels), clients, minimum)
    cuts = np.floor(np.cumsum(_drawn(clients, alpha, rng))[:-1] * len(labels) + 0.5).astype(np.int64)
    owner = np.empty(len(labels), dtype=np.int64)
    for client, part in enumerate(np.split(rng.permutation(len(labels)), cuts)):
        owner[part] = client
    return _fed(owner, clients, minimum, rng)


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and alpha > 0):
        raise PartitionError(f"partition.alpha must be positive and finite, got {alpha}")


def _drawn(clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    shares = rng.dirichlet(np.full(clients, alpha))
    if not math.isclose(shares.sum(), 1.0, rel_tol=1e-9):
        raise PartitionError(f"partition.alpha={alpha} is too large for floating point. Set partition.rule=iid")
    return shares


def _fed(owner: Ints, clients: int, minimum: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Each client's samples, after clients with fewer than `minimum` were topped up."""
    sizes = np.bincount(owner, minlength=clients)
    while sizes.min() < minimum:
        rich, poor = int(sizes.argmax()), int(sizes.argmin())
        owner[rng.choice(np.flatnonzero(owner == rich))] = poor
        sizes[rich] -= 1
        sizes[poor] += 1
    return tuple(np.flatnonzero(owner == client) for client in range(clients))


def disjoint_labels(labels: Ints, clients: int, labels_per_client: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Give each client exactly L labels, and deal each class's samples evenly to the clients that hold it.

    Classes are held by as equal numbers of clients as their sample counts allow. The classes are those that occur in
    `labels`. Raises PartitionError for L < 1, L > classes, clients x L < classes (no client would hold some class), and
    if a client could not have one sample of each of its labels.
    """
    check_room(len(labels), clients, 1)
    classes, samples = np.unique(labels, return_counts=True)
    slots = clients * labels_per_client
    if not 1 <= labels_per_client <= len(classes):
        raise PartitionError(
            f"partition.labels_per_client must be 1 to {len(classes)} (the classes), got {labels_per_client}"
        )
    if slots < len(classes):
        least = -(-len(classes) // labels_per_client)
        raise PartitionError(
            f"partition.clients must be at least {least} with {labels_per_client} labels of {len(classes)} each, got "
            f"{clients}"
        )
    most = np.minimum(samples, clients)
    if most.sum() < slots:
        raise PartitionError(
            f"partition.clients={clients} with {labels_per_client} labels each need {slots} pairs of client and label, "
            f"but there are samples for {most.sum()}. Take fewer clients or labels per client"
        )

    # How many clients hold each class: filled evenly, but never more than the class has samples.
    holders = np.ones(len(classes), dtype=np.int64)
    while (missing := slots - int(holders.sum())) > 0:
        growing = np.flatnonzero(holders < most)
        lowest = growing[holders[growing] == holders[growing].min()]
        holders[rng.permutation(lowest)[:missing]] += 1

    # Each client takes the L classes with the most places left. As L is the same for all clients, this always succeeds
    # (Gale 1957, Ryser 1957: bipartite graphs of given degrees).
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


def natural(groups: Ints, clients: int | None = None) -> tuple[Ints, ...]:
    """Make one client of each group (writer, user), in ascending order of the group's number.

    With fewer clients than groups, the g-th group goes to client g mod `clients`. Groups are never split, so this
    raises PartitionError for more clients than groups.
    """
    names, rank = np.unique(groups, return_inverse=True)
    number = len(names) if clients is None else clients
    if not 1 <= number <= len(names):
        raise PartitionError(f"partition.clients must be 1 to {len(names)}, the natural clients, got {number}")
    return tuple(np.flatnonzero(rank % number == client) for client in range(number))


def manual(owner: Ints, clients: int, rest: Ints) -> tuple[Ints, ...]:
    """Deal by `owner`, the client of each training sample; `rest` are the positions that the proxy leaves. Raises
    PartitionError if the map has another number of clients."""
    found = int(owner.max()) + 1
    if clients != found:
        raise PartitionError(f"partition.clients must be {found}, the clients of partition.map, got {clients}")
    return tuple(np.flatnonzero(owner[rest] == client) for client in range(clients))


def split_proxy(samples: int, share: float, rng: np.random.Generator, shared: bool = False) -> tuple[Ints, Ints, Ints]:
    """Return (proxy to train on, proxy to measure on, the rest) of positions 0 .. samples - 1, drawn uniformly. With
    `shared` the rest is all positions, and the proxy is the same.

    The proxy has `share` of the samples, TO_MEASURE of it to measure on, each rounded half up and at least one sample.
    A share of 0 means no proxy. Raises PartitionError for a share outside [0, 1), with `shared` outside (0, 1], or a
    proxy of fewer than two samples.
    """
    if not (0 < share <= 1 if shared else 0 <= share < 1):
        allowed = "in (0, 1] with partition.proxy_shared" if shared else "in [0, 1) without partition.proxy_shared"
        raise PartitionError(f"partition.proxy must be {allowed}, got {share}")
    size = math.floor(samples * share + 0.5)
    if share > 0 and size < 2:
        raise PartitionError(
            f"partition.proxy={share} of {samples} samples is {size}, but one to train on and one to measure on are "
            "needed. Raise it, or set it to 0 for no proxy"
        )
    test = _to_measure(size) if size else 0
    order = rng.permutation(samples)
    rest = np.arange(samples) if shared else np.sort(order[size:])
    return np.sort(order[test:size]), np.sort(order[:test]), rest


def split_classes(
    classes_n: Ints, owned: Sequence[int], count: int, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Return (proxy to train on, proxy to measure on, the rest). The proxy has all samples of the classes `owned`, and
    no others. `classes_n` (N,) are the samples' classes, 0 .. count - 1. TO_MEASURE of the proxy is to measure on.

    Raises PartitionError for an unknown class or one that is named twice, if all classes are owned, or their samples
    are fewer than two.
    """
    if len(set(owned)) < len(owned) or len(owned) >= count or not all(0 <= each < count for each in owned):
        raise PartitionError(
            f"partition.server_classes must be some of the classes 0 to {count - 1}, but not all, each once, got "
            f"{list(owned)}"
        )
    own = np.isin(classes_n, owned)
    size = int(own.sum())
    if size < 2:
        raise PartitionError(
            f"partition.server_classes={list(owned)} have {size} training samples, but one to train on and one to "
            "measure on are needed. Take other classes, or raise dataset.train_samples"
        )
    test, order = _to_measure(size), rng.permutation(np.flatnonzero(own))
    return np.sort(order[test:]), np.sort(order[:test]), np.flatnonzero(~own)


def _to_measure(size: int) -> int:
    """The number of a proxy's samples to measure on."""
    return min(max(math.floor(size * TO_MEASURE + 0.5), 1), size - 1)


def check_room(samples: int, clients: int, minimum: int) -> None:
    """Raise PartitionError unless every client can have `minimum` samples."""
    if clients < 1 or minimum < 1 or clients * minimum > samples:
        raise PartitionError(
            f"partition.clients={clients} with partition.minimum={minimum} need at least one sample each and "
            f"{clients * minimum} samples together, and {samples} are left. Lower one of them, or partition.proxy"
        )
