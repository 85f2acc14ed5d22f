"""Loss terms that algorithms add to the task's loss. All functions return one value per sample, (batch,)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from fl_engine.core.task import Task, has


def self_distillation(
    goal: Task,
    student: Tensor,
    teachers: Sequence[Tensor],
    temperature: float,
    reduction: Literal["classes", "batch"] = "classes",
) -> Tensor:
    """Return FlexFL's distillation term: the task's divergence times tau^2, averaged over the teachers. For classes,
    the divergence is KL(softmax(t/tau) || softmax(s/tau)) (FlexFL Eq. 4 and the text above it).

    With `classes`, the term is averaged over the classes, as in the authors' code. With `batch`, it is the sum over
    classes, as in the paper. The paper's lambda = 10 assumes the average.

    Departs from the paper, which divides h(y) by tau. As in the authors' code, the temperature divides the logits.
    """
    if reduction == "batch":
        terms = [_divergence(goal, student, t.detach(), temperature) for t in teachers]
    else:
        softened = goal.softened(student, temperature)
        terms = [goal.divergence(softened, t.detach(), temperature).flatten(1).mean(1) for t in teachers]
    return reduce(torch.add, terms) * (temperature**2 / len(terms))


def of_exits(goal: Task, outputs: Sequence[Tensor], y: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of the task's losses at all exits."""
    return reduce(torch.add, (weight * goal.loss(out, y) for out, weight in zip(outputs, weights, strict=True)))


def distil_from_last(goal: Task, outputs: Sequence[Tensor], temperature: float) -> Tensor:
    """Return ScaleFL's distillation term (Ilhan et al., CVPR 2023): tau^2 times the weighted sum of KL between the last
    exit and each earlier exit j. The weight of exit j is proportional to j + 1; all weights add up to 1. As in the
    authors' code, the last exit is not detached, and KL is averaged over the classes."""
    n = len(outputs)
    total = outputs[0].new_zeros(len(outputs[0]))
    for j, student in enumerate(outputs[:-1]):
        total = total + (j + 1) * _divergence(goal, student, outputs[-1], temperature)
    classes = outputs[-1].shape[1] if has(goal, "sequences") else outputs[-1][0].numel()
    return total * (temperature**2 / (n * (n + 1) / 2) / classes)


def of_sandwich(goal: Task, outputs: Sequence[Tensor], y: Tensor, weight: float, temperature: float) -> Tensor:
    """Return the loss for the sandwich rule with in-place distillation (Yu and Huang, Universally Slimmable Networks,
    ICCV 2019).

    The loss is the mean over the sub-models. For the last and largest sub-model, the loss is the task's loss. For every
    other sub-model, the loss is the task's loss plus `weight` * tau^2 * KL. The task's loss is included as in OFA's
    code. KL uses the detached outputs of the last sub-model as the teacher's outputs.
    """
    total = goal.loss(outputs[-1], y)
    for student in outputs[:-1]:
        distilled = _divergence(goal, student, outputs[-1].detach(), temperature)
        total = total + goal.loss(student, y) + weight * temperature**2 * distilled
    return total / len(outputs)


def distil_mutually(goal: Task, outputs: Sequence[Tensor], temperature: float) -> Tensor:
    """Return DepthFL's distillation term (Kim et al., ICLR 2023, Eq. 3): the sum of KL over all ordered pairs of the n
    exits, divided by n - 1. In each pair, the outputs of the teacher are detached."""
    total = outputs[0].new_zeros(len(outputs[0]))
    for i, student in enumerate(outputs):
        for j, teacher in enumerate(outputs):
            if i != j:
                total = total + _divergence(goal, student, teacher.detach(), temperature)
    return total * (temperature**2 / max(1, len(outputs) - 1))


def _divergence(goal: Task, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the divergence of each sample. For classes, the divergence is KL(teacher || student) of softened
    distributions. Divergences of sequences and maps are averaged over the positions."""
    terms = goal.divergence(goal.softened(student, temperature), teacher, temperature)
    return terms.flatten(1).sum(1) / (terms[0, 0].numel() if has(goal, "sequences") else 1)


def mask_absent(logits: Tensor, present: Tensor) -> Tensor:
    """Set the logits (batch, classes, ...) of absent classes and their gradients to 0, as in HeteroFL's code. `present`
    is bool (classes,) or (batch, classes). Unlike -infinity, a logit of 0 still affects the softmax."""
    return torch.where(present.view(*present.shape, *[1] * (logits.dim() - 2)), logits, 0.0)
