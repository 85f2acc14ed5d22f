"""The task of the next token: loss, accuracy and masks by hand, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.tasks import NextToken
from fl_engine.training.losses import mask_absent, self_distillation

PADDING, WORD, OTHER, OOV, END = range(5)
TASK = NextToken(5, length=4, padding=PADDING, masked=(OOV, END))


def sure_of(*rows: list[int]) -> Tensor:
    """Logits (B, 5, T) that are largest for these tokens."""
    return 10 * F.one_hot(torch.tensor(rows), 5).float().transpose(1, 2)


def test_accuracy_by_hand() -> None:
    """Five words, four of them right; OOV right, one of three ends: 6 of 9 of all. Padding counts in none."""
    y = torch.tensor([[WORD, OTHER, OOV, END], [WORD, WORD, OTHER, END], [END, PADDING, PADDING, PADDING]])
    answers = sure_of([WORD, OTHER, OOV, END], [WORD, OTHER, OTHER, WORD], [WORD, WORD, PADDING, WORD])
    seen = [TASK.observe(answers[:1], y[:1]), TASK.observe(answers[1:], y[1:])]
    assert seen[1].tolist() == [2, 3, 2, 5]
    assert TASK.measure(seen).values == {"accuracy": 4 / 5, "accuracy_all": 6 / 9}
    assert next(iter(TASK.measure(seen).values)) == TASK.metric.name


def test_the_loss_is_the_mean_over_what_is_not_padding() -> None:
    """Logits 0 but log 3 for WORD: its probability is 3/7, that of any other token 1/7."""
    logits = torch.zeros(2, 5, 4)
    logits[:, WORD] = math.log(3)
    y = torch.tensor([[WORD, WORD, OOV, END], [WORD, END, PADDING, PADDING]])
    word, other = math.log(7 / 3), math.log(7)
    expected = [(2 * word + 2 * other) / 4, (word + other) / 2]
    assert TASK.loss(logits, y).tolist() == pytest.approx(expected)
    assert float(TASK.loss(logits, y).sum()) == pytest.approx(sum(expected))


def test_a_client_masks_the_tokens_that_it_does_not_hold() -> None:
    present = TASK.present(torch.tensor([[WORD, END, PADDING, PADDING]]))
    assert present.tolist() == [False, True, False, False, True]
    masked = mask_absent(torch.ones(2, 5, 4), torch.stack([present, ~present]))
    assert masked[..., 0].tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 1, 0]]
    assert (masked == masked[..., :1]).all(), "the same at every position"
    assert torch.equal(mask_absent(torch.ones(1, 5, 4), present), masked[:1])


def test_distillation_is_the_mean_over_tokens_and_positions() -> None:
    student, teacher = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    teacher[:, WORD, 1] = 2 * math.log(4)  # halved by the temperature: 4/8 and four times 1/8
    kl = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.125 / 0.2)
    found = self_distillation(TASK, student, [teacher], 2.0)
    assert found.tolist() == pytest.approx([4 * kl / 20])


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 1}, {"tokens": 2.0}, {"length": 0}, {"padding": 5}, {"padding": -1}, {"masked": (5,)},
        {"masked": (0,)}, {"masked": (1, 1)}, {"masked": (1, 2, 3, 4)},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        NextToken(**{"tokens": 5, "length": 4, **options})
