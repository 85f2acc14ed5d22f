"""Which samples a client sees: balanced is balanced, an epoch is as many draws as samples, as the server counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import initial_params
from fl_engine.core.steps import Balanced, Constant, Cosine, Sampler, Schedule, Shuffle
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, Adam, LocalTask, Params
from fl_engine.tasks import Classification, Regression
from fl_engine.testing.tiny import SEED, TinyNet, assert_same_bits
from fl_engine.training.batches import orders
from fl_engine.training.local import TrainingJob, train
from flexfleet.config import load_config

FOUR = Classification(4)
TASK = LocalTask(FULL, SGD(0.1), epochs=2, batch_size=4, drop_last=True, seed=5)
HELD = torch.tensor([0] * 90 + [1] * 9 + [3])
"""90, 9 and one sample of three labels; none of label 2."""


def drawn(sampler: Sampler, y: Tensor, epochs: int, goal: Task = FOUR) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.cat([sampler.epoch(goal, y, generator) for _ in range(epochs)])


def chi_square(counts: Tensor) -> float:
    expected = counts.double().mean()
    return float((counts - expected).square().sum() / expected)


def test_shuffled_epochs_are_permutations_of_one_stream() -> None:
    generator = torch.Generator().manual_seed(SEED)
    expected = torch.cat([torch.randperm(100, generator=generator) for _ in range(3)])
    assert torch.equal(drawn(Shuffle(), HELD, 3), expected)
    assert TASK.sampler == Shuffle()


def test_balanced_draws_every_held_label_equally_often() -> None:
    """9,000 draws, three labels: with two degrees of freedom 1 in 20,000 is beyond 20."""
    indices = drawn(Balanced(), HELD, 90)
    assert len(indices) == 9000 and int(indices.min()) >= 0 and int(indices.max()) < 100
    counts = torch.bincount(HELD[indices], minlength=4)
    assert counts[2] == 0 and chi_square(counts[[0, 1, 3]]) < 20
    assert counts[0] != counts[1], "labels are drawn, not taken in turn"


def test_smoothing_1_weighs_as_fedaiots_code() -> None:
    """9,000 draws of labels held 90, 9 and 1 times: in the ratio 90/91 : 9/10 : 1/2. As above; equal weights are told
    apart. The samples of a label stay equally likely."""
    indices = drawn(Balanced(smoothing=1.0), HELD, 90)
    counts = torch.bincount(HELD[indices], minlength=4)[[0, 1, 3]].double()
    weights = torch.tensor([90 / 91, 9 / 10, 1 / 2], dtype=torch.float64)
    expected = 9000 * weights / weights.sum()
    assert float(((counts - expected).square() / expected).sum()) < 20
    assert chi_square(counts) > 20
    assert chi_square(torch.bincount(indices, minlength=100)[:90]) < 150
    config = load_config(None, ["training.sampler={name: balanced, smoothing: 1.0}", "training.clip_norm=1.0"])
    assert config.training.sampler == Balanced(smoothing=1.0) and config.training.clip_norm == 1.0


def test_numbers_are_balanced_by_their_bins() -> None:
    y = torch.cat([torch.zeros(80, 1), torch.arange(1.0, 21.0)[:, None]])
    bins = torch.from_numpy(Regression().labels(y))
    found = torch.bincount(bins[drawn(Balanced(), y, 90, Regression())])
    held = found[found > 0]
    assert len(held) == len(bins.unique()) < 10 and chi_square(held) < 25
    with pytest.raises(ModelError, match=r"training\.sampler\.name"):
        job = TrainingJob(
            replace(TASK, sampler=Balanced()), initial_params(TinyNet(), 1), torch.zeros(4, 1, 4, 4), y[:4]
        )
        train(TinyNet(), Regression(bins=0), [job])


@dataclass(frozen=True)
class Wrong(Shuffle):
    draws: tuple[int, ...] = ()

    def epoch(self, goal: Task, y: Tensor, generator: torch.Generator) -> Tensor:
        return torch.tensor(self.draws)


@pytest.mark.parametrize("draws", [(0, 1), (0, 1, 2, 3, 3), (0, 1, 2, 4), (-1, 0, 1, 2)], ids=str)
def test_own_sampler_with_wrong_indices_is_refused(draws: Sequence[int]) -> None:
    tasks, targets = [replace(TASK, sampler=Wrong(draws=tuple(draws)))] * 2, [torch.arange(4)] * 2
    with pytest.raises(ModelError, match=r"Wrong\.epoch"):
        next(orders(FOUR, tasks, targets))
    assert len(list(orders(FOUR, [replace(TASK, sampler=Wrong(draws=(3, 3, 0, 1)))], targets[:1]))) == 2


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


def gradients(params: Params, x: Tensor, y: Tensor) -> Params:
    network = FAMILY.module().train()
    network.load_state_dict(params)
    weights = dict(network.named_parameters())
    return dict(zip(weights, torch.autograd.grad(F.cross_entropy(network(x), y), list(weights.values())), strict=True))


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.5, 0.01), Adam(0.01)], ids=str)
def test_every_step_has_its_rate(optimizer: SGD | Adam) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(8, 1, 4, 4, generator=generator), torch.randint(0, 4, (8,), generator=generator)

    def trained(schedule: Schedule) -> Params:
        task = LocalTask(FULL, optimizer, 4, 8, True, 5, schedule=schedule)
        return train(FAMILY, Classification(4), [TrainingJob(task, START, x, y)])[0].params

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
