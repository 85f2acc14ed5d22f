"""The batches of each lane: the samples of each step, and their augmentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fl_engine.core import costs, seeds
from fl_engine.core.augmentation import AUGMENTATIONS, Augmentation, CarriesBoxes
from fl_engine.core.errors import ModelError
from fl_engine.core.samplers import Sampler
from fl_engine.core.task import Task, has_boxes
from fl_engine.core.types import LocalTask


def check(sampler: Sampler, augment: Sequence[Augmentation], goal: Task, x: Tensor) -> None:
    """Raise ModelError if the sampler or an augmentation does not support normalised samples like x (N, ...) of this
    task."""
    sampler.check(goal)
    for each in augment:
        each.check(x)
        name = getattr(each, "name", type(each).__name__)
        if has_boxes(goal) and not isinstance(each, CarriesBoxes):
            able = ", ".join(known for known, kind in AUGMENTATIONS.items() if issubclass(kind, CarriesBoxes))
            raise ModelError(f"training.augment: {name} does not move a {goal.name}'s boxes. Choose some of {able}")
        if getattr(each, "boxes_only", False) and not has_boxes(goal):
            raise ModelError(f"training.augment: {name} needs boxes as targets, which a {goal.name} does not have")


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The lanes' samples one after the other, like `torch.cat`. Samples that are contiguous in memory already are not
    copied: those of one lane, or of several that were gathered and normalised together."""
    first = parts[0]
    if len(parts) == 1:
        return first
    row = first[0].numel()
    places = [first.storage_offset() + row * at for at in _starts(parts)]
    same = (first.dtype, first.shape[1:], first.untyped_storage().data_ptr())
    if all(
        (part.dtype, part.shape[1:], part.untyped_storage().data_ptr()) == same
        and part.is_contiguous()
        and part.storage_offset() == place
        for part, place in zip(parts, places, strict=True)
    ):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), (row, *first.stride()[1:]))
    return torch.cat(list(parts))


def _starts(parts: Sequence[Tensor]) -> list[int]:
    return [0, *accumulate(len(part) for part in parts[:-1])]


def orders(
    goal: Task, tasks: Sequence[LocalTask], targets: Sequence[Tensor], *, shared: bool = False
) -> Iterator[Sequence[Tensor]]:
    """For each epoch and step, int64 (B, n): the positions of each lane's samples among the `joined` ones. With
    `shared`, all lanes have the same samples, which are stored once. An epoch is drawn when it is needed, because all
    epochs may take more memory than the samples."""
    counts = [y.shape[0] for y in targets]
    sizes = list(costs.batches(tasks[0], counts[0]))
    first, used = torch.tensor([0] * len(targets) if shared else _starts(targets)), sum(sizes)
    generators = [torch.Generator().manual_seed(seeds.derive(own.seed, "order")) for own in tasks]
    here = [y.cpu() for y in targets]
    for _ in range(tasks[0].epochs):
        drawn = [own.sampler.epoch(goal, y, g) for own, y, g in zip(tasks, here, generators, strict=True)]
        if [order.shape[0] for order in drawn] != counts:
            raise _strange(tasks[0].sampler)
        chosen = torch.stack([order[:used] for order in drawn])
        least, most = chosen.aminmax(dim=1)
        bounds = zip(least.tolist(), most.tolist(), counts, strict=True)
        if any(low < 0 or high >= count for low, high, count in bounds):
            raise _strange(tasks[0].sampler)  # such an index would take a sample of another lane
        chosen += first[:, None]
        yield torch.split(chosen.T.contiguous(), sizes)


def _strange(sampler: Sampler) -> ModelError:
    return ModelError(
        f"{type(sampler).__name__}.epoch must return int64 (N,) for N samples, with values from 0 to N - 1"
    )


def gathered(
    goal: Task, x: Tensor, y: Tensor, chosen_bn: Tensor, tasks: Sequence[LocalTask], step: int
) -> tuple[Tensor, Tensor]:
    """The samples (B, n*C, ...) and targets (B, n, ...) of a step, augmented. A lane's augmentation is seeded by its
    own task, so it does not depend on the other lanes."""
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
