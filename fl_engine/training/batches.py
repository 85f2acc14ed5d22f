"""What each lane is fed, step by step: which of its samples, in which order, and how they are changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fl_engine.core import seeds, workload
from fl_engine.core.augmentation import Augmentation
from fl_engine.core.errors import ModelError
from fl_engine.core.samplers import Sampler
from fl_engine.core.samples import Task
from fl_engine.core.types import LocalTask


def check(sampler: Sampler, augment: Sequence[Augmentation], goal: Task, x: Tensor) -> None:
    """Raises ModelError where samples like x (N, ...), of this task, cannot be drawn or changed so."""
    sampler.check(goal)
    for each in augment:
        each.check(x)


def orders(goal: Task, tasks: Sequence[LocalTask], targets: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """For each epoch and each of its steps, int64 (B, n): which samples of the concatenated data each lane sees."""
    task, counts = tasks[0], [len(y) for y in targets]
    sizes, first = list(workload.batches(task, counts[0])), torch.tensor([0, *accumulate(counts[:-1])])
    used, generator = sum(sizes), torch.Generator()
    drawn: list[Tensor] = []  # lane by lane, all epochs of each
    for own, y in zip(tasks, targets, strict=True):
        generator.manual_seed(seeds.derive(own.seed, "order"))
        drawn += [_epoch(own.sampler, goal, y.cpu(), generator)[:used] for _ in range(task.epochs)]
    chosen = torch.stack(drawn).view(len(tasks), task.epochs, used) + first[:, None, None]
    return [torch.split(of_epoch, sizes) for of_epoch in chosen.permute(1, 2, 0).contiguous()]


def _epoch(sampler: Sampler, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
    """Of whoever wrote the sampler: an index too large would be a sample of the next lane."""
    drawn = sampler.epoch(goal, y, generator)
    if drawn.shape != (len(y),) or int(drawn.min()) < 0 or int(drawn.max()) >= len(y):
        raise ModelError(
            f"{type(sampler).__name__} drew {tuple(drawn.shape)} indices, {int(drawn.min())} to {int(drawn.max())}, of "
            f"{len(y)} samples; an epoch is as many indices as there are samples, from 0 on"
        )
    return drawn


def gathered(x: Tensor, chosen_bn: Tensor, tasks: Sequence[LocalTask], step: int) -> Tensor:
    """The samples (B, n*C, ...) of a step, changed where the tasks say so: each lane's by its own seed, whoever is
    beside it."""
    b, n = chosen_bn.shape
    batch = x[chosen_bn.flatten()]
    for place, augmentation in enumerate(tasks[0].augment):
        of_lane = batch.view(b, n, *x.shape[1:]).unbind(1)
        changed = []
        for task, samples in zip(tasks, of_lane, strict=True):
            generator = torch.Generator().manual_seed(seeds.derive(task.seed, f"augment{place}", step))
            changed.append(augmentation.apply(samples, generator))
        batch = torch.stack(changed, dim=1)
    return batch.reshape(b, -1, *x.shape[2:])
