"""FedAIoT's ResNet18s for sensor maps (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence
of Things, Michigan State University 2023), which follow SenseFi (Yang et al., Patterns 4(3), 2023).

`uthar_resnet18` classifies activities from the amplitude of a Wi-Fi signal (section 2.3.3.2). The network starts with a
7x7 convolution with stride 3 along the packets, a 2x2 max pool and a 10x11 convolution, without padding. For 1x250x90
inputs and 7 classes, the network has 11,182,142 parameters.

`widar_resnet18` classifies gestures from velocity profiles at 22 time steps (section 2.3.3.3). The network starts with
two transposed 7x7 convolutions. For 22x20x20 inputs and 9 classes, the network has 11,185,706 parameters.

`epic_resnet18` classifies kitchen activities from log-mel spectrograms (section 2.3.3.7). For 1x400x128 inputs and 44
classes, the network has 11,241,260 parameters with 128 channels in the stem, as in the authors' code, and 11,192,812
parameters with 64 channels (`stem: 64`), as in the thesis.

The convolutions before the stem have three output channels, bias and ReLU. The other layers form a ResNet18 (He et al.,
CVPR 2016). The 7x7 stem and the following 3x3 max pool have stride 2. Four stages of two basic blocks have 64, 128, 256
and 512 channels and strides 1, 2, 2, 2. Global average pooling and the classifier come last. The 3x3 convolutions have
no bias. The first shortcut of a stage is a 1x1 convolution with norm if the stage changes the stride or the number of
channels. All other shortcuts are identities. A stem with 64 channels shares the group of stage 1, and all shortcuts of
stage 1 are then identities. The networks for UT-HAR and Widar use group norm, their shortcuts have a bias, and the
second 3x3 convolution of a block applies the stride. The network for EPIC-SOUNDS uses batch norm, and the first
convolution of a block applies the stride.

Departs from the authors' code. For UT-HAR, the latest code uses batch norm. The thesis and this network use group norm.
For EPIC-SOUNDS, the code uses He initialisation (normal, fan out). This network uses PyTorch's default initialisation.

Group norm normalises the first and the second half of the channels separately. Therefore channel i of the layout is a
pair: the i-th channel of each half (`Axis.copies`). A sub-model then keeps the same number of channels in each half,
and the width of a group is its number of pairs. Group norm computes the statistics from the kept channels. Therefore a
sub-model's outputs differ from the outputs of the full network with all other channels set to zero.

Groups: down1, down2 or up1, up2; stem (unless stage1 includes the stem), stage1 .. stage4, classes. Blocks: the first
convolutions, stem, stage<s>.<b> (b from 0), classifier. Sub-models can drop the blocks with an identity shortcut. An
early exit may follow each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis
from fl_engine.models.layers import FREE, Inside, LayerMaker, axis_of, noted, noted_norm, scaled
from fl_engine.models.network import ImageNetwork, StagedNetwork
from fl_engine.models.resnet import BasicStages

CHANNELS = {"stage1": 64, "stage2": 128, "stage3": 256, "stage4": 512}
HALVES = 2
"""Number of groups of channels in group norm."""
FRONT = 3
"""Number of channels of the convolutions before the stem, before multiplication by `width`."""
FEWEST_PACKETS, FEWEST_CARRIERS = 64, 28
"""Minimum size of a UT-HAR sample. The 10x11 convolution would not fit into the map of a smaller sample."""


class GroupNorm(nn.GroupNorm):
    """Group norm that accepts groups with a single value, unlike torch's module. The output of a group with a single
    value is the bias."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _ResNet18(BasicStages, StagedNetwork):
    depths = dict.fromkeys(CHANNELS, 2)
    as_sensefi: ClassVar[bool] = True
    """If true, use the group norm, strides and biases of SenseFi's implementation; if false, use batch norm and the
    strides of the original ResNet."""
    front: ClassVar[tuple[str, ...]] = ()
    """Names of the layers before the stem, each with a separate channel group."""

    @property
    def stem_channels(self) -> int:
        return CHANNELS["stage1"]

    def front_layers(self, make: LayerMaker) -> dict[str, nn.Module]:
        return {}

    def groups(self) -> dict[str, int]:
        stem = {} if self.stem_channels == CHANNELS["stage1"] else {"stem": self.stem_channels}
        each = self.axis("stage1").each
        front = {name: scaled(FRONT, self.width) for name in self.front}
        return front | {name: scaled(n // each, self.width) for name, n in (stem | CHANNELS).items()}

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        front, stem = self.front_layers(make), self.axis(self.stem_group)
        before = Axis(self.front[-1]) if self.front else self.input_shape[0]
        return OrderedDict(
            front,
            stem=self.with_norm(make, make.conv(before, stem, 7, 2, bias=False), stem, relu=True),
            stem_pool=nn.MaxPool2d(3, 2, 1),
            **self.stages(make),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=make.linear(self.axis("stage4"), Axis(HEAD)),
        )

    def axis(self, group: str) -> Axis:
        return Axis(group, copies=HALVES if self.as_sensefi else 1)

    def with_norm(self, make: LayerMaker, conv: nn.Module, out: Axis, *, relu: bool = False) -> nn.Sequential:
        if self.as_sensefi:
            norm: nn.Module = noted_norm(GroupNorm(HALVES, make.width(out)), out)
        else:
            norm = make.batch_norm(out, self.norm)
        unit = nn.Sequential(OrderedDict(conv=conv, norm=norm))
        if relu:
            unit.add_module("relu", nn.ReLU())
        return unit


@dataclass(frozen=True)
class UTHARResNet18(_ResNet18):
    """Network that classifies a person's activity from the amplitude of a Wi-Fi signal."""

    input_shape: tuple[int, int, int]
    """Shape (1, packets, subcarriers of all antennas) of a sample."""

    front = ("down1", "down2")
    axes: ClassVar[tuple[str, ...]] = ("channels", "packets", "subcarriers")
    published_input: ClassVar[tuple[int, ...]] = (1, 250, 90)
    published_outputs: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        channels, packets, carriers = self.input_shape
        fits = channels == 1 and packets >= FEWEST_PACKETS and carriers >= FEWEST_CARRIERS
        self.require("input_shape", fits, f"1 x {FEWEST_PACKETS} packets x {FEWEST_CARRIERS} subcarriers or more")

    def front_layers(self, make: LayerMaker) -> dict[str, nn.Module]:
        first, second = map(Axis, self.front)
        return {
            "down1": nn.Sequential(OrderedDict(conv=make.conv(1, first, 7, (3, 1), 0), relu=nn.ReLU())),
            "down_pool": nn.MaxPool2d(2),
            "down2": nn.Sequential(OrderedDict(conv=make.conv(first, second, (10, 11), 1, 0), relu=nn.ReLU())),
        }


@dataclass(frozen=True)
class WidarResNet18(_ResNet18):
    """Network that classifies gestures from velocity profiles at 22 time steps."""

    input_shape: tuple[int, int, int]

    front = ("up1", "up2")
    axes: ClassVar[tuple[str, ...]] = ("moments", "velocities", "velocities")
    published_input: ClassVar[tuple[int, ...]] = (22, 20, 20)
    published_outputs: ClassVar[int] = 9

    def front_layers(self, make: LayerMaker) -> dict[str, nn.Module]:
        layers: dict[str, nn.Module] = {}
        inside: Inside = self.input_shape[0]
        for name in self.front:
            out = Axis(name)
            conv = nn.ConvTranspose2d(make.width(inside), make.width(out), 7)
            axes = (axis_of(inside), out, FREE, FREE)  # (in, out, H, W)
            layers[name] = nn.Sequential(OrderedDict(conv=noted(conv, weight=axes, bias=(out,)), relu=nn.ReLU()))
            inside = out
        return layers


@dataclass(frozen=True)
class EpicResNet18(_ResNet18, ImageNetwork):
    """Network that classifies kitchen activities from log-mel spectrograms of audio."""

    stem: int = 128
    """Number of channels of the stem, before multiplication by `width`."""

    as_sensefi = False
    axes: ClassVar[tuple[str, ...]] = ("channels", "frames", "mel bands")
    published_input: ClassVar[tuple[int, ...]] = (1, 400, 128)
    published_outputs: ClassVar[int] = 44
    min_hw: ClassVar[int] = 33

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("stem")

    @property
    def stem_channels(self) -> int:
        return self.stem
