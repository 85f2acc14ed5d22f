"""MobileNetV2 (Sandler et al., CVPR 2018) for small images, as FlexFL and AdaptiveFL use it.

A 3x3 stem of stride 1, seven stages of inverted residuals, a 1x1 head, a global *max* pool, and a 1x1 convolution as
the classifier. Convolutions have a bias and batch norm; activations are ReLU6. A block expands its input t times (in
stage 1, where t = 1, the expanding convolution is there too), so its hidden channels belong to the input's group:
channel c of the input owns the hidden channels t*c .. t*c + t - 1. At 3x32x32 and 10 / 100 / 200 classes: 2,254,858 /
2,370,148 / 2,498,248 parameters.

The stages have the original strides, 1, 2, 2, 2, 1, 2, 1, as in AdaptiveFL's published code (FlexFL's text gives none),
so 32x32 pixels become 2x2.

Departs from the authors' code, which adds a shortcut if a sub-model happens to have equal widths on both sides of a
block. Here, as in the full network, all blocks of a stage but the first have a shortcut.

Groups: stem, stage1 .. stage7, head, classes. Blocks: stem, stage<s>.<b> (b from 0), head, classifier. The
blocks with a shortcut, b >= 1, can be dropped. An early exit may sit behind each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, Norm, conv_bn, conv_bn_slots, conv_slots, scaled
from fl_engine.models.network import ImageNetwork


class Stage(NamedTuple):
    t: int
    """The factor by which a block expands its input's channels."""
    channels: int
    depth: int
    stride: int


STEM, LAST = 32, 1280
STAGES = {
    "stage1": Stage(1, 16, 1, 1),
    "stage2": Stage(6, 24, 2, 2),
    "stage3": Stage(6, 32, 3, 2),
    "stage4": Stage(6, 64, 4, 2),
    "stage5": Stage(6, 96, 3, 1),
    "stage6": Stage(6, 160, 3, 2),
    "stage7": Stage(6, 320, 1, 1),
}


class InvertedResidual(nn.Module):
    def __init__(self, c_in: int, c_out: int, t: int, stride: int, norm: Norm, identity: bool) -> None:
        super().__init__()
        hidden = t * c_in
        self.expand = conv_bn(c_in, hidden, 1, norm, relu=nn.ReLU6())
        self.depthwise = conv_bn(hidden, hidden, 3, norm, stride=stride, groups=hidden, relu=nn.ReLU6())
        self.project = conv_bn(hidden, c_out, 1, norm)
        self.identity = identity

    def forward(self, x_bchw: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(x_bchw)))
        return x_bchw + out if self.identity else out


def _block_slots(name: str, inside: str, out: str, t: int, norm: Norm) -> dict[str, Slot]:
    hidden = Axis(inside, repeat=t, choice=f"{name}.hidden")
    slots = conv_bn_slots(f"{name}.expand", name, Axis(inside), hidden, norm)
    slots |= conv_bn_slots(f"{name}.depthwise", name, FREE, hidden, norm)
    slots |= conv_bn_slots(f"{name}.project", name, hidden, Axis(out), norm)
    return slots


class MobileNetV2(ImageNetwork):
    min_hw: ClassVar[int] = 17
    """In smaller images the last map is a single pixel, so the variance of one image is not defined."""

    def groups(self) -> dict[str, int]:
        channels = {"stem": STEM} | {name: stage.channels for name, stage in STAGES.items()} | {"head": LAST}
        return {name: scaled(n, self.width) for name, n in channels.items()}

    def slots(self) -> dict[str, Slot]:
        slots = conv_bn_slots("stem", "stem", FREE, Axis("stem"), self.norm)
        inside = "stem"
        for name, stage in STAGES.items():
            for b in range(stage.depth):
                slots |= _block_slots(f"{name}.{b}", inside, name, stage.t, self.norm)
                inside = name
        slots |= conv_bn_slots("head", "head", Axis(inside), Axis("head"), self.norm)
        return slots | conv_slots("classifier", "classifier", Axis("head"), Axis(HEAD))

    def skippable(self) -> list[str]:
        return [f"{name}.{b}" for name, stage in STAGES.items() for b in range(1, stage.depth)]

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        c_in = layout.width(spec, "stem")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = conv_bn(self.input_shape[0], c_in, 3, self.norm, relu=nn.ReLU6())
        for name, (t, _, depth, stride) in STAGES.items():
            c_out = layout.width(spec, name)
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            blocks["0"] = InvertedResidual(c_in, c_out, t, stride, self.norm, identity=False)
            for b in range(1, depth):
                if layout.has_block(spec, f"{name}.{b}"):
                    blocks[str(b)] = InvertedResidual(c_out, c_out, t, 1, self.norm, identity=True)
            layers[name] = nn.Sequential(blocks)
            c_in = c_out
        head = layout.width(spec, "head")
        layers["head"] = conv_bn(c_in, head, 1, self.norm, relu=nn.ReLU6())
        layers["pool"] = nn.AdaptiveMaxPool2d(1)
        layers["classifier"] = nn.Conv2d(head, layout.width(spec, HEAD), 1)
        layers["flatten"] = nn.Flatten()
        return layers

    def exit_points(self) -> tuple[str, ...]:
        return tuple(f"{name}.{b}" for name, stage in STAGES.items() for b in range(stage.depth))

    def prunable(self) -> tuple[Prunable, ...]:
        layers = [Prunable("stem", ("stem.",), ("stem.relu",))]
        for name, stage in STAGES.items():
            units = [f"{name}.{b}.{unit}" for b in range(stage.depth) for unit in ("expand", "depthwise")]
            layers.append(Prunable(name, (f"{name}.",), tuple(f"{unit}.relu" for unit in units)))
        return (*layers, Prunable("head", ("head.",), ("head.relu",)))
