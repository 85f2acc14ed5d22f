"""Partitions for devices with their own data (`partition.rule: local`). Each client has a separate folder.

The server's data are the proxy and the test samples. A device reads only its own folder. `Form` describes the samples
and their normalisation. A simulation on one machine reads the same folders and gives bit-identical results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_engine.core import seeds
from fl_engine.core.errors import DataError, PartitionError
from fl_engine.core.records import Record
from fl_engine.core.samples import Data
from fl_engine.core.task import label_word
from fl_engine.core.types import Device
from fl_engine.data.partition import Partition
from fl_engine.data.partition_rules import Ints, split_proxy
from fl_engine.data.transforms import fingerprint

LOCAL = "local"
FORM = "data.json"
"""Name of the file that stores a run's `Form`."""
NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Form(Record):
    """Shape, type, task and normalisation of a run's samples."""

    shape: tuple[int, ...]
    """Shape of one sample."""
    dtype: str
    task: str
    """`repr` of the task's identity."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(data: Data) -> Form:
        dtype = str(data.train_x.dtype).removeprefix("torch.")
        return Form(shape=data.input_shape, dtype=dtype, task=repr(data.task.identity), mean=data.mean, std=data.std)

    def normalises(self, own: Data, where: str, most: int) -> Data:
        """Return a client's data with the mean and std of this `Form`. Raises DataError if the shape, type or task
        differs from this `Form`, or if there are more than `most` training samples."""
        found = Form.of(own)
        here, wanted = (found.shape, found.dtype, found.task), (self.shape, self.dtype, self.task)
        if here != wanted:
            raise DataError(
                f"{where}: shape, dtype and task must be {wanted} as in the run, got {here}. Load matching data"
            )
        if len(own.train_y) > most:
            raise DataError(f"{where} must have at most partition.most={most} training samples, got {len(own.train_y)}")
        return replace(own, mean=self.mean, std=self.std, natural_client=None, natural_test_client=None)


def of_server(data: Data, clients: int, seed: int) -> Partition:
    """Return the server's partition. All training samples are in the proxy, and the clients' parts are empty."""
    train, test, _ = split_proxy(len(data.train_y), 1.0, seeds.rng(seed, "proxy"), shared=True)
    counts = np.zeros((max(1, data.task.label_count), clients), dtype=np.int64)
    parameters = {"clients": clients, "seed": seed}
    return Partition(
        train, test, (NOBODY,) * clients, LOCAL, parameters, fingerprint(data), counts, label_word(data.task)
    )


def of_client(data: Data, clients: int, client: int) -> Partition:
    """Return the partition for a device. All training samples on the device belong to `client`."""
    everything = np.arange(len(data.train_y), dtype=np.int64)
    held = tuple(everything if each == client else NOBODY for each in range(clients))
    return Partition(NOBODY, NOBODY, held, LOCAL, {}, "", np.zeros((1, clients), dtype=np.int64))


def folders(root: Path, clients: int) -> list[Path]:
    """Return the folders of all clients in natural order, e.g. client-2 before client-10. Raises PartitionError unless
    there is one folder per client."""
    if not root.is_dir():
        raise PartitionError(f"partition.folders must be a folder that contains a folder for each client, got {root}")
    found = [each for each in root.iterdir() if each.is_dir() and not each.name.startswith(".")]
    if len(found) != clients:
        raise PartitionError(f"partition.clients must be the number of folders in {root} ({len(found)}), got {clients}")
    return sorted(found, key=lambda each: natural(each.name))


def natural(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key that puts weak-2 before weak-10. Different names have different keys."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts), name


def assign_clients(
    before: Mapping[str, int], tiers: Mapping[str, str | None], fleet: Sequence[Device]
) -> dict[str, int]:
    """Map the name of each invited device to its client. `tiers` maps the names to tiers.

    Devices in `before` retain their client. Each new device gets the first free client of its tier. New devices are
    sorted by name in natural order, so weak-2 precedes weak-10. Devices without a tier come last, and may get a client
    of any tier. If no client is free, the device is omitted.
    """
    found = {name: client for name, client in before.items() if name in tiers and client < len(fleet)}
    free = [device for device in fleet if device.client not in found.values()]
    for name in sorted(tiers.keys() - found.keys(), key=lambda name: (tiers[name] is None, natural(name))):
        own = next((device for device in free if tiers[name] in (None, device.tier)), None)
        if own is not None:
            found[name] = own.client
            free.remove(own)
    return found


def joined(server: Data, partition: Partition, parts: Sequence[Data]) -> tuple[Data, Partition]:
    """Concatenate the data of the server and of all simulated clients (`parts`). Return data and partition."""
    ends = np.cumsum([len(server.train_y), *(len(part.train_y) for part in parts)])
    held = tuple(np.arange(start, end, dtype=np.int64) for start, end in pairwise(ends))
    x, y = (torch.cat([getattr(each, name) for each in (server, *parts)]) for name in ("train_x", "train_y"))
    data = replace(server, train_x=x, train_y=y, natural_client=None, natural_test_client=None)
    return data, replace(partition, clients=held)


class Unknown(dict[int, int]):
    """Placeholder for the clients' sample counts if the server does not have them. `get` returns the default, and
    indexing raises PartitionError."""

    def get(self, client: int, default: Any = None) -> Any:
        return default

    def __getitem__(self, client: int) -> int:
        raise PartitionError("partition.rule must not be local, because the algorithm needs the clients' sample counts")
