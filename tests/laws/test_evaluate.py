"""Scores against a loop over single images; batches that are always the same, and a last batch of one sample: batch
norm refuses one value per channel, so the sample joins another batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.pool import measure_apoz, member
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params, runnable, take
from fl_engine.core.types import FULL, Params, SubmodelSpec
from fl_engine.models.chains import SmallCNN
from fl_engine.models.traced import from_module
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, tiny_data
from fl_engine.training.evaluation import Score, average, collect_statistics, evaluate, evaluate_pool, last_layer_inputs
from tests.harness.networks import Watched

FAMILY = TinyNet()
HALF = SubmodelSpec.of({"conv": [0, 2, 5], "hidden": 16})


def data_of(count: int, chw: tuple[int, int, int] = (1, 4, 4), classes: int = 4) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, *chw), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, classes, (count,), generator=generator)
    return Data("made", Classification(classes), x, y, x, y, (0.4,) * chw[0], (0.3,) * chw[0])


def slow(params: Params, spec: SubmodelSpec, data: Data) -> Score:
    """One image at a time, the cross entropy by hand."""
    module = runnable(FAMILY, spec, take(params, FAMILY.layout(), spec)).eval()
    right, loss = 0, 0.0
    for x, y in zip(data.test_x, data.test_y.tolist(), strict=True):
        with torch.no_grad():
            logits = module((x[None].float() / 255 - 0.4) / 0.3)[0].double().tolist()
        right += max(range(len(logits)), key=lambda i: logits[i]) == y
        loss -= logits[y] - math.log(sum(math.exp(v) for v in logits))
    return Score(right / len(data.test_y), loss / len(data.test_y))


@pytest.mark.parametrize("spec", [FULL, HALF], ids=["full", "indices"])
@pytest.mark.parametrize("count", [1, 129, 150])
def test_scores_equal_a_loop_over_images(spec: SubmodelSpec, count: int) -> None:
    params, data = initial_params(FAMILY, 1), data_of(count)
    found = evaluate(FAMILY, take(params, FAMILY.layout(), spec), spec, data, data.test_x, data.test_y)
    expected = slow(params, spec, data)
    assert found.value == expected.value
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, [1]), (129, [129]), (130, [128, 2]), (257, [128, 129])],
)
def test_single_last_image_joins_the_batch_before(count: int, sizes: list[int]) -> None:
    watched, data = Watched(FAMILY), data_of(count)
    evaluate(watched, initial_params(FAMILY, 1), FULL, data, data.test_x, data.test_y)  # type: ignore[arg-type]
    assert [len(b) for b in watched.batches] == sizes
    seen = torch.cat(watched.batches).flatten(1).tolist()
    assert sorted(seen) == sorted(data.normalise(data.test_x).flatten(1).tolist()), "every image once"


def test_evaluation_batches_are_fixed_and_shuffled() -> None:
    """A network on batch statistics scores a batch, not an image: the figure needs fixed batches."""
    data, batches = data_of(150), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        watched = Watched(FAMILY)
        evaluate(watched, initial_params(FAMILY, seed), FULL, data, data.test_x, data.test_y)  # type: ignore[arg-type]
        batches.append(torch.cat(watched.batches))
    assert torch.equal(*batches)
    assert not torch.equal(batches[0], data.normalise(data.test_x))


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=len)
def test_pool_is_scored_by_its_reported_members(devices: tuple[str, ...]) -> None:
    data, params = tiny_data(), initial_params(FAMILY, 2)
    specs = {"M1": SubmodelSpec.of({"hidden": 8}), "M2'": SubmodelSpec.of({"hidden": 16}), "M2": FULL}
    pool = tuple(member(FAMILY, name, spec, dispatched=True, reported="'" not in name) for name, spec in specs.items())
    scores = evaluate_pool(FAMILY, params, pool, data, devices)
    assert list(scores) == ["M1", "M2"]
    for name, score in scores.items():
        assert score == evaluate(
            FAMILY, take(params, FAMILY.layout(), specs[name]), specs[name], data, data.test_x, data.test_y
        )
    assert average(scores) == pytest.approx((scores["M1"].value + scores["M2"].value) / 2)


def test_ensemble_predicts_the_mean_of_its_exits() -> None:
    family = TinyNet(exits=("conv", "fc"))
    data, params = tiny_data(), initial_params(family, 5)
    with torch.no_grad():
        exits = runnable(family, FULL, params).eval()(data.normalise(data.test_x))
    for ensemble, logits in ((False, exits[-1]), (True, (exits[0] + exits[1] + exits[2]) / 3)):
        score = evaluate(family, params, FULL, data, data.test_x, data.test_y, ensemble=ensemble)
        assert score.value == (logits.argmax(1) == data.test_y).float().mean().item()
        assert score.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, data.test_y).item(), rel=1e-5)


@pytest.mark.parametrize("norm", ["batch", "static"])
def test_static_statistics_are_means_over_training_batches(norm: Any) -> None:
    family = SmallCNN((1, 8, 8), 4, width=0.25, norm=norm)
    data = tiny_data((1, 8, 8))
    params = initial_params(family, 3)
    module = runnable(family, FULL, {name: t.clone() for name, t in params.items()}).eval()
    collect_statistics(module, data, data.train_x, "cpu", batch_size=50)
    conv, bn = module.get_submodule("conv1.conv"), module.get_submodule("conv1.bn")
    order = torch.from_numpy(seeds.rng(0, "evaluate").permutation(len(data.train_y)))
    with torch.no_grad():
        outs = [conv(data.normalise(data.train_x[chunk])) for chunk in torch.split(order, 50)]
    torch.testing.assert_close(bn.running_mean, torch.stack([o.mean((0, 2, 3)) for o in outs]).mean(0))
    torch.testing.assert_close(bn.running_var, torch.stack([o.var((0, 2, 3)) for o in outs]).mean(0))


class Vectors(nn.Module):
    running = True

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.a, self.bn = nn.Linear(5, 16), nn.BatchNorm1d(16, track_running_stats=self.running)
        self.relu, self.b = nn.ReLU(), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.relu(self.bn(self.a(x))))
        return found


class OfTheBatch(Vectors):
    running = False


def family_of(network: type[nn.Module]) -> ModelFamily:
    made: ModelFamily = from_module(network)((5,), 4)
    return made


def numbers(count: int = 257) -> Data:
    x, y = torch.randn(count, 5, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 4
    return Data("numbers", Classification(4), x, y, x, y)


@pytest.mark.parametrize("network", [Vectors, OfTheBatch])
def test_activations_are_measured_of_every_sample(network: type[nn.Module]) -> None:
    """With statistics of the batch the last sample is measured beside the batch before it; else batches are of 128."""
    family, data = family_of(network), numbers()
    params = initial_params(family, 0)
    module = family.module().eval()
    module.load_state_dict(params)
    sizes = [128, 129] if network is OfTheBatch else [128, 128, 1]
    seen: list[Tensor] = []
    module.b.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        for part in torch.split(data.train_x, sizes):
            module(part)
    wanted = torch.cat(seen)
    assert np.array_equal(last_layer_inputs(family, params, data), wanted.numpy())
    (found,) = measure_apoz(family, params, data.train_x, batch_size=128)
    assert found == int((wanted == 0).sum()) / wanted.numel()
