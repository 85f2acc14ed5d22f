"""Loss terms. Each is a function of logits (batch, classes)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def self_distillation(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    """KL(softmax(t/tau) || softmax(s/tau)) * tau^2, mean over the teachers (FlexFL Eq. 4 and the text above it).

    Departs from the paper: it writes a sum over classes; the authors' code reduces by the mean over batch *and*
    classes, and the printed lambda = 10 has that meaning (10 / num_classes with a sum over classes). So do we.
    The paper also prints h(y)/tau; a temperature acts on the logits, as here and in the code.
    """
    log_s = F.log_softmax(student / temperature, dim=1)
    # reduction="mean" would be this today, and something else in a later torch.
    terms = [F.kl_div(log_s, F.softmax(t.detach() / temperature, dim=1), reduction="none").mean() for t in teachers]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total * (temperature**2 / len(terms))
