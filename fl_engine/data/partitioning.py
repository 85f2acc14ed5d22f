"""Partitions the training samples: first the server's proxy, then the clients.

The proxy is a share of all samples, or all samples of the classes that the server alone owns. It is cut from the
training data before any client gets a sample, so the server measures on data that no client trains on; test samples
reach neither. Where it is shared (`proxy_shared`), its samples are dealt to the clients too. For one seed the proxy is
the same under every rule, shared or not. The rules that deal samples to clients are in `data.partition_rules`.

The task of the data defines the labels: the class, or the quantile bin of a number. If a task has no labels, rules that
deal by labels need clusters of the samples instead (`fl_engine.data.clusters`).

Every sample ends in exactly one place, but for a shared proxy's. Randomness comes from `seeds.rng(seed, "proxy")` and
`seeds.rng(seed, "partition")` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from fl_engine.core import seeds
from fl_engine.core.errors import PartitionError, nearest
from fl_engine.core.samples import Data
from fl_engine.core.task import class_count, has_boxes, label_word
from fl_engine.data.partition import Partition, labels_of, statistics
from fl_engine.data.partition_rules import (
    Ints,
    check_room,
    dirichlet,
    dirichlet_per_client,
    disjoint_labels,
    iid,
    manual,
    natural,
    quantity,
    split_classes,
    split_proxy,
)
from fl_engine.data.transforms import fingerprint

Dealing = Literal["iid", "dirichlet", "dirichlet_per_client", "quantity", "disjoint_labels", "natural", "manual"]
Rule = Literal[Dealing, "local"]
RULES: tuple[str, ...] = get_args(Dealing)
"""Those that deal samples to clients; under `local` each client has its own (`data.local_data`)."""
BY_LABEL = ("dirichlet", "dirichlet_per_client", "disjoint_labels")
CLUSTER = "cluster"


def partition(
    data: Data,
    rule: str,
    clients: int,
    proxy_share: float,
    seed: int,
    alpha: float | None = None,
    labels_per_client: int | None = None,
    minimum: int = 1,
    cap: bool = False,
    clusters: Ints | None = None,
    owner: Ints | None = None,
    server_classes: Sequence[int] = (),
    proxy_shared: bool = False,
) -> Partition:
    """Cuts the proxy, then deals the rest to `clients` by `rule`, each at least `minimum` samples. The proxy is
    `proxy_share` of all samples; with `server_classes` it is all samples of these classes, whatever the share. With
    `proxy_shared` all samples are dealt to the clients, the proxy's too.

    `alpha` is for dirichlet, dirichlet_per_client and quantity, `cap` for dirichlet, `labels_per_client` for
    disjoint_labels, `clusters` (N_train,) replaces the labels for all rules that deal by labels, and `owner`
    (N_train,), each sample's client, is for manual; other rules ignore them. The result depends on the arguments alone,
    on every machine. Raises PartitionError if the data cannot be partitioned so.
    """
    clusters = clusters if rule in BY_LABEL else None
    if rule in BY_LABEL and clusters is None:
        _check_labels(data, rule)
    labels = labels_of(data) if clusters is None else clusters
    if server_classes and proxy_shared:
        raise PartitionError(
            f"partition.server_classes={list(server_classes)} are classes that the server alone owns, so their samples "
            "cannot be the clients' too: set partition.proxy_shared=false, or partition.server_classes=[]"
        )
    if server_classes:
        proxy_train, proxy_test, rest = _proxy_of(data, server_classes, seed)
    else:
        rng = seeds.rng(seed, "proxy")
        proxy_train, proxy_test, rest = split_proxy(len(labels), proxy_share, rng, shared=proxy_shared)
    check_room(len(rest), clients, minimum)
    parameters: dict[str, bool | int | float] = {"clients": clients}
    parameters |= {} if server_classes else {"proxy_share": proxy_share}
    parameters |= {"proxy_shared": True} if proxy_shared else {}
    parameters |= {"seed": seed, "minimum": minimum}
    own = _own_parameters(rule, alpha, labels_per_client, cap)
    parameters |= own
    match rule:
        case "natural":
            parts = natural(_left(data, rest, clients), clients)
        case "manual":
            if owner is None:
                raise PartitionError("the rule manual needs a map; set partition.map to a file")
            parts = manual(owner, clients, rest)
        case _:
            parts = _drawn(rule, labels[rest], clients, minimum, seeds.rng(seed, "partition"), own)
    held = tuple(rest[part] for part in parts)
    sizes = [len(part) for part in held]
    if min(sizes) < minimum:
        poorest = int(np.argmin(sizes))
        raise PartitionError(
            f"the rule {rule} leaves client {poorest} {sizes[poorest]} samples, fewer than the minimum of "
            f"{minimum}; take fewer clients or a smaller partition.minimum"
        )
    rows, word = max(1, data.task.label_count), label_word(data.task)
    if clusters is not None:
        rows, word = int(clusters.max()) + 1, CLUSTER
    counts, owned = statistics(held, labels, rows), tuple(sorted(server_classes))
    return Partition(
        proxy_train, proxy_test, held, rule, parameters, fingerprint(data), counts, word, clusters, None, owned
    )


def _own_parameters(rule: str, alpha: float | None, labels_per_client: int | None, cap: bool) -> dict[str, Any]:
    """The parameters that this rule alone has, as its function and `partition.json` name them. Raises PartitionError
    where one is not given, and for a rule that deals nothing or that there is not."""
    match rule:
        case "dirichlet" | "dirichlet_per_client" | "quantity":
            if alpha is None:
                raise PartitionError(f"the rule {rule} needs alpha, for example 0.3; got none")
            return {"alpha": alpha, "cap": True} if cap and rule == "dirichlet" else {"alpha": alpha}
        case "disjoint_labels":
            if labels_per_client is None:
                raise PartitionError("the rule disjoint_labels needs labels_per_client, for example 2; got none")
            return {"labels_per_client": labels_per_client}
        case "iid" | "natural" | "manual":
            return {}
        case "local":
            raise PartitionError("partition.rule=local deals no samples, because clients have data of their own")
        case _:
            raise PartitionError(f"no partition rule {rule!r}{nearest(rule, RULES)}")


def _drawn(
    rule: str, labels: Ints, clients: int, minimum: int, rng: np.random.Generator, own: Mapping[str, Any]
) -> tuple[Ints, ...]:
    """Where in `labels` each client's samples are, by a rule that draws them. `own`: its own parameters."""
    match rule:
        case "iid":
            return iid(labels, clients, rng)
        case "disjoint_labels":
            return disjoint_labels(labels, clients, rng=rng, **own)
        case _:
            cut = {"dirichlet": dirichlet, "dirichlet_per_client": dirichlet_per_client, "quantity": quantity}[rule]
            return cut(labels, clients, minimum=minimum, rng=rng, **own)


def _sources(data: Data) -> Ints:
    """(N_train,): where each training sample comes from. Raises PartitionError where the data do not know."""
    if data.natural_client is None:
        raise PartitionError(
            f"{data.name} does not know where a sample comes from, so it has no natural "
            f"partition; take one of {', '.join(each for each in RULES if each != 'natural')}"
        )
    return data.natural_client.numpy()


def _left(data: Data, rest: Ints, clients: int) -> Ints:
    """The source of each sample that the proxy leaves. Raises PartitionError if the proxy takes all samples of sources
    that are needed as clients."""
    sources = _sources(data)
    all_n, left_n = len(np.unique(sources)), len(np.unique(sources[rest]))
    if left_n < clients <= all_n:
        raise PartitionError(
            f"the server's proxy takes all samples of {all_n - left_n} of the {all_n} clients of {data.name}. Set "
            f"partition.proxy to a smaller share (0: no proxy), or partition.clients to at most {left_n}"
        )
    return sources[rest]


def _check_labels(data: Data, rule: str) -> None:
    """Raises PartitionError where the targets have no labels that the rule can deal by."""
    if not data.task.label_count:
        others = ", ".join(each for each in RULES if each not in BY_LABEL)
        raise PartitionError(
            f"the rule {rule} deals by labels, and the targets of {data.name} have none ({data.task.name}): take one "
            f"of {others}, or partition.features, or give the task quantile bins"
        )
    if rule == "disjoint_labels" and has_boxes(data.task):
        raise PartitionError(
            f"the rule disjoint_labels gives clients labels of their own, and a sample of {data.name} has several "
            f"({data.task.name}): take one of {', '.join(each for each in RULES if each != rule)}"
        )


def _proxy_of(data: Data, classes: Sequence[int], seed: int) -> tuple[Ints, Ints, Ints]:
    """Raises PartitionError if the targets are no classes, or as `split_classes` does."""
    count = class_count(data.task)
    if not count:
        raise PartitionError(
            f"partition.server_classes needs classes, and the targets of {data.name} are not classes "
            f"({data.task.name}): set partition.server_classes=[], and partition.proxy to a share"
        )
    return split_classes(labels_of(data), classes, count, seeds.rng(seed, "proxy"))
