"""Samplers: which samples a client sees in an epoch, and in which order. A new one is a class and a line in SAMPLERS.

An epoch has as many draws as the client has samples, so the steps and multiply-adds of a task follow from the sample
count (`core.costs`), and the server can check a client's claims without knowing its labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT, NotNegative
from fl_engine.core.registry import Contract
from fl_engine.core.task import Task


class Sampler(Protocol):
    """A frozen dataclass of options."""

    def check(self, goal: Task) -> None:
        """Raise ModelError if samples of this task cannot be drawn like this."""

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        """Return the indices of N draws from N samples, int64 (N,). `y` (N, ...) are the targets, on the CPU as the
        generator. All randomness comes from the generator."""


@dataclass(frozen=True)
class Shuffle:
    """Every sample once, in random order."""

    __pydantic_config__ = STRICT
    name: Literal["shuffle"] = "shuffle"

    def check(self, goal: Task) -> None:
        pass

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randperm(y.shape[0], generator=generator)


@dataclass(frozen=True)
class Balanced:
    """With replacement: first a label of the client, all equally likely, then a sample of it.

    The labels are those of `Task.labels`, which for numbers are quantile bins of the client's targets. With `smoothing`
    a sample's weight is 1 / (smoothing + count of its label), so that rare labels are less likely; FedAIoT's code has 1
    / (1 + count).
    """

    __pydantic_config__ = STRICT
    name: Literal["balanced"] = "balanced"
    smoothing: NotNegative = 0.0

    def check(self, goal: Task) -> None:
        if not goal.label_count:
            raise ModelError(
                f"training.sampler.name=balanced needs labels, and this {goal.name} has none. Set "
                "training.sampler.name=shuffle"
            )

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        labels = torch.from_numpy(goal.labels(y))
        counts = torch.bincount(labels)
        counts = counts[counts > 0]
        by_label, first = labels.argsort(stable=True), counts.cumsum(0) - counts
        label = self._labels(counts.tolist(), len(y), generator)
        # Whole numbers, so that every machine agrees; 2**48 is so large that the remainder prefers no sample.
        place = torch.randint(2**48, (len(y),), generator=generator) % counts[label]
        return by_label[first[label] + place]

    def _labels(self, counts: list[int], draws: int, generator: torch.Generator) -> Tensor:
        """Return the label of each draw, int64 (draws,), of labels that are held `counts` times."""
        if not self.smoothing:
            return torch.randint(len(counts), (draws,), generator=generator)
        ends = torch.tensor(list(accumulate(count / (self.smoothing + count) for count in counts)), dtype=torch.float64)
        drawn = torch.rand(draws, dtype=torch.float64, generator=generator) * ends[-1]
        return torch.searchsorted(ends, drawn, right=True).clamp_(max=len(counts) - 1)


SAMPLERS: dict[str, type[Sampler]] = {"shuffle": Shuffle, "balanced": Balanced}

Sampling = Annotated[Sampler, Contract("sampler", SAMPLERS, Sampler)]
"""The annotation of a field."""
