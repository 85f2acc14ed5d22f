"""ResNet18 in its original form (He et al., CVPR 2016) for maps from about 32x32: the common part of FedAIoT's networks
for UT-HAR, Widar and EPIC-SOUNDS.

A 7x7 stem of stride 2 and a 3x3 max pool of stride 2; four stages of two basic blocks with 64, 128, 256 and 512
channels, of stride 1, 2, 2, 2; global average pool; classifier. The 3x3 convolutions have no bias. A shortcut is a 1x1
convolution with norm if a stage changes stride or channels, else an identity. If the stem has 64 channels, it is tied
to stage 1, whose shortcuts are then all identities.

Group norm computes a sample's statistics over two groups of channels, the first and the second half. So a "channel" of
the layout is a pair, the i-th channel of each half (`Axis.copies`): each channel stays in its group, and a rule's width
counts pairs. The statistics cover only the channels that are kept, so a slice equals the network built at that width,
not the full network with the other channels set to zero.

Groups: stem (unless it is tied), stage1 .. stage4. Blocks: stem, stage<s>.<b> (b from 0), classifier. The blocks with
an identity shortcut can be dropped. An early exit may sit behind each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import Norm, batch_norm, batch_norm_slots, conv_slots, linear_slots, scaled

CHANNELS = {"stage1": 64, "stage2": 128, "stage3": 256, "stage4": 512}
STRIDES = {"stage1": 1, "stage2": 2, "stage3": 2, "stage4": 2}
DEPTH = 2
"""Blocks per stage."""
HALVES = 2
"""Groups of the group norm."""


class GroupNorm(nn.GroupNorm):
    """torch's group norm, which also accepts groups of a single value, whose output is the bias."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class Trunk:
    """From the stem to the classifier."""

    norm: Norm | Literal["group"]
    width: float = 1.0
    stem: int = CHANNELS["stage1"]
    """Channels of the stem, before `width`."""
    late_stride: bool = False
    """Whether a block's second 3x3 convolution has the stride instead of the first."""
    shortcut_bias: bool = False

    @property
    def tied(self) -> bool:
        """Whether the stem shares the channels of stage 1."""
        return self.stem == CHANNELS["stage1"]

    def groups(self) -> dict[str, int]:
        sizes = CHANNELS if self.tied else {"stem": self.stem, **CHANNELS}
        each = self._axis("stage1").each
        return {name: scaled(n // each, self.width) for name, n in sizes.items()}

    def slots(self, inside: Axis) -> dict[str, Slot]:
        """The slots, in state order; `inside` are the channels of the stem's input."""
        before = self._axis("stage1" if self.tied else "stem")
        slots = self._unit_slots("stem", "stem", inside, before)
        for stage in CHANNELS:
            out = self._axis(stage)
            for b in range(DEPTH):
                name = f"{stage}.{b}"
                inner = replace(out, choice=f"{name}.inner")
                slots |= self._unit_slots(f"{name}.conv1", name, before, inner)
                slots |= self._unit_slots(f"{name}.conv2", name, inner, out)
                if self._projects(stage, b):
                    slots |= self._unit_slots(f"{name}.shortcut", name, before, out, self.shortcut_bias)
                before = out
        return slots | linear_slots("classifier", "classifier", before, Axis(HEAD))

    def skippable(self) -> list[str]:
        return [f"{stage}.{b}" for stage in CHANNELS for b in range(DEPTH) if not self._projects(stage, b)]

    def exit_points(self) -> tuple[str, ...]:
        return tuple(f"{stage}.{b}" for stage in CHANNELS for b in range(DEPTH))

    def layers(self, layout: ParamLayout, spec: SubmodelSpec, c_in: int) -> OrderedDict[str, nn.Module]:
        """(B, c_in, H, W) -> logits (B, kept classes)."""

        def channels(group: str) -> int:
            return layout.width(spec, group) * self._axis(group).each

        before = channels("stage1" if self.tied else "stem")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = self._unit(c_in, before, 7, stride=2, relu=True)
        layers["stem_pool"] = nn.MaxPool2d(3, 2, 1)
        for stage, stride in STRIDES.items():
            out = channels(stage)
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for b in range(DEPTH):
                if self._projects(stage, b) or layout.has_block(spec, f"{stage}.{b}"):
                    blocks[str(b)] = self._block(before, out, stride if b == 0 else 1, self._projects(stage, b))
                    before = out
            layers[stage] = nn.Sequential(blocks)
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["classifier"] = nn.Linear(before, layout.width(spec, HEAD))
        return layers

    def prunable(self) -> tuple[Prunable, ...]:
        """Each stage is one prunable layer, and so is the stem if it is not tied."""
        layers = [] if self.tied else [Prunable("stem", ("stem.",), ("stem.relu",))]
        for stage in CHANNELS:
            first = ("stem.",) if self.tied and stage == "stage1" else ()
            relus = [f"{stage}.{b}.{relu}" for b in range(DEPTH) for relu in ("conv1.relu", "relu")]
            layers.append(Prunable(stage, (*first, f"{stage}."), (*(f"{name}relu" for name in first), *relus)))
        return tuple(layers)

    def _axis(self, group: str) -> Axis:
        return Axis(group, copies=HALVES if self.norm == "group" else 1)

    def _projects(self, stage: str, b: int) -> bool:
        return b == 0 and not (self.tied and stage == "stage1")

    def _block(self, c_in: int, c_out: int, stride: int, project: bool) -> _Block:
        first, second = (1, stride) if self.late_stride else (stride, 1)
        return _Block(
            self._unit(c_in, c_out, 3, stride=first, relu=True),
            self._unit(c_out, c_out, 3, stride=second),
            self._unit(c_in, c_out, 1, stride=stride, bias=self.shortcut_bias) if project else nn.Identity(),
        )

    def _unit(
        self, c_in: int, c_out: int, kernel: int, *, stride: int = 1, bias: bool = False, relu: bool = False
    ) -> nn.Sequential:
        """(B, c_in, H, W) -> (B, c_out, ceil(H / stride), ceil(W / stride)) for odd kernels."""
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=bias)
        norm = GroupNorm(HALVES, c_out) if self.norm == "group" else batch_norm(c_out, self.norm)
        unit = nn.Sequential(OrderedDict(conv=conv, norm=norm))
        if relu:
            unit.add_module("relu", nn.ReLU())
        return unit

    def _unit_slots(self, name: str, block: str, inside: Axis, out: Axis, bias: bool = False) -> dict[str, Slot]:
        slots = conv_slots(f"{name}.conv", block, inside, out, bias=bias)
        # Group norm has the parameters of a batch norm without stored statistics.
        return slots | batch_norm_slots(f"{name}.norm", block, out, "batch" if self.norm == "group" else self.norm)


class _Block(nn.Module):
    def __init__(self, conv1: nn.Module, conv2: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut
        self.relu = nn.ReLU()

    def forward(self, x_bchw: Tensor) -> Tensor:
        out: Tensor = self.relu(self.conv2(self.conv1(x_bchw)) + self.shortcut(x_bchw))
        return out
