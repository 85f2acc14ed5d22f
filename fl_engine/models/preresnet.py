"""PreResNet18: the pre-activation ResNet (He et al., ECCV 2016) for small images, as HeteroFL (Diao et al., ICLR
2021) and FedRolex (Alam et al., NeurIPS 2022) use it.

A 3x3 stem of stride 1, a bare convolution; four stages of two blocks with 64, 128, 256 and 512 channels, of stride 1,
2, 2, 2; a last batch norm + ReLU; global average pool; classifier. No convolution has a bias, no shortcut a norm. A
block normalises its input first: out = relu(norm1(x)), then conv2(relu(norm2(conv1(out)))) is added to x, or, where a
stage changes the width, to a 1x1 convolution of out. Stage 1 keeps the stem's width, so its shortcuts tie it to the
stem. At 3x32x32 and 10 classes: 11,172,170 parameters (FedRolex, Table 3.6, which also lists its sub-models).

Departs from the authors' code: their scaler after each convolution is part of the training here, not of the network.

Groups: stage1 .. stage4, classes. Blocks: stem, stage<s>.<b> (b from 0), norm, classifier. The blocks with an identity
shortcut, stage1.0 and those with b = 1, can be dropped. An early exit may sit behind each block of a stage; it takes
the block's sum, before any norm.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, Norm, batch_norm, batch_norm_slots, conv_slots, linear_slots, scaled
from fl_engine.models.network import ImageNetwork

CHANNELS = {"stage1": 64, "stage2": 128, "stage3": 256, "stage4": 512}
STRIDES = {"stage1": 1, "stage2": 2, "stage3": 2, "stage4": 2}
DEPTH = 2
"""Blocks per stage."""


def _conv(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)


def _norm_relu(channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(OrderedDict(bn=batch_norm(channels, norm), relu=nn.ReLU()))


class PreActBlock(nn.Module):
    """(B, c_in, H, W) -> (B, c_out, ceil(H / stride), ceil(W / stride))."""

    def __init__(self, c_in: int, c_out: int, stride: int, norm: Norm, project: bool) -> None:
        super().__init__()
        self.norm1 = _norm_relu(c_in, norm)
        self.conv1 = _conv(c_in, c_out, 3, stride)
        self.norm2 = _norm_relu(c_out, norm)
        self.conv2 = _conv(c_out, c_out, 3)
        self.shortcut = _conv(c_in, c_out, 1, stride) if project else None

    def forward(self, x_bchw: Tensor) -> Tensor:
        out = self.norm1(x_bchw)
        shortcut = x_bchw if self.shortcut is None else self.shortcut(out)
        total: Tensor = self.conv2(self.norm2(self.conv1(out))) + shortcut
        return total


def _block_slots(name: str, inside: Axis, out: Axis, norm: Norm, project: bool) -> dict[str, Slot]:
    slots = batch_norm_slots(f"{name}.norm1.bn", name, inside, norm)
    inner = replace(out, choice=f"{name}.inner")
    slots |= conv_slots(f"{name}.conv1", name, inside, inner, bias=False)
    slots |= batch_norm_slots(f"{name}.norm2.bn", name, inner, norm)
    slots |= conv_slots(f"{name}.conv2", name, inner, out, bias=False)
    if project:
        slots |= conv_slots(f"{name}.shortcut", name, inside, out, bias=False)
    return slots


def _projects(stage: str, b: int) -> bool:
    return b == 0 and stage != "stage1"


class PreResNet18(ImageNetwork):
    min_hw: ClassVar[int] = 9
    """In smaller images the last map is a single pixel, so the variance of one image is not defined."""

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in CHANNELS.items()}

    def slots(self) -> dict[str, Slot]:
        inside = Axis("stage1")
        slots = conv_slots("stem", "stem", FREE, inside, bias=False)
        for stage in CHANNELS:
            out = Axis(stage)
            for b in range(DEPTH):
                slots |= _block_slots(f"{stage}.{b}", inside, out, self.norm, _projects(stage, b))
                inside = out
        slots |= batch_norm_slots("norm.bn", "norm", inside, self.norm)
        return slots | linear_slots("classifier", "classifier", inside, Axis(HEAD))

    def skippable(self) -> list[str]:
        return [f"{stage}.{b}" for stage in CHANNELS for b in range(DEPTH) if not _projects(stage, b)]

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        c_in = layout.width(spec, "stage1")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = _conv(self.input_shape[0], c_in, 3)
        for stage, stride in STRIDES.items():
            c_out = layout.width(spec, stage)
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for b in range(DEPTH):
                if _projects(stage, b):
                    blocks[str(b)] = PreActBlock(c_in, c_out, stride, self.norm, project=True)
                elif layout.has_block(spec, f"{stage}.{b}"):
                    blocks[str(b)] = PreActBlock(c_out, c_out, 1, self.norm, project=False)
            layers[stage] = nn.Sequential(blocks)
            c_in = c_out
        layers["norm"] = _norm_relu(c_in, self.norm)
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["classifier"] = nn.Linear(c_in, layout.width(spec, HEAD))
        return layers

    def exit_points(self) -> tuple[str, ...]:
        return tuple(f"{stage}.{b}" for stage in CHANNELS for b in range(DEPTH))

    def prunable(self) -> tuple[Prunable, ...]:
        # The stem shares the channels of stage 1, the last norm those of stage 4.
        before, behind = {"stage1": ("stem.",)}, {"stage4": ("norm.",)}
        layers = []
        for stage in CHANNELS:
            params = (*before.get(stage, ()), f"{stage}.", *behind.get(stage, ()))
            norms = [f"{stage}.{b}.{norm}." for b in range(DEPTH) for norm in ("norm1", "norm2")]
            relus = tuple(f"{norm}relu" for norm in (*norms, *behind.get(stage, ())))
            layers.append(Prunable(stage, params, relus))
        return tuple(layers)
