"""Counts that the papers print or that their published networks have, and options that are refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.errors import ModelError
from fl_engine.core.types import SubmodelSpec
from fl_engine.models import MODELS
from fl_engine.models.chains import VGG16, HarCNN, SmallCNN
from fl_engine.models.layers import LayerMaker
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.mobilenetv3_ofa import MobileNetV3OFA
from fl_engine.models.network import ImageNetwork
from fl_engine.models.resnet import PreResNet18, ResNet18, ResNet34
from fl_engine.models.text import TextLSTM

CIFAR = (3, 32, 32)
DIGITS = (1, 8, 8)


@pytest.mark.parametrize(
    ("family", "totals"),
    [
        (VGG16, (33_646_666, 34_015_396, 34_425_096)),
        (ResNet34, (21_578_634, 21_624_804, 21_676_104)),
        (MobileNetV2, (2_254_858, 2_370_148, 2_498_248)),
    ],
)
def test_totals_at_10_100_and_200_classes(family: Any, totals: tuple[int, ...]) -> None:
    assert tuple(count_params(family(CIFAR, classes)) for classes in (10, 100, 200)) == totals


@pytest.mark.parametrize(
    ("name", "options", "params"),
    [
        ("wisdm_lstm", {}, 155_612),
        ("aep_mlp", {}, 888_091),
        ("casas_bilstm", {}, 196_108),
        ("uthar_resnet18", {}, 11_182_142),
        ("widar_resnet18", {}, 11_185_706),
        ("epic_resnet18", {}, 11_241_260),
        ("epic_resnet18", {"stem": 64}, 11_192_812),
        ("point_detector", {}, 2_817_872),
    ],
)
def test_totals_at_the_published_input_and_outputs(name: str, options: dict[str, Any], params: int) -> None:
    kind: Any = MODELS[name]
    assert count_params(kind(kind.published_input, kind.published_outputs, **options)) == params


@pytest.mark.parametrize(
    ("family", "totals"),
    [
        (MobileNetV3OFA((3, 64, 64), 200), (2_414_056, 3_512_816, 6_387_640)),
        (MobileNetV3OFA((3, 64, 64), 200, norm="batch"), (2_402_120, 3_490_640, 6_345_816)),
        (HarCNN((128, 9), 6), (71_646, 144_086, 300_486)),
        (HarCNN((200, 6), 12), (108_324, 217_340, 446_892)),
    ],
)
def test_totals_of_nested_networks(family: Any, totals: tuple[int, ...]) -> None:
    assert tuple(count_params(family, family.nested()[size]) for size in ("small", "medium", "large")) == totals


@pytest.mark.parametrize(
    ("divisor", "params", "flops"),
    [
        (1, 11_172_170, 557_656_064),
        (2, 2_796_714, 140_416_000),
        (16, 44_510, 2_413_184),
    ],
)
def test_fedrolex_table_3_6(divisor: int, params: int, flops: int) -> None:
    family = PreResNet18(CIFAR, 10)
    keep = {group: n // divisor for group, n in family.layout().groups.items() if group != "classes"}
    spec = SubmodelSpec.of(keep)
    assert count_params(family, spec) == params
    # The table counts a linear layer's multiplications and additions apart, all else as `count_macs` does.
    assert count_macs(family, spec) + 10 * keep["stage4"] == flops
    assert count_macs(family, spec, linear=2) == flops


def test_mobilenetv2_has_a_global_max_pool() -> None:
    with torch.device("meta"):
        assert isinstance(MobileNetV2(CIFAR, 10).module().get_submodule("pool"), nn.AdaptiveMaxPool2d)


@pytest.mark.parametrize(
    ("options", "macs"),
    [({}, 333_217_792), ({"pool_after": (3, 5, 8, 11, 13)}, 532_111_360)],
    ids=["AdaptiveFL, Table 1: 333.2 M", "FlexFL's code: 532.1 M"],
)
def test_vgg16_pools_after_the_given_convolutions(options: dict[str, Any], macs: int) -> None:
    family = VGG16(CIFAR, 10, **options)
    assert (count_params(family), count_macs(family)) == (33_646_666, macs)
    assert family.layout() == VGG16(CIFAR, 10).layout()


def test_width_multiplies_every_channel_and_keeps_at_least_one() -> None:
    assert VGG16(CIFAR, 10, fc=(64, 32), width=0.125).layout().groups["conv13"] == 64
    assert VGG16(CIFAR, 10, fc=(64, 32), width=0.125).layout().groups["fc2"] == 4
    assert set(SmallCNN(DIGITS, 10, width=1e-6).layout().groups.values()) == {1, 10}
    mobile, resnet = MobileNetV2(CIFAR, 10, width=0.3), ResNet18(CIFAR, 10, width=2)
    assert list(mobile.layout().groups.values()) == [9, 4, 7, 9, 19, 28, 48, 96, 384, 10]
    assert list(resnet.layout().groups.values()) == [128, 192, 256, 512, 1024, 10]


@pytest.mark.parametrize("name", sorted(name for name, family in MODELS.items() if hasattr(family, "min_hw")))
def test_smallest_image_is_accepted_alone(name: str) -> None:
    model: Any = MODELS[name]
    side = model.min_hw
    assert count_macs(model((1, side, side), 2)) > 0
    with pytest.raises(ModelError):
        model((1, side, side - 1), 2)


# ----------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("name", "shape", "options", "option"),
    [
        ("small_cnn", (8, 8), {}, "name"),
        ("small_cnn", (0, 8, 8), {}, "name"),
        ("wisdm_lstm", (200,), {}, "name"),
        ("aep_mlp", (2**20,), {}, "name"),
        ("small_cnn", (1, 8, 8), {"outputs": 0}, "name"),
        ("resnet34", (3, 32, 32), {"width": 0}, "width"),
        ("resnet34", (3, 32, 32), {"channels": (64, 128, 256)}, "channels"),
        ("mobilenetv2", (3, 32, 32), {"norm": "group"}, "norm"),
        ("har_cnn", (128, 9), {"norm": "group"}, "norm"),
        ("har_cnn", (1, 9), {}, "name"),
        ("vgg16", (3, 32, 31), {}, "name"),
        ("vgg16", (3, 32, 32), {"fc": (4096,)}, "fc"),
        ("vgg16", (3, 32, 32), {"pool_after": (2, 4, 7, 10)}, "pool_after"),
        ("vgg16", (3, 32, 32), {"pool_after": (2, 4, 7, 10, 14)}, "pool_after"),
        ("casas_bilstm", (10,), {"vocabulary": 0}, "vocabulary"),
        ("uthar_resnet18", (1, 63, 90), {}, "name"),
        ("uthar_resnet18", (3, 64, 28), {}, "name"),
        ("epic_resnet18", (1, 400, 128), {"stem": 0}, "stem"),
        ("text_lstm", (6,), {"vocabulary": -1}, "vocabulary"),
        ("text_lstm", (6,), {"layers": 0}, "layers"),
        ("text_lstm", (6,), {"embedding": 2**17}, "embedding"),
        ("text_lstm", (6,), {"answers": "all"}, "answers"),
        ("text_transformer", (6,), {"heads": 2**17}, "heads"),
        ("text_transformer", (6,), {"hidden": 1.5}, "hidden"),
        ("text_transformer", (6,), {"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_option_is_refused_with_its_path(name: str, shape: Any, options: dict[str, Any], option: str) -> None:
    make: Callable[..., ModelFamily] = MODELS[name]
    with pytest.raises(ModelError) as error:
        make(**{"input_shape": shape, "outputs": 10} | options)
    assert error.value.path == f"model.{option}"


@dataclass(frozen=True)
class NoMinimum(ImageNetwork):
    def exit_points(self) -> tuple[str, ...]:
        return ()

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        return OrderedDict()


def test_image_network_without_min_hw_is_refused() -> None:
    with pytest.raises(ModelError, match="min_hw"):
        NoMinimum(DIGITS, 10)


def test_text_networks_have_as_many_tokens_as_outputs_by_default() -> None:
    assert TextLSTM((6,), 11).vocabulary == 11
    assert TextLSTM((6,), 2, vocabulary=30).vocabulary == 30


@pytest.mark.parametrize(
    "spec",
    [SubmodelSpec.of({}, ["stem", "stage1.0"]), SubmodelSpec.of({"stem": 65}), SubmodelSpec.of({"stage5": 6})],
)
def test_impossible_submodel_is_refused(spec: SubmodelSpec) -> None:
    with pytest.raises(ModelError):
        ResNet18((3, 32, 32), 10).module(spec)
