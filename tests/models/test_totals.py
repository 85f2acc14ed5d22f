"""Counts that the papers print or that their published networks have, to the last parameter.

Nothing is allocated: all of it follows from shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import full_shapes
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.models import MODELS
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.preresnet import PreResNet18
from fl_engine.models.resnet import ResNet18, ResNet34
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.vgg16 import CHANNELS, VGG16

CIFAR = (3, 32, 32)
DIGITS = (1, 8, 8)


def layer_sizes(family: ModelFamily) -> list[int]:
    shapes = full_shapes(family)
    return [
        sum(shape.numel() for name, shape in shapes.items() if name.startswith(layer.params))
        for layer in family.prunable()
    ]


@pytest.mark.parametrize(
    ("family", "totals"),
    [
        (VGG16, (33_646_666, 34_015_396, 34_425_096)),
        (ResNet34, (21_578_634, 21_624_804, 21_676_104)),
        (MobileNetV2, (2_254_858, 2_370_148, 2_498_248)),
    ],
)
def test_totals_at_10_100_and_200_classes(
    family: Callable[[tuple[int, int, int], int], ModelFamily], totals: tuple[int, ...]
) -> None:
    assert tuple(count_params(family(CIFAR, classes)) for classes in (10, 100, 200)) == totals


def test_layer_sizes_resnet34() -> None:
    assert layer_sizes(ResNet34(CIFAR, 10)) == [1_856, 477_504, 1_157_376, 6_822_400, 13_114_368]


def test_layer_sizes_mobilenetv2() -> None:
    expected = [960, 2_064, 14_496, 40_848, 186_816, 306_528, 800_736, 476_160, 413_440]
    assert layer_sizes(MobileNetV2(CIFAR, 10)) == expected


def test_layer_sizes_vgg16() -> None:
    sizes = layer_sizes(VGG16(CIFAR, 10))
    assert len(sizes) == 15
    assert sizes[0] == 3 * 64 * 9 + 64 + 2 * 64
    assert sizes[13:] == [513 * 4096, 4097 * 4096]
    assert sum(sizes) == 33_646_666 - 4097 * 10


def test_total_small_cnn() -> None:
    assert count_params(SmallCNN(DIGITS, 10)) == 192 + 4_704 + 18_624 + 16_448 + 650


@pytest.mark.parametrize("model", [VGG16, ResNet34, PreResNet18, MobileNetV2])
def test_static_norm_adds_two_statistics_per_channel_and_no_counter(model: Any) -> None:
    family, static = model(CIFAR, 10), model(CIFAR, 10, norm="static")
    added = {name: shape for name, shape in full_shapes(static).items() if name not in full_shapes(family)}
    assert {name.rsplit(".", 1)[1] for name in added} == {"running_mean", "running_var"}
    channels = sum(s.numel() for name, s in full_shapes(family).items() if name.endswith("bn.weight"))
    assert sum(shape.numel() for shape in added.values()) == 2 * channels


def adaptivefl(ratio: float, full_convs: int) -> SubmodelSpec:
    """AdaptiveFL, section 3: the leading convolutions whole, all the rest `int(ratio * n)`."""
    keep = {f"conv{i}": int(ratio * n) for i, n in enumerate(CHANNELS, 1) if i > full_convs}
    return SubmodelSpec.of(keep | {"fc1": int(ratio * 4096), "fc2": int(ratio * 4096)})


@pytest.mark.parametrize(
    ("spec", "params", "printed_macs"),
    [
        (FULL, 33_646_666, "333.22"),
        (adaptivefl(0.66, 8), 16_814_977, "272.17"),
        (adaptivefl(0.66, 6), 15_410_557, "239.95"),
        (adaptivefl(0.66, 4), 14_839_789, "203.41"),
        (adaptivefl(0.40, 8), 8_397_106, "239.00"),
        (adaptivefl(0.40, 6), 6_483_040, "191.31"),
        (adaptivefl(0.40, 4), 5_667_148, "139.07"),
    ],
    ids=["L1", "M1", "M2", "M3", "S1", "S2", "S3"],
)
def test_adaptivefl_table_1(spec: SubmodelSpec, params: int, printed_macs: str) -> None:
    family = VGG16(CIFAR, 10)
    assert count_params(family, spec) == params
    assert f"{count_macs(family, spec) / 1e6:.2f}" == printed_macs


@pytest.mark.parametrize(
    ("divisor", "params", "flops"),
    [
        (1, 11_172_170, 557_656_064),
        (2, 2_796_714, 140_416_000),
        (4, 701_018, 35_604_992),
        (8, 176_178, 9_151_744),
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


@pytest.mark.parametrize(
    ("family", "pool", "last_map"),
    [
        (ResNet18(CIFAR, 10, width=0.1), nn.AdaptiveAvgPool2d, (51, 4, 4)),
        (ResNet34(CIFAR, 10, width=0.1), nn.AdaptiveAvgPool2d, (51, 4, 4)),
        (PreResNet18(CIFAR, 10, width=0.1), nn.AdaptiveAvgPool2d, (51, 4, 4)),
        (MobileNetV2(CIFAR, 10, width=0.1), nn.AdaptiveMaxPool2d, (128, 2, 2)),
    ],
    ids=["resnet18", "resnet34", "preresnet18", "mobilenetv2"],
)
def test_the_global_pool_and_the_map_before_it(
    family: ModelFamily, pool: type[nn.Module], last_map: tuple[int, ...]
) -> None:
    seen = []
    with torch.device("meta"):
        module = family.module()
        found = module.get_submodule("pool")
        found.register_forward_hook(lambda _module, inputs, _output: seen.append(tuple(inputs[0].shape[1:])))
        module(torch.empty(2, *CIFAR))
    assert isinstance(found, pool)
    assert seen == [last_map]


def test_vgg16_drops_half_of_both_hidden_layers() -> None:
    modules = VGG16(CIFAR, 10, width=0.01).module().named_modules()
    dropouts = {name: m.p for name, m in modules if isinstance(m, nn.Dropout)}
    assert dropouts == {"fc1.dropout": 0.5, "fc2.dropout": 0.5}


@pytest.mark.parametrize(
    ("options", "macs", "sides"),
    [
        ({}, 333_217_792, (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)),
        ({"pool_after": (3, 5, 8, 11, 13)}, 532_111_360, (32, 32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2)),
    ],
    ids=["AdaptiveFL, Table 1: 333.2 M", "FlexFL's code: 532.1 M"],
)
def test_where_vgg16_pools(options: dict[str, Any], macs: int, sides: tuple[int, ...]) -> None:
    """The same parameters; the side of the map that each convolution is given."""
    family, seen = VGG16(CIFAR, 10, **options), []
    assert (count_params(family), count_macs(family)) == (33_646_666, macs)
    assert family.layout() == VGG16(CIFAR, 10).layout()
    with torch.device("meta"):
        module = family.module()
        for i in range(1, 14):
            module.get_submodule(f"conv{i}").register_forward_hook(lambda _, given, __: seen.append(given[0].shape[-1]))
        module(torch.empty(2, *CIFAR))
    assert tuple(seen) == sides


def test_the_flatten_keeps_its_pixels_together() -> None:
    def repeats(family: ModelFamily) -> int:
        return family.layout().slots["fc1.linear.weight"].axes[1].repeat

    assert repeats(VGG16(CIFAR, 10)) == 1
    assert repeats(VGG16((3, 64, 96), 10)) == 2 * 3
    assert repeats(SmallCNN(DIGITS, 10)) == 2 * 2
    assert repeats(SmallCNN((1, 28, 28), 10)) == 7 * 7


def test_width_multiplies_every_channel_and_keeps_at_least_one() -> None:
    assert VGG16(CIFAR, 10, fc=(64, 32), width=0.125).layout().groups["conv13"] == 64
    assert VGG16(CIFAR, 10, fc=(64, 32), width=0.125).layout().groups["fc2"] == 4
    assert set(SmallCNN(DIGITS, 10, width=1e-6).layout().groups.values()) == {1, 10}
    mobile, resnet = MobileNetV2(CIFAR, 10, width=0.3), ResNet18(CIFAR, 10, width=2)
    assert list(mobile.layout().groups.values()) == [9, 4, 7, 9, 19, 28, 48, 96, 384, 10]
    assert list(resnet.layout().groups.values()) == [128, 192, 256, 512, 1024, 10]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (VGG16, {"input_shape": (1, 28, 28)}, "VGG16 takes images of at least 32x32 pixels, got 28x28"),
        (VGG16, {"input_shape": (3, 32, 31)}, "at least 32x32 pixels, got 32x31"),
        (ResNet18, {"input_shape": DIGITS}, "ResNet18 takes images of at least 9x9 pixels, got 8x8"),
        (ResNet34, {"input_shape": DIGITS}, "ResNet34 takes images of at least 9x9 pixels, got 8x8"),
        (PreResNet18, {"input_shape": DIGITS}, "PreResNet18 takes images of at least 9x9 pixels, got 8x8"),
        (MobileNetV2, {"input_shape": (3, 16, 16)}, "at least 17x17 pixels, got 16x16"),
        (SmallCNN, {"input_shape": (1, 7, 8)}, "SmallCNN takes images of at least 8x8 pixels, got 7x8"),
        (SmallCNN, {"input_shape": (8, 8)}, "a tuple of three positive integers (C, H, W), got (8, 8)"),
        (SmallCNN, {"input_shape": (0, 8, 8)}, "three positive integers (C, H, W), got (0, 8, 8)"),
        (SmallCNN, {"input_shape": [1, 8, 8]}, "a tuple of three positive integers (C, H, W), got [1, 8, 8]"),
        (SmallCNN, {"outputs": 0}, "outputs is an integer of at least 1, got 0"),
        (ResNet34, {"width": 0}, "width multiplies all channels and is a number above 0, got 0"),
        (ResNet34, {"width": float("nan")}, "a number above 0, got nan"),
        (MobileNetV2, {"norm": "group"}, "norm is one of batch, static, got 'group'"),
        (VGG16, {"fc": (4096,)}, "fc is a tuple of two positive integers, got (4096,)"),
        (VGG16, {"fc": [512, 512]}, "fc is a tuple of two positive integers, got [512, 512]"),
        (VGG16, {"pool_after": (2, 4, 7, 10)}, "five convolutions of 1 to 13, ascending, got (2, 4, 7, 10)"),
        (VGG16, {"pool_after": (2, 4, 7, 13, 10)}, "five convolutions of 1 to 13, ascending, got (2, 4, 7, 13, 10)"),
        (VGG16, {"pool_after": (2, 4, 4, 7, 13)}, "five convolutions of 1 to 13, ascending, got (2, 4, 4, 7, 13)"),
        (VGG16, {"pool_after": (2, 4, 7, 10, 14)}, "five convolutions of 1 to 13, ascending, got (2, 4, 7, 10, 14)"),
        (VGG16, {"pool_after": (0, 4, 7, 10, 13)}, "five convolutions of 1 to 13, ascending, got (0, 4, 7, 10, 13)"),
    ],
)
def test_bad_options_say_what_arrived_and_what_was_expected(
    model: Callable[..., ModelFamily], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        model(**({"input_shape": CIFAR, "outputs": 10} | options))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SubmodelSpec.of({}, ["stem", "stage1.0"]), "the sub-model lacks block 'stage2.0'"),
        (SubmodelSpec.of({"stem": 65}), "group 'stem' has 64 channels"),
        (SubmodelSpec.of({"stage5": 6}), "no channel group 'stage5' (did you mean"),
    ],
)
def test_bad_sub_models_are_named(spec: SubmodelSpec, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        ResNet18(CIFAR, 10).module(spec)


@pytest.mark.parametrize("name", sorted(name for name, family in MODELS.items() if hasattr(family, "min_hw")))
def test_the_smallest_image_is_taken_even_alone(name: str) -> None:
    model: Any = MODELS[name]
    side = model.min_hw
    assert count_macs(model((1, side, side), 2)) > 0
    with pytest.raises(ModelError, match=f"at least {side}x{side} pixels"):
        model((1, side, side - 1), 2)
