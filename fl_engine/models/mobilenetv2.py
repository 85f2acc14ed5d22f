"""MobileNetV2 (Sandler et al., CVPR 2018) for small images, as in FlexFL and AdaptiveFL.

The network has a 3x3 stem with stride 1, seven stages of inverted residuals, a 1x1 head, a global *max* pool, and a 1x1
convolution as the classifier. Convolutions have a bias and batch norm; activations are ReLU6. Each block expands the
input channels by a factor t with a 1x1 convolution, even in stage 1, where t is 1. The hidden channels belong to the
channel group of the block's input: input channel c corresponds to the hidden channels t*c .. t*c + t - 1. For 3x32x32
images and 10 / 100 / 200 classes, the network has 2,254,858 / 2,370,148 / 2,498,248 parameters.

The stages have the original strides 1, 2, 2, 2, 1, 2, 1, as in AdaptiveFL's published code. FlexFL's paper does not
specify strides. For a 32x32 image, the last map has 2x2 pixels.

Departs from the authors' code, which adds a shortcut to a sub-model's block if input and output happen to have equal
widths. Here sub-models have the same shortcuts as the full network, in all blocks of a stage except the first.

Groups: stem, stage1 .. stage7, head, classes. Blocks: stem, stage<s>.<b> (b from 0), head, classifier. Sub-models may
drop the blocks with a shortcut (b >= 1). An early exit can follow each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import nn

from fl_engine.core.types import HEAD, Axis
from fl_engine.models.layers import LayerMaker, Residual
from fl_engine.models.network import ImageNetwork, StagedNetwork


class MobileNetV2Stage(NamedTuple):
    t: int
    """Factor by which a block expands the number of input channels."""
    channels: int
    depth: int
    stride: int


STEM, LAST = 32, 1280
STAGES = {
    "stage1": MobileNetV2Stage(1, 16, 1, 1),
    "stage2": MobileNetV2Stage(6, 24, 2, 2),
    "stage3": MobileNetV2Stage(6, 32, 3, 2),
    "stage4": MobileNetV2Stage(6, 64, 4, 2),
    "stage5": MobileNetV2Stage(6, 96, 3, 1),
    "stage6": MobileNetV2Stage(6, 160, 3, 2),
    "stage7": MobileNetV2Stage(6, 320, 1, 1),
}


class MobileNetV2(StagedNetwork, ImageNetwork):
    depths: ClassVar[Mapping[str, int]] = {name: stage.depth for name, stage in STAGES.items()}
    channels_of = {"stem": STEM} | {name: stage.channels for name, stage in STAGES.items()} | {"head": LAST}
    min_hw: ClassVar[int] = 17

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        head = Axis("head")
        return OrderedDict(
            stem=make.conv_bn(self.input_shape[0], Axis("stem"), 3, self.norm, relu=nn.ReLU6()),
            **self.stages(make),
            head=make.conv_bn(Axis("stage7"), head, 1, self.norm, relu=nn.ReLU6()),
            pool=nn.AdaptiveMaxPool2d(1),
            classifier=make.conv(head, Axis(HEAD), 1),
            flatten=nn.Flatten(),
        )

    def block(self, make: LayerMaker, name: str, inside: str, stage: str) -> nn.Module:
        """Return a block that maps (B, inside, H, W) to (B, stage, ceil(H / stride), ceil(W / stride)). Blocks with a
        shortcut have stride 1."""
        (t, _, _, stride), identity, norm = STAGES[stage], inside == stage, self.norm
        hidden = Axis(inside, repeat=t, choice=f"{name}.hidden")
        expand = make.conv_bn(Axis(inside), hidden, 1, norm, relu=nn.ReLU6())
        depthwise = make.with_norm(make.depthwise(hidden, 3, 1 if identity else stride), hidden, norm, nn.ReLU6())
        project = make.conv_bn(hidden, Axis(stage), 1, norm)
        parts: OrderedDict[str, nn.Module] = OrderedDict(expand=expand, depthwise=depthwise, project=project)
        return Residual(parts) if identity else nn.Sequential(parts)
