"""Data that belong to devices (`partition.rule: local`): each client's samples lie in a folder of its own, and the
server has other data, which are its proxy and its test samples.

A device reads its own folder, and is told nothing of other clients. `Form`, of the server's data, says what samples
have to look like and how they are normalised. The server knows of each client what its signed answers say, within
bounds. On one machine the same folders can be simulated: they are read one after the other, and the bits are the same.
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
    """What the samples of a run look like. `shape` is that of one sample, `task` the task's identity as text."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    shape: tuple[int, ...]
    dtype: str
    task: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(data: Data) -> Form:
        dtype = str(data.train_x.dtype).removeprefix("torch.")
        return Form(shape=data.input_shape, dtype=dtype, task=repr(data.task.identity), mean=data.mean, std=data.std)

    @staticmethod
    def read(path: Path) -> Form:
        """Raises IntegrityError where there is none."""
        try:
            return Form.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            said = brief(error) if isinstance(error, ValidationError) else error.strerror
            raise IntegrityError(f"{path} does not say what samples of the run look like: {said}") from error

    def normalises(self, own: Data, where: str, most: int) -> Data:
        """A client's data, normalised as the server's are. Raises DataError where they are other samples or targets
        than the run's, or more than `most`."""
        found = Form.of(own)
        for what, here, wanted in (
            ("samples of the shape", found.shape, self.shape),
            ("samples of type", found.dtype, self.dtype),
            ("the task", found.task, self.task),
        ):
            if here != wanted:
                raise DataError(
                    f"{where} holds {what} {here}, the run is about {wanted}: read the data as the run does"
                )
        if len(own.train_y) > most:
            raise DataError(f"{where} holds {len(own.train_y)} training samples, partition.most = {most} are allowed")
        return replace(own, mean=self.mean, std=self.std, natural_client=None)


def of_server(data: Data, clients: int, seed: int) -> Partition:
    """What the server knows: all its training samples are the proxy, and nothing of what clients hold."""
    train, test, _ = split_proxy(len(data.train_y), 1.0, seeds.rng(seed, "proxy"), shared=True)
    counts = np.zeros((max(1, data.task.label_count), clients), dtype=np.int64)
    told = {"clients": clients, "seed": seed}
    return Partition(train, test, (NOBODY,) * clients, LOCAL, told, fingerprint(data), counts, label_word(data.task))


def of_client(data: Data, clients: int, client: int) -> Partition:
    """What a device knows: all training samples of its folder are its own."""
    everything = np.arange(len(data.train_y), dtype=np.int64)
    held = tuple(everything if each == client else NOBODY for each in range(clients))
    return Partition(NOBODY, NOBODY, held, LOCAL, {}, "", np.zeros((1, clients), dtype=np.int64))


def folders(root: Path, clients: int) -> list[Path]:
    """The folders of all clients, in the order of their names; numbers in them count as numbers. Raises PartitionError
    where there are more or fewer than clients."""
    if not root.is_dir():
        raise PartitionError(f"partition.folders = {root} is no folder: it holds one folder of data for each client")
    found = [each for each in root.iterdir() if each.is_dir() and not each.name.startswith(".")]
    found.sort(key=lambda each: natural(each.name))
    if len(found) != clients:
        raise PartitionError(
            f"{root} holds the data of {len(found)} clients, partition.clients is {clients}: set it so"
        )
    return found


def natural(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """A key by which weak-2 comes before weak-10. Other names have other keys: weak-02 comes before weak-2."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts), name


def joined(server: Data, partition: Partition, parts: Sequence[Data]) -> tuple[Data, Partition]:
    """One data set for clients that are simulated: the server's samples, then those of each client. `parts` as
    `Form.normalises` gives them."""
    ends = np.cumsum([len(server.train_y), *(len(part.train_y) for part in parts)])
    held = tuple(np.arange(start, end, dtype=np.int64) for start, end in pairwise(ends))
    x, y = (torch.cat([getattr(each, name) for each in (server, *parts)]) for name in ("train_x", "train_y"))
    return replace(server, train_x=x, train_y=y, natural_client=None), replace(partition, clients=held)


class Unknown(Mapping[int, int]):
    """By client, how many samples it holds, where the server does not know: it knows how many clients there are.
    `get` gives what is said instead, such as an update's own count."""

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
            "the algorithm asks how many samples clients hold before they train, and with partition.rule=local the "
            "server does not know: take another algorithm, or another rule"
        )
