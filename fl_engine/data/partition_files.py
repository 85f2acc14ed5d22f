"""The two files of a partition, and the map of a user for the rule `manual`.

    partition.json           the rule, its parameters, and the counts of samples
    partition.safetensors    the positions of the samples, and what else has a value for each sample

partition.json has the checksum of partition.safetensors.
"""

from __future__ import annotations

import hashlib
import json
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
from fl_engine.core.task import LABEL_WORD
from fl_engine.data.files import each_once, replacing, sweep
from fl_engine.data.label_noise import LabelNoise, NoiseFigures
from fl_engine.data.partition import Partition
from fl_engine.data.partition_rules import Ints
from fl_engine.data.transforms import fingerprint

TENSORS = "partition.safetensors"
MANIFEST = "partition.json"
POSITION = Annotated[int, Field(ge=0, lt=2**62)]


class Manifest(BaseModel):
    """`partition.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_version: Literal[1] = 1
    rule: str
    parameters: dict[str, bool | int | float]
    data_sha256: str
    proxy_train: Index
    proxy_test: Index
    client_samples: list[Index] = Field(min_length=1)
    class_counts: list[list[Index]]
    """A row for each label, a column for each client."""
    tensors_sha256: str
    label: str = Field(pattern=f"^{LABEL_WORD}$")
    """The word for a label."""
    clusters: Index
    """The number of samples that have a cluster."""
    noise: NoiseFigures | None
    server_classes: tuple[Index, ...]
    """The classes of the proxy; empty if it is a share of all samples."""

    @property
    def reached(self) -> float | None:
        """The share of the clients' training labels that are wrong; None without noise."""
        return None if self.noise is None else self.noise.reached(sum(self.client_samples))


def read_manifest(path: Path) -> Manifest:
    """Read `partition.json`. Raises IntegrityError, which names the file, if it cannot be read or is not a manifest."""
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise IntegrityError(f"{path} is not a partition manifest ({brief(error)}). Partition again") from error


def save(partition: Partition, folder: Path) -> Path:
    """Write partition.safetensors, then partition.json with its checksum, and return the path of partition.json.

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
    sweep((folder / TENSORS, folder / MANIFEST))
    with replacing(folder / TENSORS) as out:
        out.write(content)
    with replacing(folder / MANIFEST) as out:
        out.write(manifest.model_dump_json(indent=1).encode() + b"\n")
    return folder / MANIFEST


def load(folder: Path, data: Data | None = None) -> Partition:
    """Read what `save` wrote. With `data`, also check that the partition was cut from these data.

    Raises PartitionError if there is no partition or it belongs to other data; IntegrityError, which names the file, if
    one of the two files is missing or has changed.
    """
    path, tensors_path = folder / MANIFEST, folder / TENSORS
    if not path.is_file():
        raise PartitionError(f"{folder} has no partition ({MANIFEST} and {TENSORS}). Partition the data first")
    manifest = read_manifest(path)
    try:
        content = tensors_path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{tensors_path} cannot be read: {error.strerror}. Partition again") from error
    if hashlib.sha256(content).hexdigest() != manifest.tensors_sha256:
        raise IntegrityError(f"{tensors_path} is damaged: its sha256 is not that in {MANIFEST}. Partition again")
    if data is not None and (given := fingerprint(data)) != manifest.data_sha256:
        raise PartitionError(
            f"{folder}: this partition belongs to other data (fingerprint {manifest.data_sha256[:12]}, {data.name} has "
            f"{given[:12]}). Give those data again, or begin a new run with these"
        )
    tensors = _tensors(content, manifest, tensors_path)
    sizes = np.cumsum(manifest.client_samples)[:-1]
    noise = None
    if manifest.noise is not None:
        noise = LabelNoise(manifest.noise, tuple(np.split(tensors["noisy"], sizes)))
    return Partition(
        proxy_train=tensors["proxy_train"],
        proxy_test=tensors["proxy_test"],
        clients=tuple(np.split(tensors["clients"], sizes)),
        rule=manifest.rule,
        parameters=manifest.parameters,
        data=manifest.data_sha256,
        counts=np.array(manifest.class_counts, dtype=np.int64),
        label=manifest.label,
        clusters=tensors.get("clusters"),
        noise=noise,
        server_classes=manifest.server_classes,
    )


def _tensors(content: bytes, manifest: Manifest, path: Path) -> dict[str, Ints]:
    """Raises IntegrityError unless the tensors' names and lengths are those of the manifest."""
    try:
        tensors: dict[str, Ints] = safetensors.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{path} cannot be read as safetensors: {error}. Partition again") from error
    lengths = {
        "proxy_train": manifest.proxy_train,
        "proxy_test": manifest.proxy_test,
        "clients": sum(manifest.client_samples),
    }
    if manifest.clusters:
        lengths["clusters"] = manifest.clusters
    if manifest.noise is not None:
        lengths["noisy"] = sum(manifest.client_samples)
    wanted = {name: ("int64", (length,)) for name, length in lengths.items()}
    if {name: (t.dtype.name, t.shape) for name, t in tensors.items()} != wanted:
        raise IntegrityError(f"{path} does not have the tensors of {MANIFEST}: {lengths}. Partition again")
    return tensors


# ------------------------------------------------------------------------------------------- a user's map
class Map(BaseModel):
    """`{"clients": [[0, 3, 17], [1, 2], ...]}`, the positions of each client's samples in the training data as they are
    used (after `dataset.train_samples`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    clients: list[Annotated[list[POSITION], Field(min_length=1)]] = Field(min_length=1)


def read_map(path: Path, samples: int) -> NDArray[np.int64]:
    """Return (samples,), the client of each training sample. Raises PartitionError, which names the file, if it is not
    a map that gives each sample one client."""
    try:
        found = Map.model_validate(json.loads(path.read_bytes(), object_pairs_hook=each_once))
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(
            f'partition.map = {printable(str(path))} must be a file {{"clients": [[0, 3, ...], ...]}} with the '
            f"positions of each client's samples: {brief(error) if isinstance(error, ValidationError) else error}"
        ) from error
    positions = np.concatenate([np.array(each, dtype=np.int64) for each in found.clients])
    of_each = np.repeat(np.arange(len(found.clients)), [len(each) for each in found.clients])
    if positions.max() >= samples:
        raise PartitionError(f"{path} has the sample {positions.max()}, but there are only 0 to {samples - 1}")
    times = np.bincount(positions, minlength=samples)
    if (times != 1).any():
        first = int(np.flatnonzero(times != 1)[0])
        raise PartitionError(f"{path} must have each of {samples} samples once, but has {first} {times[first]} times")
    owner = np.empty(samples, dtype=np.int64)
    owner[positions] = of_each
    return owner
