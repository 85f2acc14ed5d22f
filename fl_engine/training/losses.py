"""Loss terms besides the task's own, each (batch,) from outputs (batch, outputs), or maps or sequences of outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_engine.core.task import Task, has_sequences


def self_distillation(goal: Task, student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    """The task's divergence, for classes KL(softmax(t/tau) || softmax(s/tau)), times tau^2, mean over outputs and
    teachers (FlexFL Eq. 4 and the text above it).

    Departs from the paper: it sums over classes and divides h(y) by tau. Here, as in the authors' code, the term is the
    mean over classes, too, which the printed lambda = 10 assumes, and the temperature divides the logits.
    """
    softened = goal.softened(student, temperature)
    terms = [goal.divergence(softened, t.detach(), temperature).flatten(1).mean(1) for t in teachers]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total * (temperature**2 / len(terms))


def of_exits(goal: Task, outputs: Sequence[Tensor], y: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted sum of the task's loss at every exit."""
    total = weights[0] * goal.loss(outputs[0], y)
    for of_exit, weight in zip(outputs[1:], weights[1:], strict=True):
        total = total + weight * goal.loss(of_exit, y)
    return total


def distil_from_last(goal: Task, outputs: Sequence[Tensor], temperature: float) -> Tensor:
    """ScaleFL (Ilhan et al., CVPR 2023): KL of each earlier exit j from the last, times tau^2, summed with weights
    proportional to j + 1 that add up to 1 over all exits. As in the authors' code, the last exit is not detached, so it
    learns from the others, and KL is the mean over the classes, too."""
    n = len(outputs)
    total = outputs[0].new_zeros(len(outputs[0]))
    for j, student in enumerate(outputs[:-1]):
        total = total + (j + 1) * _divergence(goal, student, outputs[-1], temperature)
    classes = outputs[-1].shape[1] if has_sequences(goal) else outputs[-1][0].numel()
    return total * (temperature**2 / (n * (n + 1) / 2) / classes)


def of_sandwich(goal: Task, outputs: Sequence[Tensor], y: Tensor, weight: float, temperature: float) -> Tensor:
    """Sandwich rule and in-place distillation (Yu and Huang, Universally Slimmable Networks, ICCV 2019): the mean over
    the sub-models of the task's loss, plus for all but the last, the largest, `weight` times KL from the largest's
    outputs, which are detached, times tau^2. As in OFA's code, the others learn from the targets too."""
    total = goal.loss(outputs[-1], y)
    for student in outputs[:-1]:
        distilled = _divergence(goal, student, outputs[-1].detach(), temperature)
        total = total + goal.loss(student, y) + weight * temperature**2 * distilled
    return total / len(outputs)


def distil_mutually(goal: Task, outputs: Sequence[Tensor], temperature: float) -> Tensor:
    """DepthFL (Kim et al., ICLR 2023), Eq. 3: every exit learns from every other, which is detached; the sum of KL over
    all pairs, divided by n - 1."""
    total = outputs[0].new_zeros(len(outputs[0]))
    for i, student in enumerate(outputs):
        for j, teacher in enumerate(outputs):
            if i != j:
                total = total + _divergence(goal, student, teacher.detach(), temperature)
    return total * (temperature**2 / max(1, len(outputs) - 1))


def _divergence(goal: Task, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """For classes, KL(teacher || student) of softened distributions; of a sequence the mean over its positions, as its
    loss is."""
    terms = goal.divergence(goal.softened(student, temperature), teacher, temperature)
    return terms.flatten(1).sum(1) / (terms.shape[-1] if has_sequences(goal) else 1)


def mask_absent(logits: Tensor, present: Tensor) -> Tensor:
    """Logits (batch, classes, ...) of classes outside `present` (bool, (classes,) or (batch, classes)) become 0, and
    get no gradient (HeteroFL's code; a logit of 0, unlike one of -infinity, still takes part in the softmax)."""
    return torch.where(present.view(*present.shape, *[1] * (logits.dim() - 2)), logits, 0.0)
