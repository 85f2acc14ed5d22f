"""Wrong labels at the clients, which follow the mistakes of a centrally trained model.

FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things, Michigan State
University 2023, section 2.2.3.5): Q[i, j] is the share of the samples of class i that a centrally trained model takes
for class j. Of the n samples that a client trains on int(n * share) are drawn at random. The label y of each becomes
another one, drawn from row Q[y]. Samples that a client holds out from its training keep their labels.

As in the authors' code, a class with an entry of .95 or more in its row of Q keeps its labels, so the share of wrong
labels may be smaller than `share`. That code draws from Q[y] until the label differs; here one draw from Q[y] without
the diagonal, scaled to sum to 1, gives the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fl_engine.core import seeds
from fl_engine.core.fields import Index

Ints = NDArray[np.int64]


class NoiseFigures(BaseModel):
    """The label noise in `partition.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    share: Annotated[float, Field(gt=0, le=1)]
    """The requested share of wrong labels."""
    wrong: tuple[Index, ...]
    """The number of wrong labels of each client."""
    held_out: Index
    """Samples that all clients together hold out from training, whose labels are right."""

    def reached(self, samples: int) -> float:
        """The share of the clients' training labels that are wrong. `samples`: the number of all clients' samples."""
        return sum(self.wrong) / max(1, samples - self.held_out)


@dataclass(frozen=True, eq=False)
class LabelNoise:
    figures: NoiseFigures
    labels: tuple[Ints, ...]
    """The labels of each client, in the order of its samples."""

    @property
    def reached(self) -> float:
        """The share of the clients' training labels that are wrong."""
        return self.figures.reached(sum(len(each) for each in self.labels))


def likely_mistakes(confusion: NDArray[np.int64], sure: float, unknown: Sequence[int] = ()) -> NDArray[np.float64]:
    """Return (classes, classes): row c is the distribution of the wrong labels of class c, or zeros if its labels stay
    right.

    `confusion` (classes, classes) counts how often a class (row) was taken for another (column). A class keeps its
    labels if a share of `sure` or more of its samples was taken for one class, or if it has no samples. No label
    becomes one of the `unknown` classes, of which clients have no samples; a class that was taken for these alone keeps
    its labels.
    """
    counts = confusion.astype(np.float64)
    of_class = counts.sum(1, keepdims=True)
    unsure = (of_class > 0) & (counts.max(1, keepdims=True) < sure * of_class)
    others = np.where(unsure, counts * (1 - np.eye(len(counts))), 0.0)
    others[:, list(unknown)] = 0.0
    total = others.sum(1, keepdims=True)
    return others / np.where(total > 0, total, 1.0)


def made_wrong(
    targets: Ints,
    clients: Sequence[Ints],
    mistakes: NDArray[np.float64],
    share: float,
    seed: int,
    held_out: Sequence[Ints] = (),
) -> LabelNoise:
    """Draw the noise of all clients, each from its own random stream. `targets` (N_train,) are the right classes,
    `mistakes` comes from `likely_mistakes`, and `held_out` are the samples of each client that `partition.hold_out`
    returns; empty if clients train on all samples."""
    labels = []
    for client, indices in enumerate(clients):
        rng = seeds.rng(seed, "label noise", client=client)
        held = targets[indices]  # a copy
        trained = np.flatnonzero(~np.isin(indices, held_out[client])) if held_out else np.arange(len(indices))
        for i in trained[rng.permutation(len(trained))[: int(len(trained) * share)]]:
            if mistakes[held[i]].any():
                held[i] = rng.choice(len(mistakes), p=mistakes[held[i]])
        labels.append(held)
    wrong = tuple(int((targets[indices] != held).sum()) for indices, held in zip(clients, labels, strict=True))
    return LabelNoise(NoiseFigures(share=share, wrong=wrong, held_out=sum(map(len, held_out))), tuple(labels))


def told(targets: torch.Tensor, clients: Sequence[Ints], noise: LabelNoise) -> torch.Tensor:
    """Return the targets (N_train,) with the clients' labels instead of the right ones."""
    found = targets.clone()
    found[torch.from_numpy(np.concatenate(list(clients)))] = torch.from_numpy(np.concatenate(noise.labels))
    return found
