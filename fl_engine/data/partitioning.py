"""Partitions the training samples: first the server's proxy, then the clients.

The proxy is a share of all samples, or all samples of the classes that only the server has. It is cut before any client
gets a sample, so the server measures on data that no client trains on. Test samples reach neither. With `proxy_shared`
the proxy's samples are dealt to the clients too. For one seed the proxy is the same under every rule, shared or not.

The task of the data defines the labels: the class, or the quantile bin of a number. If a task has no labels, rules that
deal by labels need clusters of the samples instead (`data.clusters`). The rules are in `data.partition_rules`.

Every sample ends in exactly one place, except those of a shared proxy. Randomness comes from
`seeds.rng(seed, "proxy")` and `seeds.rng(seed, "partition")` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from fl_engine.core import seeds
from fl_engine.core.errors import PartitionError, nearest
from fl_engine.core.samples import Data
from fl_engine.core.task import class_count, has_boxes, label_word
from fl_engine.data import partition_rules as rules
from fl_engine.data.partition import Partition, labels_of, statistics
from fl_engine.data.partition_rules import Ints
from fl_engine.data.transforms import fingerprint

Dealing = Literal["iid", "dirichlet", "dirichlet_per_client", "quantity", "disjoint_labels", "natural", "manual"]
Rule = Literal[Dealing, "local"]
RULES: tuple[str, ...] = get_args(Dealing)
"""The rules that deal samples to clients. Under `local` each client has its own samples (`data.local_data`)."""
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
    """Cut the proxy, then deal the rest to `clients` by `rule`, each at least `minimum` samples.

    The proxy is `proxy_share` of all samples, or all samples of the `server_classes`. With `proxy_shared` the clients
    get all samples, the proxy's too. `alpha` is for dirichlet, dirichlet_per_client and quantity, `cap` for dirichlet,
    `labels_per_client` for disjoint_labels. `clusters` (N_train,) replaces the labels for all rules that deal by
    labels, and `owner` (N_train,), each sample's client, is for manual. Other rules ignore them. The result depends on
    the arguments alone, on every machine. Raises PartitionError for data or arguments that do not allow it.
    """
    clusters = clusters if rule in BY_LABEL else None
    if rule in BY_LABEL and clusters is None:
        _check_labels(data, rule)
    labels = labels_of(data) if clusters is None else clusters
    proxy_train, proxy_test, rest = _proxy(data, len(labels), proxy_share, server_classes, proxy_shared, seed)
    rules.check_room(len(rest), clients, minimum)
    own = _own_parameters(rule, alpha, labels_per_client, cap)
    match rule:
        case "natural":
            parts = rules.natural(_sources(data, rest, clients), clients)
        case "manual":
            if owner is None:
                raise PartitionError("partition.rule=manual needs a map: set partition.map to a file")
            parts = rules.manual(owner, clients, rest)
        case "iid":
            parts = rules.iid(labels[rest], clients, seeds.rng(seed, "partition"))
        case "disjoint_labels":
            parts = rules.disjoint_labels(labels[rest], clients, rng=seeds.rng(seed, "partition"), **own)
        case _:
            deal = {
                "dirichlet": rules.dirichlet,
                "dirichlet_per_client": rules.dirichlet_per_client,
                "quantity": rules.quantity,
            }[rule]
            parts = deal(labels[rest], clients, minimum=minimum, rng=seeds.rng(seed, "partition"), **own)
    held = tuple(rest[part] for part in parts)
    sizes = [len(part) for part in held]
    if min(sizes) < minimum:
        raise PartitionError(
            f"partition.rule={rule} leaves client {int(np.argmin(sizes))} {min(sizes)} samples, fewer than "
            f"partition.minimum={minimum}. Take fewer clients or a smaller minimum"
        )
    rows, word = max(1, data.task.label_count), label_word(data.task)
    if clusters is not None:
        rows, word = int(clusters.max()) + 1, CLUSTER
    parameters: dict[str, bool | int | float] = {"clients": clients}
    parameters |= {} if server_classes else {"proxy_share": proxy_share}
    parameters |= {"proxy_shared": True} if proxy_shared else {}
    parameters |= {"seed": seed, "minimum": minimum, **own}
    return Partition(
        proxy_train,
        proxy_test,
        held,
        rule,
        parameters,
        fingerprint(data),
        statistics(held, labels, rows),
        word,
        clusters,
        None,
        tuple(sorted(server_classes)),
    )


def _proxy(
    data: Data, samples: int, share: float, server_classes: Sequence[int], shared: bool, seed: int
) -> tuple[Ints, Ints, Ints]:
    """(proxy to train on, proxy to measure on, the rest)."""
    rng = seeds.rng(seed, "proxy")
    if not server_classes:
        return rules.split_proxy(samples, share, rng, shared=shared)
    if shared:
        raise PartitionError(
            f"partition.server_classes={list(server_classes)} are classes that clients do not get. Set "
            "partition.proxy_shared=false, or partition.server_classes=[]"
        )
    count = class_count(data.task)
    if not count:
        raise PartitionError(
            f"partition.server_classes must be [] for {data.name}, because its targets ({data.task.name}) are not "
            "classes. Set partition.proxy to a share"
        )
    return rules.split_classes(labels_of(data), server_classes, count, rng)


def _own_parameters(rule: str, alpha: float | None, labels_per_client: int | None, cap: bool) -> dict[str, Any]:
    """The parameters that only this rule has. Raises PartitionError if one is missing or the rule is unknown."""
    match rule:
        case "dirichlet" | "dirichlet_per_client" | "quantity":
            if alpha is None:
                raise PartitionError(f"partition.rule={rule} needs partition.alpha, for example 0.3")
            return {"alpha": alpha, "cap": True} if cap and rule == "dirichlet" else {"alpha": alpha}
        case "disjoint_labels":
            if labels_per_client is None:
                raise PartitionError(f"partition.rule={rule} needs partition.labels_per_client, for example 2")
            return {"labels_per_client": labels_per_client}
        case "iid" | "natural" | "manual":
            return {}
        case _:
            raise PartitionError(f"{rule!r} is not a partition rule that deals samples{nearest(rule, RULES)}")


def _sources(data: Data, rest: Ints, clients: int) -> Ints:
    """The source of each sample that the proxy leaves. Raises PartitionError if the data have no sources, or the proxy
    takes all samples of sources that are needed as clients."""
    if data.natural_client is None:
        others = ", ".join(each for each in RULES if each != "natural")
        raise PartitionError(
            f"partition.rule=natural needs to know where a sample comes from, and {data.name} does not. Take one of "
            f"{others}"
        )
    sources = data.natural_client.numpy()
    every, left = len(np.unique(sources)), len(np.unique(sources[rest]))
    if left < clients <= every:
        raise PartitionError(
            f"partition.proxy takes all samples of {every - left} of the {every} clients of {data.name}. Set it to a "
            f"smaller share (0: no proxy), or partition.clients to at most {left}"
        )
    return sources[rest]


def _check_labels(data: Data, rule: str) -> None:
    """Raise PartitionError if the targets have no labels by which the rule can deal."""
    if not data.task.label_count:
        others = ", ".join(each for each in RULES if each not in BY_LABEL)
        raise PartitionError(
            f"partition.rule={rule} deals by labels, and the targets of {data.name} ({data.task.name}) have none. Take "
            f"one of {others}, or set partition.features, or give the task quantile bins"
        )
    if rule == "disjoint_labels" and has_boxes(data.task):
        raise PartitionError(
            f"partition.rule={rule} needs one label for each sample, and a sample of {data.name} has several "
            f"({data.task.name}). Take one of {', '.join(each for each in RULES if each != rule)}"
        )
