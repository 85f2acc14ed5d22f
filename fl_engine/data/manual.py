"""Reads a map of clients to training samples from a file, for the partition rule `manual`.

    {"clients": [[0, 3, 17], [1, 2], ...]}

Each client has a list of the positions of its samples in the training data as they are used (after
`dataset.train_samples`). Each sample belongs to one client. As under every rule, the proxy is cut first, so it takes
samples from all clients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_engine.core.errors import PartitionError, brief, printable
from fl_engine.data.files import each_once

Position = Annotated[int, Field(ge=0, lt=2**62)]


class Map(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    clients: list[Annotated[list[Position], Field(min_length=1)]] = Field(min_length=1)


def owners(path: Path, samples: int) -> NDArray[np.int64]:
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
