"""Partitions and their files. A partition assigns positions in the training data to the proxy and to the clients.

`partition.json` contains the rule, its parameters, sample counts, and the checksum of `partition.safetensors`. The file
`partition.safetensors` contains positions, clusters and noisy labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError
from safetensors import numpy as safetensors

from fl_engine.core.errors import PartitionError, brief, printable
from fl_engine.core.fields import Index
from fl_engine.core.records import Record, Strict, parsed, read_bytes
from fl_engine.core.samples import Data
from fl_engine.data.files import each_once, replacing
from fl_engine.data.partition_rules import Ints
from fl_engine.data.transforms import fingerprint

TENSORS = "partition.safetensors"
MANIFEST = "partition.json"
SAME = ("rule", "parameters", "label", "noise", "server_classes")
"""Fields of a partition that its manifest also has."""
POSITION = Annotated[int, Field(ge=0, lt=2**62)]


class NoiseFigures(Strict):
    """Statistics of label noise, as stored in `partition.json`."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Requested fraction of wrong labels."""
    wrong: tuple[Index, ...]
    """Number of wrong labels of each client."""
    held_out: Index
    """Total number of samples that clients hold out from training. Held-out samples have correct labels."""

    def reached(self, samples: int) -> float:
        """Return the fraction of wrong labels in the clients' training data. `samples` is the total number of samples
        of all clients."""
        return sum(self.wrong) / max(1, samples - self.held_out)


@dataclass(frozen=True, eq=False)
class Partition:
    """Assigns training samples to the proxy and to each client, as ascending int64 positions in the training data."""

    proxy_train: Ints
    proxy_test: Ints
    clients: tuple[Ints, ...]
    rule: str
    parameters: Mapping[str, bool | int | float]
    data: str
    """Fingerprint of the data set."""
    counts: Ints
    """Number of samples of each label at each client (labels, clients); one row if the task has no labels."""
    label: str = "class"
    """Noun for a label, such as class or cluster."""
    clusters: Ints | None = None
    """Cluster of each training sample (N_train,); None if the labels are not clusters."""
    server_classes: tuple[int, ...] = ()
    """Classes whose samples form the proxy, in ascending order; empty if the proxy is a fraction of all samples."""
    noise: NoiseFigures | None = None
    noisy: tuple[Ints, ...] = ()
    """Noisy labels of each client's samples; empty without label noise."""

    def save(self, folder: Path) -> Path:
        """Write partition.safetensors and partition.json, and return the path of partition.json.

        The int64 tensors are `proxy_train`, `proxy_test` and `clients` (the concatenated positions of all clients). The
        optional tensor `clusters` contains the cluster of every training sample. The optional tensor `noisy` contains
        the clients' noisy labels in the order of `clients`.
        """
        tensors = {
            "proxy_train": self.proxy_train,
            "proxy_test": self.proxy_test,
            "clients": np.concatenate(self.clients),
        }
        if self.clusters is not None:
            tensors["clusters"] = self.clusters
        if self.noise is not None:
            tensors["noisy"] = np.concatenate(self.noisy)
        content = safetensors.save(tensors)
        manifest = PartitionManifest(
            **{name: getattr(self, name) for name in SAME},
            data_sha256=self.data,
            proxy_train=len(self.proxy_train),
            proxy_test=len(self.proxy_test),
            client_samples=[len(part) for part in self.clients],
            class_counts=self.counts.tolist(),
            tensors_sha256=hashlib.sha256(content).hexdigest(),
            clusters=0 if self.clusters is None else len(self.clusters),
        )
        with replacing(folder / TENSORS) as out:
            out.write(content)
        with replacing(folder / MANIFEST) as out:
            out.write(manifest.model_dump_json(indent=1).encode() + b"\n")
        return folder / MANIFEST

    @staticmethod
    def load(folder: Path, data: Data | None = None) -> Partition:
        """Read a partition from `folder`. If `data` is given, check that the partition belongs to these data.

        Raises PartitionError if partition.json does not exist, or if the partition belongs to other data. Raises
        IntegrityError if partition.safetensors cannot be read, or if one of the two files is damaged.
        """
        if not (folder / MANIFEST).is_file():
            raise PartitionError(f"{folder} does not contain {MANIFEST} and {TENSORS}. Partition the data first")
        manifest = read_manifest(folder / MANIFEST)
        content = read_bytes(folder / TENSORS, manifest.tensors_sha256)
        if data is not None and (given := fingerprint(data)) != manifest.data_sha256:
            raise PartitionError(
                f"{folder} is a partition of other data ({manifest.data_sha256[:12]}), not {data.name} "
                f"({given[:12]}). Use the original data, or start a new run"
            )
        tensors: dict[str, Ints] = safetensors.load(content)
        sizes = np.cumsum(manifest.client_samples)[:-1]
        return Partition(
            proxy_train=tensors["proxy_train"],
            proxy_test=tensors["proxy_test"],
            clients=tuple(np.split(tensors["clients"], sizes)),
            **{name: getattr(manifest, name) for name in SAME},
            data=manifest.data_sha256,
            counts=np.array(manifest.class_counts, dtype=np.int64),
            clusters=tensors.get("clusters"),
            noisy=() if manifest.noise is None else tuple(np.split(tensors["noisy"], sizes)),
        )


class PartitionManifest(Record):
    """`partition.json`."""

    rule: str
    parameters: dict[str, bool | int | float]
    data_sha256: str
    proxy_train: Index
    proxy_test: Index
    client_samples: list[Index] = Field(min_length=1)
    class_counts: list[list[Index]]
    """Number of samples, with a row for each label and a column for each client."""
    tensors_sha256: str
    label: str
    clusters: Index
    """Number of samples that are assigned to clusters; 0 without clusters."""
    noise: NoiseFigures | None
    server_classes: tuple[Index, ...]
    """Classes of the proxy; empty if the proxy is a fraction of all samples."""

    @property
    def reached(self) -> float | None:
        """Fraction of wrong labels in the clients' training data; None without label noise."""
        return None if self.noise is None else self.noise.reached(sum(self.client_samples))


def read_manifest(path: Path) -> PartitionManifest:
    """Read `partition.json`. Raises IntegrityError if the file cannot be read or is not a manifest."""
    return parsed(PartitionManifest, read_bytes(path), str(path))


class Map(Strict, strict=True):
    """User-defined partition such as `{"clients": [[0, 3, 17], [1, 2], ...]}`. Each client has a list of positions in
    the run's training data, after `dataset.train_samples` has been applied."""

    clients: list[Annotated[list[POSITION], Field(min_length=1)]] = Field(min_length=1)


def read_map(path: Path, samples: int) -> Ints:
    """Return an array (samples,) with the client of each training sample. Raises PartitionError unless the map assigns
    each sample to exactly one client."""
    try:
        found = Map.model_validate(json.loads(path.read_bytes(), object_pairs_hook=each_once))
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(
            f'partition.map = {printable(str(path))} must be a JSON file {{"clients": [[0, 3, ...], ...]}} with the '
            f"positions of each client's samples: {brief(error) if isinstance(error, ValidationError) else error}"
        ) from error
    positions = np.concatenate([np.array(each, dtype=np.int64) for each in found.clients])
    of_each = np.repeat(np.arange(len(found.clients)), [len(each) for each in found.clients])
    if not np.array_equal(np.sort(positions), np.arange(samples)):
        raise PartitionError.at(
            f"partition.map = {path} must contain each position from 0 to {samples - 1} exactly once, got "
            f"{len(positions)} positions up to {positions.max()}"
        )
    owner = np.empty(samples, dtype=np.int64)
    owner[positions] = of_each
    return owner
