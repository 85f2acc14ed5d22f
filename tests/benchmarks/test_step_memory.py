"""The memory of a training step, counted by hand and by the counter."""

from __future__ import annotations

import pytest
import torch

from benchmarks import memory
from benchmarks.step_memory import LiveBytes, step_memory
from fl_engine.core.costs import count_params
from fl_engine.core.types import SGD, Adam
from fl_engine.models.chains import AepMLP
from fl_engine.tasks import Regression
from fl_engine.training.numerics import Numerics


def test_forward_and_backward_pass_of_a_small_mlp_by_hand() -> None:
    """Five samples of 3 numbers, a hidden layer of 4, one output, the loss their sum; 4 bytes a number. Weights and
    samples are there before."""
    x, first, second = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    with LiveBytes() as live:
        loss = (torch.relu(x @ first) @ second).sum()
        assert live.peak == 80 + 80, (
            "the hidden layer before and after the ReLU; later the output's 20 and the loss's 4"
        )
        assert live.now == 80 + 4, "the backward pass needs what came out of the ReLU"
        loss.backward()  # type: ignore[no-untyped-call]
        # At the ReLU: the hidden layer, the loss, its gradient 1, that of `second` (16), those of the hidden layer
        # after and before the ReLU.
        assert live.peak == 80 + 4 + 4 + 16 + 80 + 80
        assert live.now == 4 + 48 + 16, "the loss and both gradients"
        del loss
        first.grad = second.grad = None
    assert live.now == 0


def test_views_and_writing_in_place_cost_nothing() -> None:
    held = torch.zeros(10)
    with LiveBytes() as live:
        held.add_(1)
        part = held.view(2, 5)[0]
        assert live.peak == 0
        copy = part.clone()
        copy[0] = 3
        assert (live.now, live.peak) == (20, 20)
        del copy
    assert live.now == 0


def test_step_memory_grows_with_batch_precision_and_optimizer() -> None:
    """Weights and their gradients are there at the peak; momentum adds the weights once, Adam's moments twice."""
    family, goal = AepMLP((18,), 1), Regression()
    weights = 4 * count_params(family)
    plain, momentum, adam = (step_memory(family, goal, 32, optimizer=o) for o in (None, SGD(0.1, 0.9), Adam(0.1)))
    assert 2 * weights < plain < 2.5 * weights
    assert momentum == pytest.approx(3 * weights, rel=0.02)
    assert adam == pytest.approx(4 * weights, rel=0.02)
    # Targets and the loss stay float32: 32 numbers here and there.
    assert step_memory(family, goal, 32, Numerics(precision="fp16")) == pytest.approx(plain / 2, rel=0.001)
    assert step_memory(family, goal, 64) > plain


def test_fp16_takes_the_least_memory_and_amp_the_most() -> None:
    found = memory.measured("aep_mlp", 32, "cpu")
    assert set(found) == {"fp32", "amp", "fp16"} and found["fp16"] < found["fp32"] < found["amp"]
