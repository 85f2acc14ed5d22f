"""Small anchor-free detector for small objects, which predicts boxes and categories at every fourth pixel.

The detector follows FCOS (Tian et al., ICCV 2019), which predicts a box and categories at each point of a feature map.
The map is computed by a residual network (He et al., CVPR 2016) with a feature pyramid (Lin et al., CVPR 2017). Departs
from these papers. The network uses only the finest map of the pyramid, because half of the objects in a drone's 224 x
224 image are narrower than 4 pixels. Boxes and categories share one tower, and centre-ness is omitted. The network has
3 million parameters, like the smallest published detectors.

The network has a 3x3 stem with stride 2 and four stages of basic blocks with 48, 96, 192 and 256 channels, each with
stride 2. The first three stages have two blocks each, and the last stage has one block. The maps of all stages are
reduced to the same number of channels by 1x1 convolutions. Starting with the coarsest map, each map is enlarged to the
size of the next finer map and added to this map. Two 3x3 convolutions follow, and then a 1x1 convolution computes the
outputs. For 3x224x224 images and 16 outputs (12 categories), the network has 2,817,872 parameters.

Groups: stem, stage1 .. stage4, pyramid, tower, and the outputs. Blocks: stem, stage<s>.<b> (b from 0), pyramid, tower,
output. Sub-models can drop the blocks with an identity shortcut (b >= 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis
from fl_engine.models.layers import LayerMaker, Norm
from fl_engine.models.resnet import BasicStages

CHANNELS = {"stem": 32, "stage1": 48, "stage2": 96, "stage3": 192, "stage4": 256, "pyramid": 64, "tower": 96}
DEPTHS = {"stage1": 2, "stage2": 2, "stage3": 2, "stage4": 1}


@dataclass(frozen=True)
class PointDetector(BasicStages):
    """Detector of small objects. Every point has four outputs for the box and one output for each category."""

    input_shape: tuple[int, int, int]
    norm: Norm = "batch"
    """batch: normalise with the statistics of the current batch; static: with stored statistics."""

    published_input: ClassVar[tuple[int, ...]] = (3, 224, 224)
    published_outputs: ClassVar[int] = 16
    channels_of = CHANNELS
    depths = DEPTHS
    strides = dict.fromkeys(DEPTHS, 2)
    min_hw: ClassVar[int] = 33
    """Minimum height and width of an image. For smaller images, the coarsest map is one pixel, which has no
    variance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_norm()
        self.check_image(self.min_hw)

    def block_of(self, name: str) -> str:
        block = super().block_of(name)
        return {"lateral": "pyramid", "merged": "tower"}.get(block, block)

    def build(self, make: LayerMaker) -> nn.Module:
        """Return a sub-model that maps (B, C, H, W) to (B, kept outputs, ceil(H / 4), ceil(W / 4))."""
        return _Detector(self, make)

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        return super().layers_of_groups() | {"pyramid": ("lateral.",), "tower": ("merged.", "tower.")}


class _Detector(nn.Module):
    def __init__(self, family: PointDetector, make: LayerMaker) -> None:
        super().__init__()
        norm, pyramid, tower = family.norm, Axis("pyramid"), Axis("tower")
        self.stem = make.conv_bn(family.input_shape[0], Axis("stem"), 3, norm, stride=2, bias=False, relu=nn.ReLU())
        for stage, blocks in family.stages(make).items():
            self.add_module(stage, blocks)
        laterals = {stage: make.conv_bn(Axis(stage), pyramid, 1, norm, bias=False) for stage in DEPTHS}
        self.lateral = nn.ModuleDict(laterals)
        self.merged = make.conv_bn(pyramid, tower, 3, norm, bias=False, relu=nn.ReLU())
        self.tower = make.conv_bn(tower, tower, 3, norm, bias=False, relu=nn.ReLU())
        self.output = make.conv(tower, Axis(HEAD), 1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        x, maps = self.stem(x_bchw), list[Tensor]()
        for stage in DEPTHS:
            x = self.get_submodule(stage)(x)
            maps.append(self.lateral[stage](x))
        found = maps.pop()
        while maps:
            finer = maps.pop()
            found = finer + F.interpolate(found, size=finer.shape[2:], mode="nearest")
        out: Tensor = self.output(self.tower(self.merged(found)))
        return out
