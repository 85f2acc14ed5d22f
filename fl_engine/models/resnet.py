"""ResNet18 and ResNet34 (He et al., CVPR 2016) for small images, as FlexFL and AdaptiveFL use them.

A 3x3 stem of stride 1 with 64 channels and no max pool; four stages of basic blocks with 96, 128, 256 and 512
channels, of stride 1, 2, 2, 2; global average pool; classifier. Convolutions have no bias. Since each stage
changes the width, the first block of every stage has a projection shortcut (1x1 convolution + batch norm); all other
shortcuts are identities, which tie a whole stage to one channel group.
ResNet34 at 3x32x32 and 10 / 100 / 200 classes: 21,578,634 / 21,624,804 / 21,676,104 parameters.

`channels: [64, 128, 256, 512]` are those of He et al. The first stage then is as wide as the stem, so its first
shortcut is an identity, too, and the stem shares its group. ResNet34 has 21,282,122 parameters at 3x32x32 and 10
classes.

Departs from the authors' code, which leaves out a projection if a sub-model happens to have equal widths on both
sides. Here all sub-models have the same projections, so that each update fits into the full network.

Groups: stem (unless it shares stage1's), stage1 .. stage4, classes. Blocks: stem, stage<s>.<b> (b from 0), classifier.
The blocks with an identity shortcut, b >= 1, can be dropped. An early exit may sit behind each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, Norm, conv_bn, conv_bn_slots, linear_slots, scaled
from fl_engine.models.network import LARGEST, ImageNetwork, are_sizes

STEM = 64
STRIDES = (1, 2, 2, 2)


class BasicBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, norm: Norm, project: bool) -> None:
        super().__init__()
        self.conv1 = conv_bn(c_in, c_out, 3, norm, stride=stride, bias=False, relu=nn.ReLU())
        self.conv2 = conv_bn(c_out, c_out, 3, norm, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = conv_bn(c_in, c_out, 1, norm, stride=stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x_bchw: Tensor) -> Tensor:
        out: Tensor = self.relu(self.conv2(self.conv1(x_bchw)) + self.shortcut(x_bchw))
        return out


def block_slots(name: str, inside: Axis, out: Axis, norm: Norm, project: bool) -> dict[str, Slot]:
    inner = replace(out, choice=f"{name}.inner")
    slots = conv_bn_slots(f"{name}.conv1", name, inside, inner, norm, bias=False)
    slots |= conv_bn_slots(f"{name}.conv2", name, inner, out, norm, bias=False)
    if project:
        slots |= conv_bn_slots(f"{name}.shortcut", name, inside, out, norm, bias=False)
    return slots


@dataclass(frozen=True)
class _ResNet(ImageNetwork):
    channels: tuple[int, int, int, int] = (96, 128, 256, 512)
    """Channels of each stage, before `width`. The default is FlexFL's; He et al. have 64, 128, 256, 512."""

    depths: ClassVar[tuple[int, int, int, int]]
    """Blocks per stage."""
    min_hw: ClassVar[int] = 9
    """In smaller images the last map is a single pixel, so the variance of one image is not defined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not are_sizes(self.channels, 4):
            raise ModelError(
                f"{type(self).__name__}: channels must be four integers from 1 to {LARGEST}, got {self.channels!r}"
            )

    def groups(self) -> dict[str, int]:
        sizes = {"stem": STEM} | {f"stage{stage}": n for stage, n in enumerate(self.channels, 1)}
        return {name: scaled(n, self.width) for name, n in sizes.items() if name != "stem" or not self._tied}

    def slots(self) -> dict[str, Slot]:
        inside = Axis(self._first)
        slots = conv_bn_slots("stem", "stem", FREE, inside, self.norm, bias=False)
        for stage, depth in enumerate(self.depths, 1):
            out = Axis(f"stage{stage}")
            for b in range(depth):
                slots |= block_slots(f"stage{stage}.{b}", inside, out, self.norm, self._projects(stage, b))
                inside = out
        return slots | linear_slots("classifier", "classifier", inside, Axis(HEAD))

    def skippable(self) -> list[str]:
        return [
            f"stage{s}.{b}" for s, depth in enumerate(self.depths, 1) for b in range(depth) if not self._projects(s, b)
        ]

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        c_in = layout.width(spec, self._first)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = conv_bn(self.input_shape[0], c_in, 3, self.norm, bias=False, relu=nn.ReLU())
        for stage, (depth, stride) in enumerate(zip(self.depths, STRIDES, strict=True), 1):
            c_out = layout.width(spec, f"stage{stage}")
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for b in range(depth):
                if self._projects(stage, b):
                    blocks[str(b)] = BasicBlock(c_in, c_out, stride, self.norm, project=True)
                elif layout.has_block(spec, f"stage{stage}.{b}"):
                    blocks[str(b)] = BasicBlock(c_out, c_out, 1, self.norm, project=False)
            layers[f"stage{stage}"] = nn.Sequential(blocks)
            c_in = c_out
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["classifier"] = nn.Linear(c_in, layout.width(spec, HEAD))
        return layers

    def exit_points(self) -> tuple[str, ...]:
        return tuple(f"stage{s}.{b}" for s, depth in enumerate(self.depths, 1) for b in range(depth))

    def prunable(self) -> tuple[Prunable, ...]:
        layers = [] if self._tied else [Prunable("stem", ("stem.",), ("stem.relu",))]
        for stage, depth in enumerate(self.depths, 1):
            name = f"stage{stage}"
            first = ("stem.",) if self._tied and stage == 1 else ()
            relus = [f"{name}.{b}.{relu}" for b in range(depth) for relu in ("conv1.relu", "relu")]
            layers.append(Prunable(name, (*first, f"{name}."), (*(f"{stem}relu" for stem in first), *relus)))
        return tuple(layers)

    @property
    def _tied(self) -> bool:
        """Whether the stem shares the channels of stage 1."""
        return self.channels[0] == STEM

    @property
    def _first(self) -> str:
        """The group of the stem's channels."""
        return "stage1" if self._tied else "stem"

    def _projects(self, stage: int, b: int) -> bool:
        return b == 0 and not (self._tied and stage == 1)


class ResNet18(_ResNet):
    depths = (2, 2, 2, 2)


class ResNet34(_ResNet):
    depths = (3, 4, 6, 3)
