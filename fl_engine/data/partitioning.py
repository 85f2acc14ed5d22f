"""Who holds which training samples: the server's proxy set first, then the clients.

The proxy is cut from the training data before any client gets a sample, so the server measures on data that
no client trains on, and no test image reaches either. For one seed it is the same under every rule.

Rules, each a pure function from labels (or groups) to one ascending index array per client:

    iid              equal random parts (McMahan et al., AISTATS 2017)
    dirichlet        one Dir(alpha) over the clients for every class (Yurochkin et al., ICML 2019;
                     "distribution-based label imbalance" of Li et al., Federated Learning on Non-IID Data
                     Silos: An Experimental Study, ICDE 2022); with `cap` as in the code of FedAIoT (Alam, Michigan
                     State University 2023)
    quantity         equal mixtures of classes in shares drawn from Dir(alpha) ("quantity skew" of Li et al.)
    disjoint_labels  every client holds L labels ("quantity-based label imbalance", #C = L, of Li et al.)
    natural          by the writer or user whom the data set names

The task says what a label is: the class, or a quantile bin of a number. A task without labels has neither `dirichlet`
nor `disjoint_labels`. Below, "class" means label.

Every sample ends in exactly one place. Randomness comes from `seeds.rng(seed, "proxy")` and `seeds.rng(seed,
"partition")` alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from fl_engine.core import seeds
from fl_engine.core.errors import IntegrityError, PartitionError, brief, nearest
from fl_engine.core.fields import Index
from fl_engine.core.samples import Data, label_word
from fl_engine.data.files import fingerprint, replacing

Ints = NDArray[np.int64]

Rule = Literal["iid", "dirichlet", "quantity", "disjoint_labels", "natural"]
RULES: tuple[str, ...] = get_args(Rule)
BY_LABEL = ("dirichlet", "disjoint_labels")
TENSORS = "partition.safetensors"
MANIFEST = "partition.json"
CLASS = "class"
"""The label of a classification, which `partition.json` does not name."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in the training data, ascending int64, and how they came about.

    `counts` (labels, clients) says how many samples of each label a client holds (one row where the task has none), and
    `label` what people call one; `parameters` holds what the rule was given; `data` is the fingerprint of the data set
    that the positions belong to.
    """

    proxy_train: Ints
    proxy_test: Ints
    clients: tuple[Ints, ...]
    rule: str
    parameters: Mapping[str, bool | int | float]
    data: str
    counts: Ints
    label: str = CLASS


# ------------------------------------------------------------------------------------------------------ rules
def iid(labels: Ints, clients: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Random parts whose sizes differ by one at most. Raises PartitionError for more clients than samples."""
    _check_room(len(labels), clients, 1)
    return tuple(np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients))


def dirichlet(
    labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator, cap: bool = False
) -> tuple[Ints, ...]:
    """For every class one draw from Dir(alpha) cuts its shuffled samples; then small clients are fed.

    With `cap`, a client that holds samples / clients or more when a class is dealt gets none of it, and the others'
    shares grow in proportion; so a client may end above that, by its share of one class (FedAIoT, the authors' code).
    Where the others' shares are all 0, they are taken as equal.

    Feeding: while the smallest client has fewer than `minimum` samples, one sample, picked at random, moves
    to it from the largest client (ties: the lower client number). Nothing is drawn again, so this ends for
    every alpha.

    Raises PartitionError for an alpha that is not positive and finite, and where clients x minimum > samples.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise PartitionError(f"alpha must be positive and finite, got {alpha}; for equal shares take the rule iid")
    _check_room(len(labels), clients, minimum)
    return _fed(dealt_by_label(labels, clients, alpha, rng, cap), clients, minimum, rng)


def dealt_by_label(labels: Ints, clients: int, alpha: float, rng: np.random.Generator, cap: bool = False) -> Ints:
    """The client of each sample, as `dirichlet` deals them before it feeds anyone."""
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
    """The shares of the clients that are `below` the cap, which add up to 1. Before all samples are dealt, one is."""
    left = np.where(below, shares, 0.0)
    total = left.sum()
    capped: NDArray[np.float64] = left / total if total > 0 else below / below.sum()
    return capped


def quantity(labels: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """One draw from Dir(alpha) says how large each client's random part is; then small clients are fed, as in
    `dirichlet`. Raises as that does."""
    if not (math.isfinite(alpha) and alpha > 0):
        raise PartitionError(f"alpha must be positive and finite, got {alpha}; for equal shares take the rule iid")
    _check_room(len(labels), clients, minimum)
    cuts = np.floor(np.cumsum(_drawn(clients, alpha, rng))[:-1] * len(labels) + 0.5).astype(np.int64)
    owner = np.empty(len(labels), dtype=np.int64)
    for client, part in enumerate(np.split(rng.permutation(len(labels)), cuts)):
        owner[part] = client
    return _fed(owner, clients, minimum, rng)


def _drawn(clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    shares = rng.dirichlet(np.full(clients, alpha))
    if not math.isclose(shares.sum(), 1.0, rel_tol=1e-9):
        raise PartitionError(f"alpha {alpha} is beyond what floating point can draw; take the rule iid")
    return shares


def _fed(owner: Ints, clients: int, minimum: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Each client's samples, after those that have fewer than `minimum` were given some."""
    sizes = np.bincount(owner, minlength=clients)
    while sizes.min() < minimum:
        rich, poor = int(sizes.argmax()), int(sizes.argmin())
        owner[rng.choice(np.flatnonzero(owner == rich))] = poor
        sizes[rich] -= 1
        sizes[poor] += 1
    return tuple(np.flatnonzero(owner == client) for client in range(clients))


def disjoint_labels(labels: Ints, clients: int, labels_per_client: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Every client holds exactly L labels; each class's samples are dealt evenly to the clients that hold it.

    Classes are held by as equal numbers of clients as their sample counts allow. The classes are those that
    occur in `labels`. Raises PartitionError for L < 1, L > classes, clients x L < classes (nobody would hold
    some class), and where there are too few samples for every client to have one of each of its labels.
    """
    _check_room(len(labels), clients, 1)
    classes, samples = np.unique(labels, return_counts=True)
    slots = clients * labels_per_client
    if not 1 <= labels_per_client <= len(classes):
        raise PartitionError(f"labels_per_client must be 1 to {len(classes)} (the classes), got {labels_per_client}")
    if slots < len(classes):
        raise PartitionError(
            f"{clients} clients with {labels_per_client} labels hold at most {slots} of {len(classes)} "
            f"classes; take at least {-(-len(classes) // labels_per_client)} clients or more labels each"
        )
    most = np.minimum(samples, clients)
    if most.sum() < slots:
        raise PartitionError(
            f"{clients} clients with {labels_per_client} labels need {slots} (client, label) pairs, "
            f"but the samples per class ({', '.join(map(str, samples))}) allow {most.sum()}; "
            "take fewer clients or labels per client"
        )

    # How many clients hold each class: level by level, never more than it has samples.
    holders = np.ones(len(classes), dtype=np.int64)
    while (missing := slots - int(holders.sum())) > 0:
        growing = np.flatnonzero(holders < most)
        lowest = growing[holders[growing] == holders[growing].min()]
        holders[rng.permutation(lowest)[:missing]] += 1

    # Each client takes the L classes with the most places left. With equal L for all this never runs dry
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
    """One client for each group (writer, user), in ascending order of the group's number.

    With fewer clients than groups, whole groups are dealt round: the g-th goes to client g mod `clients`. No
    group is ever split: PartitionError for more clients than groups.
    """
    names, rank = np.unique(groups, return_inverse=True)
    number = len(names) if clients is None else clients
    if not 1 <= number <= len(names):
        raise PartitionError(
            f"the natural partition has {len(names)} groups, so 1 to {len(names)} clients; got {number}"
        )
    return tuple(np.flatnonzero(rank % number == client) for client in range(number))


def split_proxy(
    samples: int, share: float, rng: np.random.Generator, test_share: float = 0.2
) -> tuple[Ints, Ints, Ints]:
    """(proxy to train on, proxy to measure on, the rest) of positions 0 .. samples - 1, drawn uniformly.

    The proxy has `share` of the samples, `test_share` of it to measure (FlexFL: 80 % to pre-train, 20 % for
    APoZ), each rounded half up and at least one sample. A share of 0 is no proxy. Raises PartitionError for a
    share outside [0, 1) or a proxy of fewer than two samples.
    """
    if not 0 <= share < 1:
        raise PartitionError(f"the proxy share must be in [0, 1), got {share}; 0.01 is one per cent")
    if not 0 < test_share < 1:
        raise PartitionError(f"the proxy's test share must be in (0, 1), got {test_share}")
    size = math.floor(samples * share + 0.5)
    if share > 0 and size < 2:
        raise PartitionError(
            f"a proxy share of {share} of {samples} samples is {size}, but one to train and one to "
            "measure are needed; raise the share, or set it to 0 where no proxy is used"
        )
    test = min(max(math.floor(size * test_share + 0.5), 1), size - 1) if size else 0
    order = rng.permutation(samples)
    return np.sort(order[test:size]), np.sort(order[:test]), np.sort(order[size:])


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
) -> Partition:
    """Cuts the proxy, then deals the rest to `clients` by `rule`, each at least `minimum` samples.

    `alpha` is for dirichlet and quantity, `cap` for dirichlet, `labels_per_client` for disjoint_labels; other rules do
    not look at them. A function of the arguments alone, on every machine. Raises PartitionError for what cannot be cut.
    """
    if rule in BY_LABEL and not data.task.label_count:
        others = ", ".join(each for each in RULES if each not in BY_LABEL)
        raise PartitionError(
            f"the rule {rule} deals by labels, and the targets of {data.name} have none ({data.task.name}): take one "
            f"of {others}, or give the task quantile bins"
        )
    labels = labels_of(data)
    proxy_train, proxy_test, rest = split_proxy(len(labels), proxy_share, seeds.rng(seed, "proxy"))
    _check_room(len(rest), clients, minimum)
    rng = seeds.rng(seed, "partition")
    parameters: dict[str, bool | int | float] = {
        "clients": clients,
        "proxy_share": proxy_share,
        "seed": seed,
        "minimum": minimum,
    }
    match rule:
        case "iid":
            parts = iid(labels[rest], clients, rng)
        case "dirichlet" | "quantity":
            if alpha is None:
                raise PartitionError(f"the rule {rule} needs alpha, for example 0.3; got none")
            parameters["alpha"] = alpha
            if rule == "quantity":
                parts = quantity(labels[rest], clients, alpha, minimum, rng)
            else:
                parameters |= {"cap": True} if cap else {}
                parts = dirichlet(labels[rest], clients, alpha, minimum, rng, cap)
        case "disjoint_labels":
            if labels_per_client is None:
                raise PartitionError("the rule disjoint_labels needs labels_per_client, for example 2; got none")
            parameters["labels_per_client"] = labels_per_client
            parts = disjoint_labels(labels[rest], clients, labels_per_client, rng)
        case "natural":
            if data.natural_client is None:
                raise PartitionError(
                    f"{data.name} does not know where a sample comes from, so it has no natural "
                    f"partition; take one of {', '.join(RULES[:-1])}"
                )
            parts = natural(data.natural_client.numpy()[rest], clients)
        case _:
            raise PartitionError(f"no partition rule {rule!r}{nearest(rule, RULES)}")
    held = tuple(rest[part] for part in parts)
    sizes = [len(part) for part in held]
    if min(sizes) < minimum:
        poorest = int(np.argmin(sizes))
        raise PartitionError(
            f"the rule {rule} leaves client {poorest} {sizes[poorest]} samples, fewer than the minimum of "
            f"{minimum}; take fewer clients or a smaller minimum"
        )
    counts = _count(held, labels, max(1, data.task.label_count))
    word = label_word(data.task)
    return Partition(proxy_train, proxy_test, held, rule, parameters, fingerprint(data), counts, word)


def labels_of(data: Data) -> Ints:
    """By training sample; all 0 where the task has no labels."""
    return data.task.labels(data.train_y) if data.task.label_count else np.zeros(len(data.train_y), dtype=np.int64)


def statistics(partition: Partition, labels: Ints, classes: int) -> Ints:
    """(classes, clients): how many samples of each class each client holds; `labels` of all training data."""
    return _count(partition.clients, labels, classes)


def _count(clients: tuple[Ints, ...], labels: Ints, classes: int) -> Ints:
    return np.stack([np.bincount(labels[part], minlength=classes) for part in clients], axis=1).astype(np.int64)


def _labels_held(clients: tuple[Ints, ...], data: Data) -> Ints:
    return _count(clients, labels_of(data), max(1, data.task.label_count))


def _check_room(samples: int, clients: int, minimum: int) -> None:
    if clients < 1 or minimum < 1:
        raise PartitionError(f"expected at least 1 client with at least 1 sample, got {clients} with {minimum}")
    if clients * minimum > samples:
        raise PartitionError(
            f"{clients} clients with at least {minimum} samples need {clients * minimum}, there are "
            f"{samples}; take fewer clients, a smaller minimum or a smaller proxy"
        )


# ---------------------------------------------------------------------------------------------------- storage
class Manifest(BaseModel):
    """`partition.json`. `class_counts` has a row for each label and a column for each client; `label` is what people
    call a label."""

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
    label: str = Field(CLASS, pattern=r"^[\w -]{1,40}$")


def read_manifest(path: Path) -> Manifest:
    """Raises IntegrityError naming the file that is none, or whose figures contradict each other."""
    try:
        found = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise IntegrityError(f"{path}: not a partition manifest; partition again ({brief(error)})") from error
    columns = [sum(column) for column in zip_longest(*found.class_counts, fillvalue=-1)]
    if columns != found.client_samples:
        raise IntegrityError(f"{path}: client_samples do not add up: they are not the sums of class_counts")
    return found


def save(partition: Partition, folder: Path) -> Path:
    """Writes partition.safetensors, then partition.json with its checksum; gives the path of the latter.

    The tensors are int64: `proxy_train`, `proxy_test`, and `clients`, all clients' positions one after the
    other.
    """
    content = safetensors.save(
        {
            "proxy_train": partition.proxy_train,
            "proxy_test": partition.proxy_test,
            "clients": np.concatenate(partition.clients),
        }
    )
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
    )
    with replacing(folder / TENSORS) as out:
        out.write(content)
    with replacing(folder / MANIFEST) as out:
        out.write(manifest.model_dump_json(indent=1, exclude=_usual(manifest)).encode() + b"\n")
    return folder / MANIFEST


def _usual(manifest: Manifest) -> set[str]:
    """What is left out of the file: a manifest without it reads the same."""
    return {"label"} if manifest.label == CLASS else set()


def load(folder: Path, data: Data | None = None) -> Partition:
    """Reads what `save` wrote; with `data`, also makes sure that the partition was cut from it.

    Raises PartitionError where there is no partition or it belongs to other data, IntegrityError naming the
    file that is missing its partner or is not what was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise PartitionError(f"no partition in {folder}: expected {MANIFEST} and {TENSORS}; partition the data first")
    manifest = read_manifest(path)
    tensors_path = folder / TENSORS
    if not tensors_path.is_file():
        raise IntegrityError(f"{tensors_path}: missing, though {MANIFEST} is there; partition again")
    content = tensors_path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != manifest.tensors_sha256:
        raise IntegrityError(
            f"{tensors_path}: expected sha256 {manifest.tensors_sha256}, found {found}; restore it or partition again"
        )
    if data is not None and (given := fingerprint(data)) != manifest.data_sha256:
        raise PartitionError(
            f"{folder}: this partition was cut from other data (fingerprint {manifest.data_sha256[:12]}, "
            f"{data.name} has {given[:12]}); partition again"
        )
    tensors = _positions(content, manifest, tensors_path, data)
    clients = tuple(np.split(tensors["clients"], np.cumsum(manifest.client_samples)[:-1]))
    if data is not None and _labels_held(clients, data).tolist() != manifest.class_counts:
        raise IntegrityError(f"{path}: class_counts are not those of the samples stored; partition again")
    return Partition(
        proxy_train=tensors["proxy_train"],
        proxy_test=tensors["proxy_test"],
        clients=clients,
        rule=manifest.rule,
        parameters=manifest.parameters,
        data=manifest.data_sha256,
        counts=np.array(manifest.class_counts, dtype=np.int64),
        label=manifest.label,
    )


def _positions(content: bytes, manifest: Manifest, path: Path, data: Data | None) -> dict[str, Ints]:
    """The three tensors. Raises IntegrityError unless they have the lengths that the manifest says, and hold each
    position once."""
    try:
        tensors: dict[str, Ints] = safetensors.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{path} cannot be read as safetensors: {error}; partition again") from error
    lengths = {
        "proxy_train": manifest.proxy_train,
        "proxy_test": manifest.proxy_test,
        "clients": sum(manifest.client_samples),
    }
    if {name: (t.dtype.name, t.shape) for name, t in tensors.items()} != {
        name: ("int64", (length,)) for name, length in lengths.items()
    }:
        found = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in sorted(tensors.items()))
        raise IntegrityError(f"{path}: {MANIFEST} says {lengths} positions, found {found}; partition again")
    every = np.concatenate(list(tensors.values()))
    last = None if data is None else len(data.train_y) - 1
    if len(np.unique(every)) < len(every) or every.min() < 0 or (last is not None and every.max() > last):
        raise IntegrityError(f"{path}: positions are given twice, or of no sample (0 to {last}); partition again")
    return tensors


# ---------------------------------------------------------------------------------------------------- drawing
def draw(counts: Ints, path: Path, word: str = "class") -> None:
    """Writes a heat map of `counts` (labels, clients), with every client's total above it, as .svg or .png. `word`:
    what the task calls a label (`samples.label_word`).

    Raises PartitionError for another file ending.
    """
    if path.suffix not in (".svg", ".png"):
        raise PartitionError(f"a heat map is written as .svg or .png, got {path.name!r}")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes, clients = counts.shape
    # A Figure of its own, without pyplot: no global state, no window, and no backend to choose.
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
    totals.bar(np.arange(clients), counts.sum(axis=0), color="tab:blue", width=0.9)
    totals.set_ylabel("total")
    totals.set_title(f"Samples of each {word} at each client ({counts.sum()} samples, {clients} clients)")
    totals.tick_params(labelbottom=False)
    totals.margins(x=0)
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="samples")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Salt and no date: the same counts give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "flexfleet"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
