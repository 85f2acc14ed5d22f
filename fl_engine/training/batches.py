"""Draws and augments the training batches of each lane, i.e. of each client that trains in parallel (see `lanes`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fl_engine.core import costs, seeds
from fl_engine.core.augmentation import AUGMENTATIONS, Augmentation
from fl_engine.core.errors import ModelError
from fl_engine.core.steps import Sampler
from fl_engine.core.task import Task, has
from fl_engine.core.types import LocalTask


def check(sampler: Sampler, augment: Sequence[Augmentation], goal: Task, x: Tensor) -> None:
    """Raise ModelError if the sampler or an augmentation does not support the task or the samples `x` (N, ...)."""
    sampler.check(goal)
    for each in augment:
        each.check(x)
        name = getattr(each, "name", type(each).__name__)
        wrong = ""
        if has(goal, "boxes") and not getattr(each, "moves_boxes", False):
            choices = ", ".join(known for known, kind in AUGMENTATIONS.items() if getattr(kind, "moves_boxes", False))
            wrong = f"does not move the boxes of a {goal.name} task. Choose from {choices}"
        elif getattr(each, "needs_boxes", False) and not has(goal, "boxes"):
            wrong = f"requires boxes as targets, but a {goal.name} task has no boxes. Remove {name}"
        elif has(goal, "maps"):
            wrong = f"does not move the targets of a {goal.name} task with the pixels. Remove {name}"
        if wrong:
            raise ModelError.at(f"training.augment: {name} {wrong}")


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the samples of all lanes."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def orders(
    goal: Task, tasks: Sequence[LocalTask], targets: Sequence[Tensor], *, shared: bool = False
) -> Iterator[Sequence[Tensor]]:
    """Yield one sequence of training steps per epoch. A step is an int64 tensor (B, n) with one column per lane. A
    column selects the lane's samples by their indices in the result of `joined`.

    With `shared`, all lanes train on one set of samples, which is stored only once. The generator draws one epoch at a
    time, because the indices of all epochs may take more memory than the samples.
    """
    counts = [y.shape[0] for y in targets]
    sizes = list(costs.batches(tasks[0], counts[0]))
    first, used = torch.tensor([0] * len(counts) if shared else [0, *accumulate(counts[:-1])]), sum(sizes)
    generators = [torch.Generator().manual_seed(seeds.derive(task.seed, "order")) for task in tasks]
    on_cpu = [y.cpu() for y in targets]
    for _ in range(tasks[0].epochs):
        drawn = [task.sampler.epoch(goal, y, g) for task, y, g in zip(tasks, on_cpu, generators, strict=True)]
        for order, count in zip(drawn, counts, strict=True):
            # An index out of range would select another client's sample.
            if order.shape[0] != count or int(order.min()) < 0 or int(order.max()) >= count:
                name = type(tasks[0].sampler).__name__
                text = f"{name}.epoch must return int64 (N,) for N samples, with values from 0 to N - 1"
                raise ModelError(text, path="training.sampler")
        chosen = torch.stack([order[:used] for order in drawn]) + first[:, None]
        yield torch.split(chosen.T.contiguous(), sizes)


def gathered(
    goal: Task, x: Tensor, y: Tensor, chosen_bn: Tensor, tasks: Sequence[LocalTask], step: int
) -> tuple[Tensor, Tensor]:
    """Return the augmented samples (B, n*C, ...) and the targets (B, n, ...) of a step. Each lane's augmentation uses
    the seed of the lane's task and does not depend on the other lanes."""
    b, n = chosen_bn.shape
    batch, wanted = x[chosen_bn.flatten()], y[chosen_bn]
    for place, augmentation in enumerate(tasks[0].augment):
        lanes = zip(tasks, batch.view(b, n, *x.shape[1:]).unbind(1), wanted.unbind(1), strict=True)
        changed, moved = [], []
        for task, samples, targets in lanes:
            generator = torch.Generator().manual_seed(seeds.derive(task.seed, f"augment{place}", step))
            samples, targets = augmentation.apply(samples, targets, generator)
            changed.append(samples)
            moved.append(targets)
        batch, wanted = torch.stack(changed, dim=1), torch.stack(moved, dim=1)
    return batch.reshape(b, -1, *x.shape[2:]), wanted
