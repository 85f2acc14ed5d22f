"""Scores against a loop over single images; batches that are always the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_engine.evaluate import Score, average_accuracy, evaluate, evaluate_pool
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.pool import member
from fl_engine.slicing import initial_params, runnable, take
from fl_engine.testing.tiny import TinyNet, tiny_data
from fl_engine.types import FULL, Data, ModelFamily, ParamLayout, Params, Prunable, SubmodelSpec

FAMILY = TinyNet()
HALF = SubmodelSpec.of({"conv": [0, 2, 5], "hidden": 16})


class Watched:
    """A family whose networks remember the batches they were fed."""

    def __init__(self, inner: ModelFamily) -> None:
        self.inner = inner
        self.batches: list[Tensor] = []
        self.min_hw, self.input_chw, self.classes = inner.min_hw, inner.input_chw, inner.classes

    def layout(self) -> ParamLayout:
        return self.inner.layout()

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        module = self.inner.module(spec)
        module.register_forward_pre_hook(lambda _, inputs: self.batches.append(inputs[0].clone()))
        return module

    def prunable(self) -> tuple[Prunable, ...]:
        return self.inner.prunable()


def data_of(count: int, chw: tuple[int, int, int] = (1, 4, 4), classes: int = 4) -> Data:
    """Images that all differ."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, *chw), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, classes, (count,), generator=generator)
    return Data("made", classes, x, y, x, y, (0.4,) * chw[0], (0.3,) * chw[0])


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
@pytest.mark.parametrize(("count", "batch"), [(1, 8), (7, 8), (8, 8), (9, 8), (16, 8), (17, 8), (30, 7)])
def test_scores_are_those_of_a_loop(spec: SubmodelSpec, count: int, batch: int) -> None:
    params, data = initial_params(FAMILY, 1), data_of(count)
    found = evaluate(
        FAMILY, take(params, FAMILY.layout(), spec), spec, data, data.test_x, data.test_y, batch_size=batch
    )
    expected = slow(params, spec, data)
    assert found.accuracy == expected.accuracy
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, [1]), (2, [2]), (128, [128]), (129, [129]), (130, [128, 2]), (257, [128, 129]), (300, [128, 128, 44])],
)
def test_a_last_image_alone_joins_the_batch_before(count: int, sizes: list[int]) -> None:
    watched, data = Watched(FAMILY), data_of(count)
    evaluate(watched, initial_params(FAMILY, 1), FULL, data, data.test_x, data.test_y)  # type: ignore[arg-type]
    assert [len(b) for b in watched.batches] == sizes
    seen = torch.cat(watched.batches).flatten(1).tolist()
    assert sorted(seen) == sorted(data.normalise(data.test_x).flatten(1).tolist()), "every image once"


def test_batches_are_the_same_every_time_and_not_in_the_file_s_order() -> None:
    """A network on batch statistics scores a batch, not an image: the figure needs fixed batches."""
    data, batches = data_of(50), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        watched = Watched(FAMILY)
        evaluate(watched, initial_params(FAMILY, seed), FULL, data, data.test_x, data.test_y, batch_size=20)  # type: ignore[arg-type]
        batches.append(torch.cat(watched.batches))
    assert torch.equal(*batches)
    assert not torch.equal(batches[0], data.normalise(data.test_x))


def test_a_network_on_batch_statistics_has_one_score() -> None:
    family, data = SmallCNN((1, 8, 8), 4, width=0.25), data_of(40, (1, 8, 8))
    params = initial_params(family, 0)
    scores = {evaluate(family, params, FULL, data, data.test_x, data.test_y, batch_size=16) for _ in range(3)}
    assert len(scores) == 1


def test_neither_the_model_nor_the_images_change() -> None:
    family, data = SmallCNN((1, 8, 8), 4, width=0.25, norm="static"), data_of(40, (1, 8, 8))
    params = initial_params(family, 0)
    before, images = {n: t.clone() for n, t in params.items()}, data.test_x.clone()
    evaluate(family, params, FULL, data, data.test_x, data.test_y, batch_size=16)
    assert all(torch.equal(params[n], t) for n, t in before.items())
    assert torch.equal(data.test_x, images)


def test_dropout_is_off() -> None:
    plain, data = initial_params(FAMILY, 1), data_of(30)
    scores = [
        evaluate(family, plain, FULL, data, data.test_x, data.test_y)
        for family in (TinyNet(dropout=0.0), TinyNet(dropout=0.9))
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=len)
def test_the_pool_is_scored_by_its_reported_members(devices: tuple[str, ...]) -> None:
    data, params = tiny_data(), initial_params(FAMILY, 2)
    specs = {"M1": SubmodelSpec.of({"hidden": 8}), "M2'": SubmodelSpec.of({"hidden": 16}), "M2": FULL}
    pool = tuple(
        member(FAMILY, name, spec, dispatched=True, reported="'" not in name) for name, spec in specs.items()
    )
    scores = evaluate_pool(FAMILY, params, pool, data, devices)
    assert list(scores) == ["M1", "M2"]
    for name, score in scores.items():
        assert score == evaluate(
            FAMILY, take(params, FAMILY.layout(), specs[name]), specs[name], data, data.test_x, data.test_y
        )
    assert average_accuracy(scores) == pytest.approx((scores["M1"].accuracy + scores["M2"].accuracy) / 2)


def test_it_is_the_test_images_that_are_scored() -> None:
    data = tiny_data()
    shuffled = replace(data, train_y=(data.train_y + 1) % 4)
    pool = (member(FAMILY, "full", FULL, dispatched=True, reported=True),)
    params = initial_params(FAMILY, 2)
    assert evaluate_pool(FAMILY, params, pool, data) == evaluate_pool(FAMILY, params, pool, shuffled)
