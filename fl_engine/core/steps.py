"""Samplers, which choose the samples of an epoch, and schedules, which set the learning rate of each step.

To add a sampler or schedule, write a class and list it in SAMPLERS or SCHEDULES. Each epoch draws as many samples as
the client has. Therefore the server can compute the steps and multiply-adds of a task from the sample count
(`core.costs`), without the client's labels. `lr` is the learning rate after the decay between rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from fl_engine.core.errors import ModelError
from fl_engine.core.fields import Count, NotNegative, Options, Share
from fl_engine.core.registry import Contract
from fl_engine.core.task import Task


class Sampler(Protocol):
    """Protocol of a sampler, which is implemented as a frozen dataclass of options."""

    def check(self, goal: Task) -> None:
        """Raise ModelError if the sampler does not support this task."""

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the samples of one epoch. Return N indices from 0 to N - 1, int64 (N,), which may repeat. The targets
        `y` (N, ...) and the generator are on the CPU. All random numbers must be drawn from `generator`."""


@dataclass(frozen=True)
class Shuffle(Options):
    """Draws every sample once, in random order."""

    name: Literal["shuffle"] = "shuffle"

    def check(self, goal: Task) -> None:
        pass

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randperm(y.shape[0], generator=generator)


@dataclass(frozen=True)
class Balanced(Options):
    """Draws with replacement. Each draw chooses one of the client's labels uniformly, then a sample with this label.

    For numeric targets, the labels are quantile bins of the client's targets. With `smoothing`, the weight of a sample
    is 1 / (smoothing + count of its label), so common labels are more likely. FedAIoT's code uses 1 / (1 + count).
    """

    name: Literal["balanced"] = "balanced"
    smoothing: NotNegative = 0.0

    def check(self, goal: Task) -> None:
        if not goal.label_count:
            raise ModelError(f"training.sampler.name must be shuffle, because the task {goal.name} has no labels")

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        labels = torch.from_numpy(goal.labels(y))
        counts = torch.bincount(labels)
        counts = counts[counts > 0]
        by_label, first = labels.argsort(stable=True), counts.cumsum(0) - counts
        label = self._labels(counts.tolist(), len(y), generator)
        # Drawing integers gives the same results on every machine. With 2**48, the modulo bias is negligible.
        place = torch.randint(2**48, (len(y),), generator=generator) % counts[label]
        return by_label[first[label] + place]

    def _labels(self, counts: list[int], draws: int, generator: torch.Generator) -> Tensor:
        """Draw labels, int64 (draws,). `counts` contains the number of samples of each label."""
        if not self.smoothing:
            return torch.randint(len(counts), (draws,), generator=generator)
        ends = torch.tensor(list(accumulate(count / (self.smoothing + count) for count in counts)), dtype=torch.float64)
        drawn = torch.rand(draws, dtype=torch.float64, generator=generator) * ends[-1]
        return torch.searchsorted(ends, drawn, right=True).clamp_(max=len(counts) - 1)


SAMPLERS: dict[str, type[Sampler]] = {"shuffle": Shuffle, "balanced": Balanced}

Sampling = Annotated[Sampler, Contract("sampler", SAMPLERS, Sampler)]


class Schedule(Protocol):
    """Protocol of a schedule, which is implemented as a frozen dataclass of options."""

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        """Return the learning rate of step `step` (from 0) in `epochs` epochs with `per_epoch` steps each."""


@dataclass(frozen=True)
class Constant(Options):
    """Uses the rate lr in all steps."""

    name: Literal["constant"] = "constant"

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        return lr


@dataclass(frozen=True)
class Cosine(Options):
    """SGDR: Stochastic Gradient Descent with Warm Restarts (Loshchilov and Hutter, ICLR 2017), Eq. 5, applied per step.

    rate = lr * (floor + (1 - floor) * (1 + cos(pi * t / T)) / 2), with t steps since the last restart and T steps
    between two restarts. The first step uses lr. The rate of the last step is slightly above the floor and never 0.
    """

    name: Literal["cosine"] = "cosine"
    floor: Share = 0.0
    """Minimum rate as a fraction of lr."""
    restart: Count | None = None
    """Number of epochs until the rate restarts at lr; null disables restarts."""
    factor: Count = 1
    """Factor by which the time between two restarts grows (T_mult in the paper)."""

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        period = per_epoch * (epochs if self.restart is None else self.restart)
        while self.factor > 1 and step >= period:
            step, period = step - period, period * self.factor
        return lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * (step % period) / period)) / 2)


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "cosine": Cosine}

Scheduling = Annotated[Schedule, Contract("schedule", SCHEDULES, Schedule)]
