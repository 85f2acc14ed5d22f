"""Loss terms: logits (batch, classes) to one value per row (batch,). Their mean over the batch is the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def self_distillation(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    """KL(softmax(t/tau) || softmax(s/tau)) * tau^2, mean over classes and teachers (FlexFL Eq. 4 and the text
    above it).

    Departs from the paper: it writes a sum over classes; the authors' code reduces by the mean over batch *and*
    classes, and the printed lambda = 10 has that meaning (10 / num_classes with a sum over classes). So do we.
    The paper also prints h(y)/tau; a temperature acts on the logits, as here and in the code.
    """
    log_s = F.log_softmax(student / temperature, dim=1)
    terms = [F.kl_div(log_s, F.softmax(t.detach() / temperature, dim=1), reduction="none").mean(1) for t in teachers]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total * (temperature**2 / len(terms))


def exits_cross_entropy(logits: Sequence[Tensor], y_n: Tensor, weights: Sequence[float]) -> Tensor:
    """Cross entropy of every exit, each times its weight, summed."""
    total = weights[0] * F.cross_entropy(logits[0], y_n, reduction="none")
    for exit_logits, weight in zip(logits[1:], weights[1:], strict=True):
        total = total + weight * F.cross_entropy(exit_logits, y_n, reduction="none")
    return total


def distil_from_last(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """ScaleFL (Ilhan et al., CVPR 2023): KL of each earlier exit from the last, times tau^2, summed with the weights
    (j + 1) / sum of all of them. As in the authors' code, the last exit is not detached, so it learns from the others,
    and KL is reduced by the mean over the classes, too."""
    n = len(logits)
    total = logits[0].new_zeros(len(logits[0]))
    for j, student in enumerate(logits[:-1]):
        total = total + (j + 1) * _kl(student, logits[-1], temperature)
    return total * (temperature**2 / (n * (n + 1) / 2) / logits[-1].shape[1])


def distil_mutually(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """DepthFL (Kim et al., ICLR 2023), Eq. 3: every exit learns from every other, the teacher detached; KL summed
    over all pairs, over n - 1."""
    total = logits[0].new_zeros(len(logits[0]))
    for i, student in enumerate(logits):
        for j, teacher in enumerate(logits):
            if i != j:
                total = total + _kl(student, teacher.detach(), temperature)
    return total * (temperature**2 / max(1, len(logits) - 1))


def _kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of softened distributions."""
    soft = F.softmax(teacher / temperature, dim=1)
    return F.kl_div(F.log_softmax(student / temperature, dim=1), soft, reduction="none").sum(1)


def mask_absent(logits: Tensor, present: Tensor) -> Tensor:
    """Logits of classes outside `present` (bool, (classes,) or (batch, classes)) become 0, and get no gradient
    (HeteroFL's code; a logit of 0, unlike one of -infinity, still takes part in the softmax)."""
    return torch.where(present, logits, 0.0)
