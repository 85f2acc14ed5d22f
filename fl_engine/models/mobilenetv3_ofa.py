"""MobileNetV3-Large (Howard et al., ICCV 2019) as a once-for-all network (Cai et al., ICLR 2020) in the variant of
CompOFA (Sahni et al., ICLR 2021). FedX uses sub-networks of this network.

The network starts with a 3x3 stem, a block without expansion, and five stages of four inverted residuals. A 1x1
convolution with 960 channels and global average pooling follow. A 1x1 convolution with 1280 channels and no batch norm,
dropout 0.1 and the classifier come last. The kernel size is 3 in the first block and 3, 5, 3, 3, 5 in the stages. The
first block and stages 1 and 2 use ReLU; all other layers use h_swish. Stages 2, 4 and 5 have squeeze-and-excitation.

In each stage, a sub-network has 2 blocks with expansion factor 3, 3 blocks with factor 4, or 4 blocks with factor 6.
`nested` lists these 3^5 = 243 sub-networks. A sub-network is contained in every sub-network that has at least as many
blocks in each stage. For 200 classes, the sub-networks with the same depth and factor in all stages have 2,414,056 /
3,512,816 / 6,387,640 parameters, as in FedX (2.41 / 3.51 / 6.39 million). If running statistics are not counted, the
sub-networks have 2,402,120 / 3,490,640 / 6,345,816 parameters.

Departs from the published network, which was designed for images of 224x224 pixels. For images whose shorter side has
at most 32 pixels, the stem has stride 1 instead of 2, so that the last map has more than one pixel. Weights are
initialised with PyTorch's defaults. FedX starts from weights that were trained on ImageNet.

Groups: stem (shared with the first block), stage1 .. stage5, final, mix, classes. Each block also has a group
stage<s>.<b>.inner for its expanded channels and, with squeeze-and-excitation, a group stage<s>.<b>.squeeze. Blocks:
stem, first, stage<s>.<b> (b from 0), final, mix, classifier. Sub-models can drop all blocks of a stage except the first
block. An early exit can follow each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.costs import count_params
from fl_engine.core.types import HEAD, Axis, SubmodelSpec
from fl_engine.models.layers import LayerMaker, Norm, Residual
from fl_engine.models.network import ImageNetwork, StagedNetwork


class OfaStage(NamedTuple):
    channels: int
    kernel: int
    stride: int
    swish: bool
    """True if the activation is h_swish, False if it is ReLU."""
    squeeze: bool
    """True if the blocks have squeeze-and-excitation."""


class Choice(NamedTuple):
    depth: int
    """Number of blocks that a sub-network keeps in a stage."""
    expand: int
    """Expansion factor of the kept blocks."""

    def __str__(self) -> str:
        return f"d{self.depth}w{self.expand}"


STEM, FINAL, MIX = 16, 960, 1280
DROPOUT = 0.1
STAGES = {
    "stage1": OfaStage(24, 3, 2, swish=False, squeeze=False),
    "stage2": OfaStage(40, 5, 2, swish=False, squeeze=True),
    "stage3": OfaStage(80, 3, 2, swish=True, squeeze=False),
    "stage4": OfaStage(112, 3, 1, swish=True, squeeze=True),
    "stage5": OfaStage(160, 5, 2, swish=True, squeeze=True),
}
CHOICES = {"small": Choice(2, 3), "medium": Choice(3, 4), "large": Choice(4, 6)}
LARGEST = CHOICES["large"]
TINY_IMAGE = 32
"""Maximum length of an image's shorter side, in pixels, for which the stem has stride 1."""


def divisible(channels: float) -> int:
    """Round `channels` to a multiple of 8 that is at least 8 and at most 10 % below `channels`, as in OFA's code."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _inside(name: str, stage: str, expanded: int) -> dict[str, int]:
    """Map the channel groups of a block to sizes. `expanded` is the product of input channels and expansion factor."""
    inner = divisible(expanded)
    return {f"{name}.inner": inner} | ({f"{name}.squeeze": divisible(inner // 4)} if STAGES[stage].squeeze else {})


class ChannelScale(nn.Module):
    """Multiply a map (B, C, H, W) by factors (B, C, 1, 1)."""

    def forward(self, x_bchw: Tensor, by_bc11: Tensor) -> Tensor:
        return x_bchw * by_bc11

    def in_lanes(self) -> nn.Module:
        return _ScaleInLanes()


class _ScaleInLanes(nn.Module):
    def forward(self, x_bchw: Tensor, by_bc11: Tensor) -> Tensor:
        # Do not broadcast, because the gradient's order of additions would depend on the number of stacked clients.
        return x_bchw * F.interpolate(by_bc11, x_bchw.shape[2:])


class SqueezeExcite(nn.Module):
    """Scale each channel of a map (B, channels, H, W) by a factor that depends on the means of all channels."""

    def __init__(self, make: LayerMaker, channels: Axis, inside: Axis) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = make.conv(channels, inside, 1)
        self.relu = nn.ReLU()
        self.excite = make.conv(inside, channels, 1)
        self.gate = nn.Hardsigmoid()
        self.scale = ChannelScale()

    def forward(self, x_bchw: Tensor) -> Tensor:
        out: Tensor = self.scale(x_bchw, self.gate(self.excite(self.relu(self.squeeze(self.pool(x_bchw))))))
        return out


def _active(unit: nn.Sequential, swish: bool) -> nn.Sequential:
    unit.add_module("act", nn.Hardswish() if swish else nn.ReLU())
    return unit


@dataclass(frozen=True)
class MobileNetV3OFA(StagedNetwork, ImageNetwork):
    norm: Norm = "static"
    """batch: normalise with the statistics of the current batch; static: with stored statistics."""

    depths = dict.fromkeys(STAGES, LARGEST.depth)
    min_hw: ClassVar[int] = 17

    def groups(self) -> dict[str, int]:
        """Map each group to its number of channels, which is a multiple of 8."""
        groups = {"stem": divisible(STEM * self.width)}
        for name, inside, stage in self.blocks():
            groups |= _inside(name, stage, groups[inside] * LARGEST.expand)
            groups.setdefault(stage, divisible(STAGES[stage].channels * self.width))
        return groups | {"final": divisible(FINAL * self.width), "mix": divisible(MIX * self.width)}

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        stem, final, mix, norm = Axis("stem"), Axis("final"), Axis("mix"), self.norm
        stride = 1 if min(self.input_shape[1:]) <= TINY_IMAGE else 2
        return OrderedDict(
            stem=_active(make.conv_bn(self.input_shape[0], stem, 3, norm, stride=stride, bias=False), swish=True),
            first=Residual(
                OrderedDict(
                    depthwise=_active(make.with_norm(make.depthwise(stem, 3, bias=False), stem, norm), swish=False),
                    project=make.conv_bn(stem, stem, 1, norm, bias=False),
                )
            ),
            **self.stages(make),
            final=_active(make.conv_bn(Axis("stage5"), final, 1, norm, bias=False), swish=True),
            pool=nn.AdaptiveAvgPool2d(1),
            mix=nn.Sequential(OrderedDict(conv=make.conv(final, mix, 1, bias=False), act=nn.Hardswish())),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(DROPOUT),
            classifier=make.linear(mix, Axis(HEAD)),
        )

    def block(self, make: LayerMaker, name: str, inside: str, stage: str) -> nn.Module:
        (_, kernel, stride, swish, squeeze), identity = STAGES[stage], inside == stage
        inner, norm = Axis(f"{name}.inner"), self.norm
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["expand"] = _active(make.conv_bn(Axis(inside), inner, 1, norm, bias=False), swish)
        depthwise = make.depthwise(inner, kernel, 1 if identity else stride, bias=False)
        parts["depthwise"] = _active(make.with_norm(depthwise, inner, norm), swish)
        if squeeze:
            parts["se"] = SqueezeExcite(make, inner, Axis(f"{name}.squeeze"))
        parts["project"] = make.conv_bn(inner, Axis(stage), 1, norm, bias=False)
        return Residual(parts) if identity else nn.Sequential(parts)

    def nested(self) -> Mapping[str, SubmodelSpec]:
        """Map names to the 243 sub-networks, in ascending order of the number of parameters. A name, such as
        d2w3-d2w3-d4w6-d3w4-d2w3, lists the depth and the expansion factor of each stage. The three sub-networks with
        the same depth and factor in all stages are named `small`, `medium` and `large`."""
        return dict(_nested(self))

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        layers: dict[str, tuple[str, ...]] = {"stem": ("stem.", "first.")}
        for name, _, stage in self.blocks():
            layers[f"{name}.inner"] = (f"{name}.expand.", f"{name}.depthwise.")
            if STAGES[stage].squeeze:
                layers[f"{name}.squeeze"] = (f"{name}.se.",)
            layers.setdefault(stage, tuple(f"{stage}.{b}.project." for b in range(LARGEST.depth)))
        return layers | {"final": ("final.",), "mix": ("mix.",)}

    def _spec(self, choices: Mapping[str, Choice]) -> SubmodelSpec:
        """Return the sub-network with the depths and expansion factors in `choices`. The groups of dropped blocks also
        use the stage's expansion factor. Therefore a sub-network contains all sub-networks with smaller or equal
        depths."""
        layout, keep = self.layout(), dict[str, int]()
        dropped = [f"{name}.{b}" for name in STAGES for b in range(choices[name].depth, LARGEST.depth)]
        for name, inside, stage in self.blocks():
            keep |= _inside(name, stage, layout.groups[inside] * choices[stage].expand)
        narrower = {group: n for group, n in keep.items() if n < layout.groups[group]}
        return SubmodelSpec.of(narrower, [b for b in layout.blocks if b not in dropped] if dropped else None)


@lru_cache(maxsize=16)
def _nested(family: MobileNetV3OFA) -> tuple[tuple[str, SubmodelSpec], ...]:
    """Return the sub-networks. The result is cached, because sorting by size takes half a second."""
    uniform = {(choice,) * len(STAGES): name for name, choice in CHOICES.items()}
    found = {
        uniform.get(choices, "-".join(map(str, choices))): family._spec(dict(zip(STAGES, choices, strict=True)))
        for choices in product(CHOICES.values(), repeat=len(STAGES))
    }
    return tuple(sorted(found.items(), key=lambda item: (count_params(family, item[1]), item[0])))
