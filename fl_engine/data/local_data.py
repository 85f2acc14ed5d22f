"""Data that belong to devices (`partition.rule: local`): each client's samples are in its own folder, and the server
has other data, which are its proxy and its test samples.

A device reads its own folder and learns nothing about other clients. `Form` says what samples look like and how they
are normalised. The server knows of each client what its signed results say, within bounds. A simulation on one machine
reads the same folders one after the other, and has the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from fl_engine.core import seeds
from fl_engine.core.errors import DataError, IntegrityError, PartitionError, brief
from fl_engine.core.samples import Data
from fl_engine.core.task import label_word
from fl_engine.data.partition import Partition
from fl_engine.data.partition_rules import Ints, split_proxy
from fl_engine.data.transforms import fingerprint

LOCAL = "local"
FORM = "data.json"
"""The file with a run's `Form`, for clients."""
NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Form(BaseModel):
    """What the samples of a run look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    shape: tuple[int, ...]
    """Of one sample."""
    dtype: str
    task: str
    """The task's identity as text."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(data: Data) -> Form:
        dtype = str(data.train_x.dtype).removeprefix("torch.")
        return Form(shape=data.input_shape, dtype=dtype, task=repr(data.task.identity), mean=data.mean, std=data.std)

    @staticmethod
    def read(path: Path) -> Form:
        """Raises IntegrityError if the file is missing or has no form."""
        try:
            return Form.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            said = brief(error) if isinstance(error, ValidationError) else error.strerror
            raise IntegrityError(f"{path} does not say what samples of the run look like: {said}") from error

    def normalises(self, own: Data, where: str, most: int) -> Data:
        """Return a client's data, normalised as the server's are. Raises DataError for other samples or targets than
        the run's, and for more than `most` samples."""
        found = Form.of(own)
        here, wanted = (found.shape, found.dtype, found.task), (self.shape, self.dtype, self.task)
        if here != wanted:
            raise DataError(f"{where} has samples {here}, the run expects {wanted}. Read the data as the run does")
        if len(own.train_y) > most:
            raise DataError(f"{where} has {len(own.train_y)} training samples, more than partition.most={most}")
        return replace(own, mean=self.mean, std=self.std, natural_client=None)


def of_server(data: Data, clients: int, seed: int) -> Partition:
    """Return what the server knows: all its training samples are the proxy, and clients' samples are unknown."""
    train, test, _ = split_proxy(len(data.train_y), 1.0, seeds.rng(seed, "proxy"), shared=True)
    counts = np.zeros((max(1, data.task.label_count), clients), dtype=np.int64)
    told = {"clients": clients, "seed": seed}
    return Partition(train, test, (NOBODY,) * clients, LOCAL, told, fingerprint(data), counts, label_word(data.task))


def of_client(data: Data, clients: int, client: int) -> Partition:
    """Return what a device knows: all training samples of its folder are its own."""
    everything = np.arange(len(data.train_y), dtype=np.int64)
    held = tuple(everything if each == client else NOBODY for each in range(clients))
    return Partition(NOBODY, NOBODY, held, LOCAL, {}, "", np.zeros((1, clients), dtype=np.int64))


def folders(root: Path, clients: int) -> list[Path]:
    """Return the folders of all clients, in the order of their names; numbers in them count as numbers. Raises
    PartitionError for another number of folders than clients."""
    if not root.is_dir():
        raise PartitionError(f"partition.folders must be a folder with a folder for each client, got {root}")
    found = [each for each in root.iterdir() if each.is_dir() and not each.name.startswith(".")]
    if len(found) != clients:
        raise PartitionError(f"partition.clients must be {len(found)}, the folders in {root}, got {clients}")
    return sorted(found, key=lambda each: natural(each.name))


def natural(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key that puts weak-2 before weak-10. Different names have different keys."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts), name


def joined(server: Data, partition: Partition, parts: Sequence[Data]) -> tuple[Data, Partition]:
    """Return one data set for simulated clients: the server's samples, then those of each client, which are `parts`,
    normalised by `Form.normalises`."""
    ends = np.cumsum([len(server.train_y), *(len(part.train_y) for part in parts)])
    held = tuple(np.arange(start, end, dtype=np.int64) for start, end in pairwise(ends))
    x, y = (torch.cat([getattr(each, name) for each in (server, *parts)]) for name in ("train_x", "train_y"))
    return replace(server, train_x=x, train_y=y, natural_client=None), replace(partition, clients=held)


class Unknown(Mapping[int, int]):
    """The number of each client's samples if the server does not know it. `get` returns its default, such as an
    update's own count."""

    def __init__(self, clients: int) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._clients))

    def get(self, client: int, said: Any = None) -> Any:
        return said

    def __getitem__(self, client: int) -> int:
        raise PartitionError(
            "the algorithm needs the clients' numbers of samples before they train, and with partition.rule=local the "
            "server does not know them. Take another algorithm or another rule"
        )
