"""Counts that the papers print or that their published networks have, to the last parameter.

Nothing is allocated: all of it follows from shapes.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("model", [VGG16, ResNet34, PreResNet18, MobileNetV2])
def test_static_norm_adds_two_statistics_per_channel(model: Any) -> None:
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
    with pytest.raises(ModelError, match=f"at least {side}x{side} pixels"):
        model((1, side, side - 1), 2)
