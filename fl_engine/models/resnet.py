"""ResNet18 and ResNet34 (He et al., CVPR 2016) for small images, as in FlexFL and AdaptiveFL.

The networks have a 3x3 stem with stride 1 and 64 channels, without a max pool. Four stages of basic blocks follow, with
96, 128, 256 and 512 channels and strides 1, 2, 2, 2. Global average pooling and the classifier come last. Convolutions
have no bias. Each stage changes the number of channels, so the first block of every stage has a projection shortcut (a
1x1 convolution with batch norm). All other shortcuts are identities, so all blocks of a stage share one channel group.
For 3x32x32 images and 10 / 100 / 200 classes, ResNet34 has 21,578,634 / 21,624,804 / 21,676,104 parameters.

He et al. set `channels` to [64, 128, 256, 512]. With the original channels, the stem and stage 1 share one group, and
all shortcuts of stage 1 are identities. For 3x32x32 images and 10 classes, this ResNet34 has 21,282,122 parameters.

Departs from the authors' code, which omits a projection shortcut in a sub-model if the stage's input and output happen
to have equal widths. Here sub-models have all projection shortcuts, so each update fits into the full network.

Groups: stem (unless stage1 includes the stem), stage1 .. stage4, classes. Blocks: stem, stage<s>.<b> (b from 0),
classifier. Sub-models can drop the blocks with an identity shortcut (b >= 1). An early exit can follow each block of a
stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis
from fl_engine.models.layers import LayerMaker, Norm, scaled
from fl_engine.models.network import LARGEST, ImageNetwork, StagedNetwork, Stages, are_sizes

STEM = 64
STRIDES = {"stage1": 1, "stage2": 2, "stage3": 2, "stage4": 2}


class BasicBlock(nn.Module):
    def __init__(self, conv1: nn.Module, conv2: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut or nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x_bchw: Tensor) -> Tensor:
        out: Tensor = self.relu(self.conv2(self.conv1(x_bchw)) + self.shortcut(x_bchw))
        return out


class BasicStages(Stages):
    """Network with a stem and stages of basic blocks. The stem may share the channel group of stage 1."""

    norm: Norm
    strides: ClassVar[Mapping[str, int]] = STRIDES
    """Stride of the first block in each stage. A first block without a projection shortcut has stride 1."""
    as_sensefi: ClassVar[bool] = False
    """If true, blocks are as in SenseFi: the second 3x3 convolution applies the stride, and projections have a bias."""

    @property
    def stem_group(self) -> str:
        return "stem" if "stem" in self.groups() else "stage1"

    def with_norm(self, make: LayerMaker, conv: nn.Module, out: Axis, *, relu: bool = False) -> nn.Sequential:
        """Return a sequence of the convolution, the network's norm and, optionally, ReLU."""
        return make.with_norm(conv, out, self.norm, nn.ReLU() if relu else None)

    def block(self, make: LayerMaker, name: str, inside: str, stage: str) -> nn.Module:
        """Return a block that maps (B, inside, H, W) to (B, stage, ceil(H / stride), ceil(W / stride)). If `inside` and
        `stage` are the same group, the shortcut is an identity and the stride is 1."""
        before, out = self.axis(inside), self.axis(stage)
        inner = replace(out, choice=f"{name}.inner")
        project = inside != stage
        stride = self.strides[stage] if project else 1
        first, second = (1, stride) if self.as_sensefi else (stride, 1)
        return BasicBlock(
            self.with_norm(make, make.conv(before, inner, 3, first, bias=False), inner, relu=True),
            self.with_norm(make, make.conv(inner, out, 3, second, bias=False), out),
            self.with_norm(make, make.conv(before, out, 1, stride, bias=self.as_sensefi), out) if project else None,
        )

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        found = super().layers_of_groups()
        return found if "stem" in found else found | {"stage1": ("stem.", "stage1.")}


@dataclass(frozen=True)
class _ResNet(BasicStages, StagedNetwork, ImageNetwork):
    channels: tuple[int, int, int, int] = (96, 128, 256, 512)
    """Channels of each stage, before multiplication by `width`; 64, 128, 256, 512 in the paper of He et al."""

    min_hw: ClassVar[int] = 9

    def __post_init__(self) -> None:
        self.require("channels", are_sizes(self.channels, 4), f"four integers from 1 to {LARGEST}")
        super().__post_init__()

    def groups(self) -> dict[str, int]:
        stem = {} if self.channels[0] == STEM else {"stem": STEM}
        sizes = stem | dict(zip(STRIDES, self.channels, strict=True))
        return {name: scaled(n, self.width) for name, n in sizes.items()}

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        stem = Axis(self.stem_group)
        return OrderedDict(
            stem=make.conv_bn(self.input_shape[0], stem, 3, self.norm, bias=False, relu=nn.ReLU()),
            **self.stages(make),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=make.linear(Axis("stage4"), Axis(HEAD)),
        )


class ResNet18(_ResNet):
    depths = dict.fromkeys(STRIDES, 2)


class ResNet34(_ResNet):
    depths: ClassVar[Mapping[str, int]] = dict(zip(STRIDES, (3, 4, 6, 3), strict=True))


PRERESNET = {"stage1": 64, "stage2": 128, "stage3": 256, "stage4": 512}


def _norm_relu(make: LayerMaker, channels: Axis, norm: Norm) -> nn.Sequential:
    return nn.Sequential(OrderedDict(bn=make.batch_norm(channels, norm), relu=nn.ReLU()))


class PreActBlock(nn.Module):
    """Pre-activation block that maps (B, c_in, H, W) to (B, c_out, ceil(H / stride), ceil(W / stride))."""

    def __init__(self, make: LayerMaker, name: str, inside: str, stage: str, norm: Norm) -> None:
        super().__init__()
        before, out = Axis(inside), Axis(stage)
        inner = replace(out, choice=f"{name}.inner")
        project = inside != stage
        stride = STRIDES[stage] if project else 1
        self.norm1 = _norm_relu(make, before, norm)
        self.conv1 = make.conv(before, inner, 3, stride, bias=False)
        self.norm2 = _norm_relu(make, inner, norm)
        self.conv2 = make.conv(inner, out, 3, bias=False)
        self.shortcut = make.conv(before, out, 1, stride, bias=False) if project else None

    def forward(self, x_bchw: Tensor) -> Tensor:
        out = self.norm1(x_bchw)
        shortcut = x_bchw if self.shortcut is None else self.shortcut(out)
        total: Tensor = self.conv2(self.norm2(self.conv1(out))) + shortcut
        return total


class PreResNet18(BasicStages, StagedNetwork, ImageNetwork):
    """Pre-activation ResNet18 (He et al., ECCV 2016) for small images, as in HeteroFL (Diao et al., ICLR 2021) and
    FedRolex (Alam et al., NeurIPS 2022).

    The network has a 3x3 convolution with stride 1 as the stem, and four stages of two blocks with 64, 128, 256 and 512
    channels and strides 1, 2, 2, 2. A last batch norm with ReLU, global average pooling and the classifier follow.
    Convolutions have no bias, and shortcuts have no norm. A block first computes out = relu(norm1(x)). The block then
    adds conv2(relu(norm2(conv1(out)))) to x, or to a 1x1 convolution of `out` if the number of channels changes. The
    stem and stage 1 share one channel group. For 3x32x32 images and 10 classes, the network has 11,172,170 parameters
    (FedRolex, Table 3.6).

    Departs from the authors' code, in which the network contains a scaler after each convolution. Here local training
    applies the scaler, so the network does not contain one.

    Groups: stage1 .. stage4, classes. Blocks: stem, stage<s>.<b> (b from 0), norm, classifier. Sub-models can drop
    stage1.0 and the blocks with b = 1, which have an identity shortcut. An early exit can follow each block of a stage.
    The inputs of early exits are not normalised.
    """

    depths = dict.fromkeys(PRERESNET, 2)
    channels_of = PRERESNET
    min_hw: ClassVar[int] = 9

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        last = Axis("stage4")
        return OrderedDict(
            stem=make.conv(self.input_shape[0], Axis("stage1"), 3, bias=False),
            **self.stages(make),
            norm=_norm_relu(make, last, self.norm),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=make.linear(last, Axis(HEAD)),
        )

    def block(self, make: LayerMaker, name: str, inside: str, stage: str) -> nn.Module:
        return PreActBlock(make, name, inside, stage, self.norm)

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        return super().layers_of_groups() | {"stage4": ("stage4.", "norm.")}
