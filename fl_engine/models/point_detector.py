"""A small anchor-free detector for small objects: boxes and categories at every fourth pixel.

It follows FCOS (Tian et al., ICCV 2019), which predicts a box and categories at each point of a map, on a residual
network (He et al., CVPR 2016) with a feature pyramid (Lin et al., CVPR 2017). Departs from them: only the finest map of
the pyramid is used, because in a drone's picture of 224 x 224 half of all objects are narrower than 4 pixels; boxes and
categories share one tower; there is no centre-ness; and it has 3 million parameters, like the smallest published
detectors.

A 3x3 stem of stride 2; four stages of basic blocks with 48, 96, 192 and 256 channels and stride 2 each (the last one
with a single block); 1x1 convolutions bring the stages' maps to the same number of channels, and the maps are added
from the coarsest to the finest, each enlarged to the size of the next; two 3x3 convolutions, and a 1x1 convolution to
the outputs. At 3x224x224 and 16 outputs (12 categories): 2,817,872 parameters.

Groups: stem, stage1 .. stage4, pyramid, tower, and the outputs. Blocks: stem, stage<s>.<b> (b from 0), pyramid, tower,
output. The stages' blocks with an identity shortcut, b >= 1, can be dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, Norm, conv_bn, conv_bn_slots, conv_slots, scaled
from fl_engine.models.network import Network, check_image, check_norm
from fl_engine.models.resnet import BasicBlock, block_slots

CHANNELS = {"stem": 32, "stage1": 48, "stage2": 96, "stage3": 192, "stage4": 256, "pyramid": 64, "tower": 96}
DEPTHS = {"stage1": 2, "stage2": 2, "stage3": 2, "stage4": 1}
"""Blocks per stage."""


@dataclass(frozen=True)
class PointDetector(Network):
    """Each point has four outputs for the box and one for each category."""

    input_shape: tuple[int, int, int]
    norm: Norm = "batch"
    """batch: the statistics of the current batch; static: stored ones."""

    published_input: ClassVar[tuple[int, ...]] = (3, 224, 224)
    published_outputs: ClassVar[int] = 16
    min_hw: ClassVar[int] = 33
    """In smaller images the coarsest map is a single pixel, so the variance of one image is not defined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self, self.norm)
        check_image(self, self.input_shape, self.min_hw)

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in CHANNELS.items()}

    def slots(self) -> dict[str, Slot]:
        inside = Axis("stem")
        slots = conv_bn_slots("stem", "stem", FREE, inside, self.norm, bias=False)
        for stage, depth in DEPTHS.items():
            out = Axis(stage)
            for b in range(depth):
                slots |= block_slots(f"{stage}.{b}", inside, out, self.norm, project=b == 0)
                inside = out
        pyramid, tower = Axis("pyramid"), Axis("tower")
        for stage in DEPTHS:
            slots |= conv_bn_slots(f"lateral.{stage}", "pyramid", Axis(stage), pyramid, self.norm, bias=False)
        slots |= conv_bn_slots("merged", "tower", pyramid, tower, self.norm, bias=False)
        slots |= conv_bn_slots("tower", "tower", tower, tower, self.norm, bias=False)
        return slots | conv_slots("output", "output", tower, Axis(HEAD))

    def skippable(self) -> list[str]:
        return [f"{stage}.{b}" for stage, depth in DEPTHS.items() for b in range(1, depth)]

    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        """(B, C, H, W) -> (B, kept outputs, H / 4, W / 4), rounded up."""
        return _Detector(self, layout, spec)

    def prunable(self) -> tuple[Prunable, ...]:
        layers = [Prunable("stem", ("stem.",), ("stem.relu",))]
        for stage, depth in DEPTHS.items():
            relus = [f"{stage}.{b}.{relu}" for b in range(depth) for relu in ("conv1.relu", "relu")]
            layers.append(Prunable(stage, (f"{stage}.",), tuple(relus)))
        layers.append(Prunable("pyramid", ("lateral.",), ()))
        layers.append(Prunable("tower", ("merged.", "tower."), ("merged.relu", "tower.relu")))
        return tuple(layers)


class _Detector(nn.Module):
    def __init__(self, family: PointDetector, layout: ParamLayout, spec: SubmodelSpec) -> None:
        super().__init__()
        norm = family.norm
        c_in = layout.width(spec, "stem")
        self.stem = conv_bn(family.input_shape[0], c_in, 3, norm, stride=2, bias=False, relu=nn.ReLU())
        for stage, depth in DEPTHS.items():
            c_out = layout.width(spec, stage)
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            blocks["0"] = BasicBlock(c_in, c_out, 2, norm, project=True)
            for b in range(1, depth):
                if layout.has_block(spec, f"{stage}.{b}"):
                    blocks[str(b)] = BasicBlock(c_out, c_out, 1, norm, project=False)
            self.add_module(stage, nn.Sequential(blocks))
            c_in = c_out
        pyramid, tower = layout.width(spec, "pyramid"), layout.width(spec, "tower")
        laterals = {stage: conv_bn(layout.width(spec, stage), pyramid, 1, norm, bias=False) for stage in DEPTHS}
        self.lateral = nn.ModuleDict(laterals)
        self.merged = conv_bn(pyramid, tower, 3, norm, bias=False, relu=nn.ReLU())
        self.tower = conv_bn(tower, tower, 3, norm, bias=False, relu=nn.ReLU())
        self.output = nn.Conv2d(tower, layout.width(spec, HEAD), 1)

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
