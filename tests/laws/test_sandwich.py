"""A step that trains several sub-models together, against the gradient worked out by hand: SGD with rate 1 on one
batch, so that the parameters move by the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fl_engine.core.slicing import initial_params, is_statistic, take
from fl_engine.core.types import FULL, SGD, LocalTask, Params, Sandwich
from fl_engine.core.widths import prefix
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from fl_engine.training.local import Job, Trained, train

FAMILY = TinyNet()
START = initial_params(FAMILY, 1)
X = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(8))
Y = torch.tensor([0, 1, 3, 1, 0, 3, 3, 1])
SPECS = {width: prefix(FAMILY.layout(), width) for width in (0.25, 0.5, 0.75, 1.0)}
TASK = LocalTask(FULL, SGD(1.0), epochs=1, batch_size=8, drop_last=True, seed=11)


def one_step(widths: Sequence[float], sandwich: Sandwich, seed: int = 11) -> Trained:
    task = replace(TASK, seed=seed, widths=tuple(SPECS[width] for width in widths), sandwich=sandwich)
    return train(FAMILY, Classification(4), [Job(task, START, X, Y)])[0]


def moved(found: Trained) -> Params:
    return {name: START[name] - t for name, t in found.params.items()}


def by_hand(widths: Sequence[float], weight: float, tau: float) -> tuple[Params, float]:
    """(gradient, loss): the mean over the sub-models of cross entropy, plus for all but the last weight * tau^2 * KL
    from the last's softened outputs, through which no gradient flows."""
    leaves = {name: t.clone().requires_grad_() for name, t in START.items()}
    outputs = []
    for width in widths:
        spec = SPECS[width]
        outputs.append(torch.func.functional_call(FAMILY.module(spec), take(leaves, FAMILY.layout(), spec), (X,)))
    soft = F.softmax(outputs[-1].detach() / tau, dim=1)
    loss = F.cross_entropy(outputs[-1], Y)
    for out in outputs[:-1]:
        kl = (soft * (soft.log() - F.log_softmax(out / tau, dim=1))).sum(1).mean()
        loss = loss + F.cross_entropy(out, Y) + weight * tau**2 * kl
    loss = loss / len(outputs)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)), loss.item()


def close(left: Params, right: Params) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-6) for name in right)


@pytest.mark.parametrize(("weight", "tau"), [(0.0, 1.0), (1.0, 1.0), (0.5, 3.0)])
def test_the_gradient_of_the_smallest_and_the_largest(weight: float, tau: float) -> None:
    found, (gradient, loss) = one_step((0.5, 1.0), Sandwich(1, weight, tau)), by_hand((0.5, 1.0), weight, tau)
    assert close(moved(found), gradient)
    assert found.loss == pytest.approx(loss, rel=1e-5)


def test_the_others_are_drawn_uniformly_and_by_seed() -> None:
    likely = {width: by_hand((0.25, width, 1.0), 1.0, 1.0)[0] for width in (0.5, 0.75)}
    counts = dict.fromkeys(likely, 0)
    for seed in range(60):
        gradient = moved(one_step((0.25, 0.5, 0.75, 1.0), Sandwich(1, 1.0, 1.0), seed))
        (drawn,) = [width for width, wanted in likely.items() if close(gradient, wanted)]
        counts[drawn] += 1
    assert all(18 <= count <= 42 for count in counts.values()), counts


def test_running_statistics_are_the_largest_sub_models() -> None:
    family = SmallCNN((1, 8, 8), 4, width=0.25, norm="static")
    x, start = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1)), initial_params(family, 0)
    half = prefix(family.layout(), 0.5)
    both = replace(TASK, optimizer=SGD(0.1), widths=(half, FULL), sandwich=Sandwich(0, 1.0, 1.0))
    alone = replace(TASK, optimizer=SGD(0.1))
    found, plain = (train(family, Classification(4), [Job(task, start, x, Y)])[0] for task in (both, alone))
    assert any(not torch.equal(found.params[name], t) for name, t in plain.params.items() if not is_statistic(name))
    statistics = [name for name in start if is_statistic(name)]
    assert statistics
    assert_same_bits({n: found.params[n] for n in statistics}, {n: plain.params[n] for n in statistics})
