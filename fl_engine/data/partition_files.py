"""The two files of a partition.

    partition.json           the rule, its parameters, and the counts of samples
    partition.safetensors    the positions of the samples, and what else has a value for each

What is read has to be what was written: the figures and positions are checked against each other, and against the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from fl_engine.core.errors import IntegrityError, PartitionError, brief, printable
from fl_engine.core.fields import Index
from fl_engine.core.samples import Data
from fl_engine.core.task import LABEL_WORD, class_count
from fl_engine.data.files import each_once, replacing, sweep
from fl_engine.data.label_noise import LabelNoise, NoiseFigures
from fl_engine.data.partition import CLASS, Partition, labels_of, statistics
from fl_engine.data.partition_rules import Ints
from fl_engine.data.transforms import fingerprint

OPTIONAL = ("label", "clusters", "noise", "server_classes")
TENSORS = "partition.safetensors"
MANIFEST = "partition.json"


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
    if positions >= len(labels) or statistics(clients, labels, rows).tolist() != manifest.class_counts:
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


Position = Annotated[int, Field(ge=0, lt=2**62)]


class Map(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    clients: list[Annotated[list[Position], Field(min_length=1)]] = Field(min_length=1)


def read_map(path: Path, samples: int) -> NDArray[np.int64]:
    """(samples,): the client of each training sample. Raises PartitionError, which names the file, if it is missing or
    not such a map."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = error.strerror if isinstance(error, OSError) else error
        raise PartitionError(f"partition.map = {printable(str(path))} cannot be read: {why}") from error
    try:
        found = Map.model_validate(json.loads(content, object_pairs_hook=each_once))
    except (ValueError, RecursionError) as error:
        raise PartitionError(
            f'{path}: expected {{"clients": [[0, 3, ...], ...]}}, the positions of each client\'s training samples: '
            f"{brief(error) if isinstance(error, ValidationError) else error}"
        ) from error
    positions = np.concatenate([np.array(each, dtype=np.int64) for each in found.clients])
    of_each = np.repeat(np.arange(len(found.clients)), [len(each) for each in found.clients])
    if positions.max() >= samples:
        raise PartitionError(f"{path}: there are training samples 0 to {samples - 1}, the map names {positions.max()}")
    times = np.bincount(positions, minlength=samples)
    if (times != 1).any():
        first = int(np.flatnonzero(times != 1)[0])
        raise PartitionError(
            f"{path}: each of the {samples} training samples has one client, but sample {first} is named "
            f"{times[first]} times ({int((times != 1).sum())} such samples)"
        )
    owner = np.empty(samples, dtype=np.int64)
    owner[positions] = of_each
    return owner
