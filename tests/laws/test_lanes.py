"""Clients side by side: a lane's bits are its own, and its figures those of a client on its own, but for rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fl_engine.core.augmentation import Crop, Flip
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.steps import Balanced, Cosine
from fl_engine.core.types import (
    FULL,
    SGD,
    Adam,
    Axis,
    Distillation,
    ExitLoss,
    LocalTask,
    ParamLayout,
    Prunable,
    Slot,
    SubmodelSpec,
)
from fl_engine.core.widths import prefix
from fl_engine.models.chains import VGG16, HarCNN, SmallCNN
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.mobilenetv3_ofa import MobileNetV3OFA
from fl_engine.models.recurrent import WisdmLSTM
from fl_engine.models.resnet import PreResNet18, ResNet18
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from fl_engine.training import lanes, strategy
from fl_engine.training.local import TrainingJob, kind, train
from fl_engine.training.numerics import SINGLE, Numerics

BATCHED = Numerics("batched", 64)

FAMILIES: dict[str, ModelFamily] = {
    "tiny": TinyNet(),
    "small": SmallCNN((1, 8, 8), 4),
    "static": SmallCNN((3, 9, 9), 5, width=0.4, norm="static"),
    "vgg": VGG16((3, 32, 32), 4, fc=(24, 20), width=0.06),
    "resnet": ResNet18((1, 9, 9), 3, width=0.08),
    "preresnet": PreResNet18((3, 9, 9), 3, width=0.08),
    "mobile": MobileNetV2((3, 17, 17), 4, width=0.2),
    "har": HarCNN((9, 3), 4, width=0.5),
    "lstm": WisdmLSTM((9, 3), 4),
    "large lstm": WisdmLSTM((5, 2), 3, width=5.0),
}
LARGE = ("vgg", "resnet", "preresnet", "mobile")
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in LARGE else name for name in FAMILIES]

TEN = Classification(10)
TASK = LocalTask(FULL, SGD(0.05, 0.5, 1e-3), epochs=2, batch_size=5, drop_last=False, seed=0)
OTHER_WORK: dict[str, Any] = {
    "sampler": Balanced(),
    "augment": (Crop(padding=2), Flip()),
    "schedule": Cosine(floor=0.1, restart=1),
}


def job(family: ModelFamily, task: LocalTask, i: int, samples: int = 12, remembered: bool = False) -> TrainingJob:
    """Client i: weights, samples, labels and seed of its own."""
    generator = torch.Generator().manual_seed(100 + i)
    x = torch.randn(samples, *family.input_shape, generator=generator)
    y = torch.randint(0, family.outputs, (samples,), generator=generator)
    start = take(initial_params(family, i), family.layout(), task.spec)
    start = {name: t.clone() for name, t in start.items()}
    linear = {name: 0.01 * t for name, t in list(start.items())[:2]} if remembered else {}
    return TrainingJob(replace(task, seed=i), start, x, y, linear)


def terms(family: ModelFamily) -> dict[str, LocalTask]:
    half = prefix(family.layout(), 0.5)
    return {
        "plain": TASK,
        "momentum": replace(TASK, optimizer=SGD(0.05, 0.9, 1e-3)),
        "adam": replace(TASK, optimizer=Adam(0.01), drop_last=True),
        "half": replace(TASK, spec=half),
        "distilled": replace(TASK, distillation=Distillation((prefix(family.layout(), 0.3), half), 10.0, 3.0)),
        "proximal, clipped": replace(TASK, proximal=0.3, clip_norm=0.5),
        "masked, scaled": replace(TASK, mask_labels=True, scaler=0.5),
    }


def assert_same(family: ModelFamily, jobs: list[TrainingJob], others: int) -> None:
    """Each job alone, and in groups of every size from two to all: the same bits, the same loss."""
    together = train(family, Classification(family.outputs), jobs, BATCHED)
    for i in (0, len(jobs) - 1):
        alone = train(family, Classification(family.outputs), [jobs[i]], BATCHED)[0]
        assert_same_bits(alone.params, together[i].params)
        assert (alone.loss, alone.steps, alone.samples) == (together[i].loss, together[i].steps, together[i].samples)
    some = train(family, Classification(family.outputs), jobs[1 : 1 + others], BATCHED)
    for a, b in zip(some, together[1 : 1 + others], strict=True):
        assert_same_bits(a.params, b.params)
        assert a.loss == b.loss


@pytest.mark.parametrize("name", NAMES)
def test_lane_has_the_same_bits_with_any_neighbours(name: str) -> None:
    family = FAMILIES[name]
    for task in terms(family).values():
        assert_same(family, [job(family, task, i) for i in range(7)], 3)


@settings(max_examples=25)
@given(
    chw=st.tuples(st.integers(1, 4), st.integers(8, 11), st.integers(8, 11)),
    classes=st.integers(2, 11),
    width=st.floats(0.1, 1.3),
    batch=st.integers(1, 9),
    samples=st.integers(2, 20),
    count=st.integers(2, 40),
    norm=st.sampled_from(["batch", "static"]),
    momentum=st.sampled_from([0.0, 0.25, 0.9]) | st.floats(0, 1, exclude_max=True),
)
def test_in_any_shape(
    chw: tuple[int, int, int], classes: int, width: float, batch: int, samples: int, count: int, norm: str,
    momentum: float,
) -> None:  # fmt: skip
    family = SmallCNN(chw, classes, width, norm=norm)  # type: ignore[arg-type]
    task = replace(TASK, optimizer=SGD(0.05, momentum, 1e-3), batch_size=batch, epochs=1)
    assert_same(family, [job(family, task, i, samples) for i in range(count)], count // 2)


@settings(max_examples=25)
@given(
    series=st.tuples(st.integers(1, 30), st.integers(1, 7)),
    width=st.floats(0.1, 3.0),
    batch=st.integers(1, 33),
    samples=st.integers(2, 40),
    count=st.integers(2, 12),
    momentum=st.sampled_from([0.5, 0.9]),
)
def test_with_series_of_any_length(
    series: tuple[int, int], width: float, batch: int, samples: int, count: int, momentum: float
) -> None:
    family = WisdmLSTM(series, 5, width)
    task = replace(TASK, optimizer=SGD(0.05, momentum, 1e-3), batch_size=batch, epochs=1)
    assert_same(family, [job(family, task, i, samples) for i in range(count)], count // 2)


def test_exits_remembered_terms_and_dropout() -> None:
    exits = TinyNet(exits=("conv", "fc"))
    for teachers in ("last", "all"):
        task = replace(TASK, exits=ExitLoss((0.2, 0.3, 0.5), 0.5, 2.0, teachers))  # type: ignore[arg-type]
        assert_same(exits, [job(exits, task, i, remembered=True) for i in range(5)], 2)
    dropout = TinyNet(dropout=0.5)
    assert_same(dropout, [job(dropout, TASK, i) for i in range(5)], 2)


def test_squeeze_and_excitation() -> None:
    family = MobileNetV3OFA((3, 17, 18), 4, width=0.05)
    task = replace(TASK, epochs=1, batch_size=4, spec=family.nested()["small"])
    assert_same(family, [job(family, task, i, samples=8) for i in range(4)], 2)
    assert_close(family, [job(family, replace(task, optimizer=SGD(0.01)), i, samples=4) for i in range(2)])


def test_samples_are_drawn_and_changed_for_each_lane() -> None:
    family = FAMILIES["small"]
    task = replace(TASK, **OTHER_WORK)
    assert_same(family, [job(family, task, i) for i in range(5)], 2)
    jobs = [job(family, replace(task, optimizer=SGD(0.01)), i) for i in range(3)]
    assert_close(family, jobs)


@pytest.mark.parametrize("name", NAMES)
def test_side_by_side_equals_one_at_a_time_up_to_rounding(name: str) -> None:
    family = FAMILIES[name]
    for task in terms(family).values():
        task = replace(task, optimizer=SGD(0.01), epochs=1, batch_size=12)
        assert_close(family, [job(family, task, i) for i in range(3)])


def assert_close(family: ModelFamily, jobs: list[TrainingJob]) -> None:
    """Side by side, and one at a time."""
    for a, b in zip(
        train(family, Classification(family.outputs), jobs, BATCHED),
        train(family, Classification(family.outputs), jobs, SINGLE),
        strict=True,
    ):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        for key in a.params:
            torch.testing.assert_close(a.params[key], b.params[key], rtol=1e-3, atol=1e-4)


def test_convolution_of_one_output_learns_from_one_sample() -> None:
    """For one sample and one output, torch's gradient refuses weights that lie channels last."""
    layer = lanes.Conv2d(nn.Conv2d(3, 1, 3, padding=1))
    layer.weight = lanes.channels_last(torch.randn(1, 1, 3, 3, 3)).requires_grad_()
    plain, x = layer.weight.detach()[0].clone().requires_grad_(), torch.randn(1, 3, 8, 8)
    x = x.contiguous(memory_format=torch.channels_last)
    layer(x).square().sum().backward()
    nn.functional.conv2d(x.double(), plain.double(), padding=1).square().sum().backward()
    assert layer.weight.grad is not None and plain.grad is not None
    torch.testing.assert_close(layer.weight.grad[0], plain.grad, rtol=1e-4, atol=1e-4)


def test_diverged_lane_leaves_the_others_unchanged() -> None:
    family = FAMILIES["small"]
    jobs = [job(family, TASK, i) for i in range(3)]
    expected = train(family, Classification(family.outputs), jobs, BATCHED)
    sick = replace(jobs[1], start={k: t * float("nan") for k, t in jobs[1].start.items()})
    found = train(family, Classification(family.outputs), [jobs[0], sick, jobs[2]], BATCHED)
    assert [t.finite for t in found] == [True, False, True]
    for i in (0, 2):
        assert_same_bits(found[i].params, expected[i].params)


def test_kinds() -> None:
    """Other weights, seeds and channels go together; other widths, batches, rates or teachers do not."""
    layout = FAMILIES["tiny"].layout()

    def of(samples: int = 12, **changes: object) -> object:
        return kind(layout, replace(TASK, **changes), samples)  # type: ignore[arg-type]

    assert of() == of(seed=5) == of(seed=5, spec=SubmodelSpec.of({"conv": 8}))
    scattered, first = SubmodelSpec.of({"conv": [0, 2, 5]}), SubmodelSpec.of({"conv": 3})
    assert of(spec=scattered) == of(spec=first)
    teacher = Distillation((SubmodelSpec.of({"conv": 2}),), 1.0, 1.0)
    assert of(spec=scattered, distillation=teacher) != of(spec=first, distillation=teacher)
    different = [of(), of(11), of(epochs=3), of(optimizer=SGD(0.1)), of(spec=first), of(proximal=0.1)]
    different += [of(**{name: value}) for name, value in OTHER_WORK.items()]
    assert of(**OTHER_WORK) == of(seed=5, **OTHER_WORK)
    assert len(set(different)) == len(different)
    assert of(12, drop_last=True) == of(14, drop_last=True) != of(15, drop_last=True)


@dataclass(frozen=True)
class Odd:
    """One hidden layer; with `grouped`, a layer norm whose weights know nothing of lanes; with `mixing`, a softmax over
    the features, which mixes lanes; with `parting`, taken apart into two threes, of which two clients have four."""

    grouped: bool = False
    mixing: bool = False
    parting: bool = False
    input_shape: tuple[int, int, int] = (1, 2, 2)
    outputs: int = 3
    min_hw = 1

    def layout(self) -> ParamLayout:
        free = Axis(None)
        slots = {"0.weight": Slot("a", (Axis("h"), free)), "0.bias": Slot("a", (Axis("h"),))}
        if self.grouped:
            slots |= {"1.weight": Slot("a", (Axis("h"),)), "1.bias": Slot("a", (Axis("h"),))}
        slots |= {"2.weight": Slot("b", (Axis("classes"), Axis("h"))), "2.bias": Slot("b", (Axis("classes"),))}
        return ParamLayout({"h": 6, "classes": 3}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        width = self.layout().width(spec, "h")
        middle = nn.LayerNorm(width) if self.grouped else nn.Softmax(1) if self.mixing else nn.ReLU()
        middle = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten()) if self.parting else middle
        return nn.Sequential(_Flat(4, width), middle, nn.Linear(width, 3))

    def prunable(self) -> tuple[Prunable, ...]:
        return ()


class _Flat(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))

    def in_lanes(self) -> nn.Module:
        class Flat(lanes.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.flatten(1))

        return Flat()


def test_layer_without_lanes_trains_alone() -> None:
    family: ModelFamily = Odd(grouped=True)  # type: ignore[assignment]
    with pytest.raises(ModelError) as caught:
        train(family, Classification(family.outputs), [job(family, TASK, i) for i in range(2)], BATCHED)
    assert caught.value.path == "run.strategy"
    assert strategy.choose(family, Classification(3), 5, 10, "fp32").strategy == "single"


@pytest.mark.parametrize("odd", [Odd(mixing=True), Odd(parting=True)], ids=["mixing", "parting"])
def test_network_that_mixes_channels_trains_alone(odd: Odd, caplog: pytest.LogCaptureFixture) -> None:
    family: ModelFamily = odd  # type: ignore[assignment]
    assert strategy.choose(family, Classification(3), 5, 10, "fp32").strategy == "single"
    assert "mixes channels" in caplog.text


def test_strategy_follows_from_the_size() -> None:
    """A step of the small CNN at 8x8 has 3 * 145,000 * 10 multiply-adds; VGG16's at 32x32 has 3 * 333 million * 50."""
    assert strategy.choose(VGG16((3, 32, 32), 10), TEN, 50, 10, "fp32") == SINGLE
    assert strategy.choose(SmallCNN((1, 8, 8), 10), TEN, 10, 6, "fp32") == Numerics("batched", 6)
    large = SmallCNN((3, 32, 32), 10)
    step = 3 * count_macs(large) * 20
    assert step < strategy.SMALL_STEP
    assert strategy.choose(large, TEN, 20, 100, "fp32") == Numerics("batched", int(strategy.AT_ONCE // step))
    assert strategy.choose(large, TEN, 20, 6, "bf16", ("cpu", "cpu")) == Numerics("batched", 3, "bf16")
    assert strategy.choose(large, TEN, 20, 6, "bf16", ("cuda:0",)) == Numerics(precision="bf16")
    assert strategy.batched(FAMILIES["tiny"], 1, 1, "fp32").lanes == 2, "one client has a copy beside it"
