"""Partitions the training samples: first the server's proxy, then the clients.

The proxy is a share of all samples, or all samples of the classes that the server alone owns. It is cut from the
training data before any client gets a sample, so the server measures on data that no client trains on; test samples
reach neither. Where it is shared (`proxy_shared`), its samples are dealt to the clients too. For one seed the proxy is
the same under every rule, shared or not. The rules by which clients get their samples are in `fl_engine.data.rules`.

The task of the data defines the labels: the class, or the quantile bin of a number. If a task has no labels, rules that
deal by labels need clusters of the samples instead (`fl_engine.data.clusters`).

Every sample ends in exactly one place, but for a shared proxy's. Randomness comes from `seeds.rng(seed, "proxy")` and
`seeds.rng(seed, "partition")` alone.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from fl_engine.core import seeds
from fl_engine.core.errors import IntegrityError, PartitionError, brief, nearest
from fl_engine.core.fields import Index
from fl_engine.core.samples import LABEL_WORD, Data, class_count, has_boxes, label_word
from fl_engine.data import figures
from fl_engine.data.files import replacing, sweep
from fl_engine.data.fingerprint import fingerprint
from fl_engine.data.label_noise import LabelNoise, NoiseFigures, told
from fl_engine.data.rules import (
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

Dealing = Literal["iid", "dirichlet", "dirichlet_per_client", "quantity", "disjoint_labels", "natural", "manual"]
Rule = Literal[Dealing, "local"]
RULES: tuple[str, ...] = get_args(Dealing)
"""Those that deal samples to clients; under `local` each client has its own (`data.local`)."""
BY_LABEL = ("dirichlet", "dirichlet_per_client", "disjoint_labels")
OPTIONAL = ("label", "clusters", "noise", "server_classes")
TENSORS = "partition.safetensors"
MANIFEST = "partition.json"
CLASS = "class"
"""The label of a classification, the default, which `partition.json` leaves out."""
CLUSTER = "cluster"


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


# -------------------------------------------------------------------------------------------------- partition
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
            parts = natural(_sources(data)[rest], clients)
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
    counts, owned = _count(held, labels, rows), tuple(sorted(server_classes))
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
            raise PartitionError("the rule local deals nothing: clients have data of their own (fl_engine.data.local)")
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


def labels_of(data: Data) -> Ints:
    """The label of each training sample; all 0 if the task has no labels."""
    return data.task.labels(data.train_y) if data.task.label_count else np.zeros(len(data.train_y), dtype=np.int64)


def as_told(data: Data, partition: Partition) -> Data:
    """The data with the clients' labels, some of them wrong; `data` itself without label noise."""
    if partition.noise is None:
        return data
    return replace(data, train_y=told(data.train_y, partition.clients, partition.noise))


def statistics(partition: Partition, labels: Ints, classes: int) -> Ints:
    """(classes, clients): how many samples of each class each client holds; `labels` of all training data."""
    return _count(partition.clients, labels, classes)


def _count(clients: tuple[Ints, ...], labels: Ints, classes: int) -> Ints:
    return np.stack([np.bincount(labels[part], minlength=classes) for part in clients], axis=1).astype(np.int64)


# ---------------------------------------------------------------------------------------------------- storage
class Manifest(BaseModel):
    """`partition.json`. `class_counts` has a row for each label and a column for each client; `label` is the word for a
    label; `clusters` is the number of samples that have a cluster; `noise` is set if clients have wrong labels;
    `server_classes` are the classes of the proxy, where it is not a share of all samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_version: Literal[1] = 1
    rule: str
    parameters: dict[str, bool | int | float]
    data_sha256: str
    proxy_train: Index
    proxy_test: Index
    client_samples: list[Index] = Field(min_length=1)
    class_counts: list[list[Index]]
    tensors_sha256: str
    label: str = Field(CLASS, pattern=f"^{LABEL_WORD}$")
    clusters: Index = 0
    noise: NoiseFigures | None = None
    server_classes: tuple[Index, ...] = ()

    @property
    def reached(self) -> float | None:
        """The share of the clients' training labels that are wrong; None without noise."""
        return None if self.noise is None else self.noise.reached(sum(self.client_samples))


def read_manifest(path: Path) -> Manifest:
    """Reads `partition.json`. Raises IntegrityError, which names the file, if it cannot be read, is not a manifest, or
    its figures contradict each other."""
    try:
        found = Manifest.model_validate_json(_content(path))
    except ValidationError as error:
        raise IntegrityError(f"{path}: not a partition manifest; partition again ({brief(error)})") from error
    columns = [sum(column) for column in zip_longest(*found.class_counts, fillvalue=-1)]
    if columns != found.client_samples:
        raise IntegrityError(f"{path}: client_samples do not add up: they are not the sums of class_counts")
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error


def save(partition: Partition, folder: Path) -> Path:
    """Writes partition.safetensors, then partition.json with its checksum; returns the path of partition.json.

    The tensors are int64: `proxy_train`, `proxy_test`, and `clients`, all clients' positions one after the other; with
    clusters also `clusters`, of all training samples, and with label noise also `noisy`, the clients' labels in the
    order of `clients`.
    """
    tensors = {
        "proxy_train": partition.proxy_train,
        "proxy_test": partition.proxy_test,
        "clients": np.concatenate(partition.clients),
    }
    if partition.clusters is not None:
        tensors["clusters"] = partition.clusters
    if partition.noise is not None:
        tensors["noisy"] = np.concatenate(partition.noise.labels)
    content = safetensors.save(tensors)
    manifest = Manifest(
        rule=partition.rule,
        parameters=dict(partition.parameters),
        data_sha256=partition.data,
        proxy_train=len(partition.proxy_train),
        proxy_test=len(partition.proxy_test),
        client_samples=[len(part) for part in partition.clients],
        class_counts=partition.counts.tolist(),
        tensors_sha256=hashlib.sha256(content).hexdigest(),
        label=partition.label,
        clusters=0 if partition.clusters is None else len(partition.clusters),
        noise=None if partition.noise is None else partition.noise.figures,
        server_classes=partition.server_classes,
    )
    # Options at their defaults are left out, so that partitions made before an option existed keep their bytes.
    usual = {name for name in OPTIONAL if getattr(manifest, name) == Manifest.model_fields[name].default}
    sweep((folder / TENSORS, folder / MANIFEST))
    with replacing(folder / TENSORS) as out:
        out.write(content)
    with replacing(folder / MANIFEST) as out:
        out.write(manifest.model_dump_json(indent=1, exclude=usual).encode() + b"\n")
    return folder / MANIFEST


def load(folder: Path, data: Data | None = None) -> Partition:
    """Reads what `save` wrote. With `data`, also checks that the partition was cut from it.

    Raises PartitionError if there is no partition or it belongs to other data; IntegrityError, which names the file, if
    one of the two files is missing or not what was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise PartitionError(f"no partition in {folder}: expected {MANIFEST} and {TENSORS}; partition the data first")
    manifest = read_manifest(path)
    tensors_path = folder / TENSORS
    if not tensors_path.is_file():
        raise IntegrityError(f"{tensors_path}: missing, though {MANIFEST} is there; partition again")
    content = _content(tensors_path)
    found = hashlib.sha256(content).hexdigest()
    if found != manifest.tensors_sha256:
        raise IntegrityError(
            f"{tensors_path}: expected sha256 {manifest.tensors_sha256}, found {found}; restore it or partition again"
        )
    if data is not None and (given := fingerprint(data)) != manifest.data_sha256:
        raise PartitionError(
            f"{folder}: this partition was cut from other data (fingerprint {manifest.data_sha256[:12]}, "
            f"{data.name} has {given[:12]}): give those data again, or begin anew with these"
        )
    tensors = _tensors(content, manifest, tensors_path)
    _check_positions(tensors, bool(manifest.parameters.get("proxy_shared")), tensors_path, data)
    sizes = np.cumsum(manifest.client_samples)[:-1]
    clients, clusters, noise = tuple(np.split(tensors["clients"], sizes)), tensors.get("clusters"), None
    _check_counts(clients, clusters, manifest, path, data)
    if manifest.server_classes and data is not None:
        _check_classes(clients, tensors, manifest.server_classes, path, data)
    if manifest.noise is not None:
        noise = LabelNoise(manifest.noise, tuple(np.split(tensors["noisy"], sizes)))
        noise.check(clients, path, data)
    return Partition(
        proxy_train=tensors["proxy_train"],
        proxy_test=tensors["proxy_test"],
        clients=clients,
        rule=manifest.rule,
        parameters=manifest.parameters,
        data=manifest.data_sha256,
        counts=np.array(manifest.class_counts, dtype=np.int64),
        label=manifest.label,
        clusters=clusters,
        noise=noise,
        server_classes=manifest.server_classes,
    )


def _tensors(content: bytes, manifest: Manifest, path: Path) -> dict[str, Ints]:
    """Raises IntegrityError unless the tensors' names and lengths are those of the manifest."""
    try:
        tensors: dict[str, Ints] = safetensors.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{path} cannot be read as safetensors: {error}; partition again") from error
    lengths = {
        "proxy_train": manifest.proxy_train,
        "proxy_test": manifest.proxy_test,
        "clients": sum(manifest.client_samples),
    }
    if manifest.clusters:
        lengths["clusters"] = manifest.clusters
    if manifest.noise is not None:
        lengths["noisy"] = sum(manifest.client_samples)
    if {name: (t.dtype.name, t.shape) for name, t in tensors.items()} != {
        name: ("int64", (length,)) for name, length in lengths.items()
    }:
        found = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in sorted(tensors.items()))
        raise IntegrityError(f"{path}: {MANIFEST} says {lengths} positions, found {found}; partition again")
    return tensors


def _check_positions(tensors: dict[str, Ints], shared: bool, path: Path, data: Data | None) -> None:
    """Raises IntegrityError unless each position is that of a sample and occurs once; where the proxy is `shared`, once
    in it and once at the clients."""
    proxy, clients = np.concatenate([tensors["proxy_train"], tensors["proxy_test"]]), tensors["clients"]
    last = None if data is None else len(data.train_y) - 1
    for every in (proxy, clients) if shared else (np.concatenate([proxy, clients]),):
        outside = (every < 0) if last is None else (every < 0) | (every > last)
        if len(np.unique(every)) < len(every) or outside.any():
            raise IntegrityError(f"{path}: positions occur twice or are outside 0 to {last}; partition again")
    if shared and not np.isin(proxy, clients).all():
        raise IntegrityError(f"{path}: no client has some samples of the proxy, which is shared; partition again")


def _check_counts(
    clients: tuple[Ints, ...], clusters: Ints | None, manifest: Manifest, path: Path, data: Data | None
) -> None:
    """Raises IntegrityError unless `class_counts` match the samples stored."""
    rows = len(manifest.class_counts)
    if clusters is not None:
        outside = (clusters < 0) | (clusters >= rows)
        if outside.any() or (data is not None and len(clusters) != len(data.train_y)):
            raise IntegrityError(f"{path}: clusters 0 to {rows - 1} of all training samples expected; partition again")
        labels = clusters
    elif data is not None:
        labels, rows = labels_of(data), max(1, data.task.label_count)
    else:
        return
    positions = max((int(part.max()) for part in clients if len(part)), default=-1)
    if positions >= len(labels) or _count(clients, labels, rows).tolist() != manifest.class_counts:
        raise IntegrityError(f"{path}: class_counts are not those of the samples stored; partition again")


def _check_classes(
    clients: tuple[Ints, ...], tensors: Mapping[str, Ints], owned: tuple[int, ...], path: Path, data: Data
) -> None:
    """Raises IntegrityError unless the proxy has samples of the server's classes only, and clients have none."""
    proxy = np.concatenate([tensors["proxy_train"], tensors["proxy_test"]])
    known = list(owned) == sorted(set(owned)) and owned[-1] < class_count(data.task)
    labels = labels_of(data)
    apart = np.isin(labels[proxy], owned).all() and not np.isin(labels[np.concatenate(clients)], owned).any()
    if not known or not apart:
        raise IntegrityError(
            f"{path}: server_classes {list(owned)} are not those of the samples stored; partition again"
        )


# ---------------------------------------------------------------------------------------------------- drawing
MOST_BARS = 2000
"""Of more clients the totals are drawn as means over neighbours: a bar each would take minutes."""


def draw(counts: Ints, path: Path, word: str = "class") -> None:
    """Writes a heat map of `counts` (labels, clients), with every client's total above it, as .svg or .png. `word` is
    the word for a label.

    Raises PartitionError for another file ending, and OSError, which names the file, where it cannot be written: then
    there is none.
    """
    if path.suffix not in (".svg", ".png"):
        raise PartitionError(f"a heat map is written as .svg or .png, got {path.name!r}")
    if path.suffix == ".svg":
        text = io.StringIO()
        figures.save(heat_map(counts, word), text, "svg", dpi=150)
        content = text.getvalue().encode()
    else:
        image = io.BytesIO()
        figures.save(heat_map(counts, word), image, "png", dpi=150)
        content = image.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(content)
    except OSError as error:
        path.unlink(missing_ok=True)  # half of it, where the disk is full
        raise OSError(error.errno, error.strerror, str(path)) from error  # that of a write names no file


def heat_map(counts: Ints, word: str = "class") -> Any:
    """The `matplotlib.figure.Figure` that `draw` writes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes, clients = counts.shape
    # A Figure without pyplot needs no global state, no window, and no choice of a backend.
    figure = Figure(figsize=(min(5 + 0.3 * clients, 16), min(2.6 + 0.32 * classes, 12)), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(40, 1), height_ratios=(1, max(classes / 5, 1.5)))
    cells = figure.add_subplot(grid[1, 0])
    image = cells.imshow(counts, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    cells.set_xlabel("client")
    cells.set_ylabel(word)
    for axis in (cells.xaxis, cells.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    if classes * clients <= 400:
        for (label, client), count in np.ndenumerate(counts):
            dark = count > 0.6 * counts.max()
            cells.text(client, label, f"{count}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    totals = figure.add_subplot(grid[0, 0], sharex=cells)
    if clients <= MOST_BARS:
        totals.bar(np.arange(clients), counts.sum(axis=0), color="tab:blue", width=0.9)
        totals.set_ylabel("total")
    else:
        step = -(-clients // MOST_BARS)
        starts = np.arange(0, clients, step)
        edges = np.append(starts, clients)
        means = np.add.reduceat(counts.sum(axis=0), starts) / np.diff(edges)
        totals.stairs(means, edges - 0.5, fill=True, color="tab:blue")
        totals.set_ylabel(f"total\n(means of {step})")
    totals.set_title(f"Samples of each {word} at each client ({counts.sum()} samples, {clients} clients)")
    totals.tick_params(labelbottom=False)
    totals.margins(x=0)
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="samples")
    return figure
