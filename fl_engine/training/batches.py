"""The batches of each lane: which samples each step takes, and how augmentation changes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fl_engine.core import seeds, workload
from fl_engine.core.augmentation import AUGMENTATIONS, Augmentation, CarriesBoxes
from fl_engine.core.errors import ModelError
from fl_engine.core.samplers import Sampler
from fl_engine.core.samples import Task, has_boxes
from fl_engine.core.types import LocalTask


def check(sampler: Sampler, augment: Sequence[Augmentation], goal: Task, x: Tensor) -> None:
    """Raises ModelError if the sampler cannot draw, or an augmentation cannot change, normalised samples like x (N,
    ...) of this task."""
    sampler.check(goal)
    for each in augment:
        each.check(x)
        name = getattr(each, "name", type(each).__name__)
        if has_boxes(goal) and not isinstance(each, CarriesBoxes):
            able = ", ".join(known for known, kind in AUGMENTATIONS.items() if issubclass(kind, CarriesBoxes))
            raise ModelError(
                f"training.augment: {name} does not say where boxes go, which are the targets of this {goal.name}: "
                f"take some of {able}"
            )
        if getattr(each, "boxes_only", False) and not has_boxes(goal):
            raise ModelError(
                f"training.augment: {name} is for targets that are boxes, and those of this {goal.name} are not: "
                f"leave {name} out of training.augment"
            )


def orders(goal: Task, tasks: Sequence[LocalTask], targets: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """For each epoch and each of its steps, int64 (B, n): which samples of the concatenated data each lane sees."""
    task, counts = tasks[0], [y.shape[0] for y in targets]
    sizes, first = list(workload.batches(task, counts[0])), torch.tensor([0, *accumulate(counts[:-1])])
    used, generator = sum(sizes), torch.Generator()
    drawn: list[Tensor] = []  # lane by lane, all epochs of each
    for own, y in zip(tasks, targets, strict=True):
        generator.manual_seed(seeds.derive(own.seed, "order"))
        here = y.cpu()
        drawn += [own.sampler.epoch(goal, here, generator) for _ in range(task.epochs)]
    if [order.shape[0] for order in drawn] != [count for count in counts for _ in range(task.epochs)]:
        raise _strange(task.sampler)
    if any(count != used for count in counts):
        drawn = [order[:used] for order in drawn]
    chosen = torch.stack(drawn).view(len(tasks), task.epochs, used)
    least, most = chosen.flatten(1).aminmax(dim=1)
    if any(low < 0 or high >= count for low, high, count in zip(least.tolist(), most.tolist(), counts, strict=True)):
        raise _strange(task.sampler)  # such an index would take a sample of another lane
    chosen += first[:, None, None]
    return [torch.split(of_epoch, sizes) for of_epoch in chosen.permute(1, 2, 0).contiguous()]


def _strange(sampler: Sampler) -> ModelError:
    return ModelError(
        f"{type(sampler).__name__}.epoch gave invalid indices: for N samples it must give int64 (N,), each "
        "from 0 to N - 1"
    )


def gathered(
    goal: Task, x: Tensor, y: Tensor, chosen_bn: Tensor, tasks: Sequence[LocalTask], step: int
) -> tuple[Tensor, Tensor]:
    """The samples (B, n*C, ...) and targets (B, n, ...) of a step, augmented if the tasks ask for it. Each lane's
    augmentation is seeded by its own task, so it does not depend on the other lanes."""
    b, n = chosen_bn.shape
    batch, wanted = x[chosen_bn.flatten()], y[chosen_bn]
    for place, augmentation in enumerate(tasks[0].augment):
        of_lane = batch.view(b, n, *x.shape[1:]).unbind(1)
        changed, moved = [], []
        for task, samples, targets in zip(tasks, of_lane, wanted.unbind(1), strict=True):
            generator = torch.Generator().manual_seed(seeds.derive(task.seed, f"augment{place}", step))
            if has_boxes(goal) and isinstance(augmentation, CarriesBoxes):
                samples, targets = augmentation.apply_with_boxes(samples, targets, generator)
            else:
                samples = augmentation.apply(samples, generator)
            changed.append(samples)
            moved.append(targets)
        batch, wanted = torch.stack(changed, dim=1), torch.stack(moved, dim=1)
    return batch.reshape(b, -1, *x.shape[2:]), wanted
