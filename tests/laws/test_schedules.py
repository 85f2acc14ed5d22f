"""The learning rate inside a client's work: by hand, and in the steps that are really taken."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.core.schedules import Constant, Cosine, Schedule
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, Adam, LocalTask, Params
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from fl_engine.training.local import Job, train

FAMILY, START = TinyNet(), initial_params(TinyNet(), 1)


def rates(schedule: Schedule, per_epoch: int, epochs: int, lr: float = 1.0) -> list[float]:
    return [schedule.rate(lr, step, per_epoch, epochs) for step in range(per_epoch * epochs)]


def test_cosine_rates_by_hand() -> None:
    """Of four steps, the cosine is 1, 1/sqrt(2), 0, -1/sqrt(2)."""
    slope = math.sqrt(0.5)
    plain = [1.0, (1 + slope) / 2, 0.5, (1 - slope) / 2]
    assert rates(Cosine(), 2, 2) == pytest.approx(plain)
    assert rates(Cosine(floor=0.2), 4, 1, 0.5) == pytest.approx([0.5 * (0.2 + 0.8 * each) for each in plain])
    assert rates(Cosine(floor=1.0), 2, 2, 0.3) == pytest.approx([0.3] * 4)
    assert min(rates(Cosine(), 3, 5)) > 0 and rates(Cosine(), 1, 1) == [1.0]


def test_cosine_restarts_after_so_many_epochs() -> None:
    """Three epochs of two steps, with a restart after two: the third is the beginning of another descent."""
    once = rates(Cosine(floor=0.1), 2, 2)
    assert rates(Cosine(floor=0.1, restart=2), 2, 3) == once + once[:2]
    assert rates(Cosine(restart=1), 2, 3) == pytest.approx([1.0, 0.5] * 3)
    assert rates(Cosine(restart=9), 2, 3) == pytest.approx(rates(Cosine(), 2, 9)[:6])


def test_descents_that_grow_are_those_of_torch() -> None:
    """T_0 of 10 epochs and T_mult 2, as FedAIoT trains VisDrone's detector: restarts after 10, 30 and 70 epochs."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10 * 3, T_mult=2)
    ours = rates(Cosine(restart=10, factor=2), 3, 80, 0.1)
    for step, rate in enumerate(ours):
        assert rate == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        theirs.step()
    assert [step for step, rate in enumerate(ours) if rate == 0.1] == [0, 30, 90, 210]


def gradients(params: Params, x: Tensor, y: Tensor) -> Params:
    network = FAMILY.module().train()
    network.load_state_dict(params)
    weights = dict(network.named_parameters())
    return dict(zip(weights, torch.autograd.grad(F.cross_entropy(network(x), y), list(weights.values())), strict=True))


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.5, 0.01), Adam(0.01)], ids=str)
def test_every_step_has_its_rate(optimizer: SGD | Adam) -> None:
    """Four epochs of one step, by hand as in `test_local`, each with the rate of its own."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(8, 1, 4, 4, generator=generator), torch.randint(0, 4, (8,), generator=generator)

    def trained(schedule: Schedule) -> Params:
        task = LocalTask(FULL, optimizer, 4, 8, True, 5, schedule=schedule)
        return train(FAMILY, Classification(4), [Job(task, START, x, y)])[0].params

    found, params = trained(Cosine(floor=0.1, restart=3)), dict(START)
    first, second = ({name: torch.zeros_like(t) for name, t in START.items()} for _ in range(2))
    for step, rate in enumerate(rates(Cosine(floor=0.1, restart=3), 1, 4, optimizer.lr), 1):
        for name, g in gradients(params, x, y).items():
            if isinstance(optimizer, SGD):
                first[name] = optimizer.momentum * first[name] + g + optimizer.weight_decay * params[name]
                params[name] = params[name] - rate * first[name]
            else:
                first[name], second[name] = 0.9 * first[name] + 0.1 * g, 0.999 * second[name] + 0.001 * g * g
                mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
                params[name] = params[name] - rate * mean / (square.sqrt() + 1e-8)
    for name, tensor in params.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-5), name
    plain = trained(Constant())
    assert any((found[name] - t).abs().max() > 1e-3 for name, t in plain.items())
    assert_same_bits(trained(Cosine(floor=1.0)), plain)
