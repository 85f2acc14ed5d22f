"""MobileNetV3-Large (Howard et al., ICCV 2019) as a once-for-all network (Cai et al., ICLR 2020) in the form of CompOFA
(Sahni et al., ICLR 2021), from which FedX takes its sub-networks.

A 3x3 stem, a block without expansion, five stages of four inverted residuals, a 1x1 convolution to 960 channels, the
mean over the pixels, a 1x1 convolution to 1280 channels without batch norm, dropout 0.1, the classifier. The kernels
are 3 in the first block and 3, 5, 3, 3, 5 in the stages. The first block and stages 1 and 2 have ReLU, all others
h_swish; stages 2, 4 and 5 have squeeze-and-excitation.

A sub-network chooses for each stage how many blocks it has, and how many times they expand their input: 2 blocks and 3
times, 3 and 4, or 4 and 6. `nested` lists these 3^5 = 243 sub-networks; each is a part of those whose choices are all
at least as large. At 200 classes those with the same choice in all stages have 2,414,056 / 3,512,816 / 6,387,640
parameters, FedX's 2.41 / 3.51 / 6.39 million; without running statistics 2,402,120 / 3,490,640 / 6,345,816.

Departs from the published network, which is for 224x224 pixels: for images whose shorter side has at most 32 pixels the
stem has stride 1 instead of 2, so that their last map has more than one pixel. The first weights are torch's, as in the
other networks here; FedX starts from weights that were trained on ImageNet.

Groups: stem (the first block's channels too), for each block stage<s>.<b>.inner (its expanded channels) and, with
squeeze-and-excitation, stage<s>.<b>.squeeze; stage1 .. stage5, final, mix, classes. Blocks: stem, first, stage<s>.<b>
(b from 0), final, mix, classifier. The blocks of a stage but the first can be dropped. An early exit may sit behind
each block of a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.costs import count_params
from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, Norm, conv_bn, conv_bn_slots, conv_slots, linear_slots
from fl_engine.models.network import ImageNetwork


class Stage(NamedTuple):
    channels: int
    kernel: int
    stride: int
    swish: bool
    """Whether the activation is h_swish; else ReLU."""
    squeeze: bool
    """Whether the blocks have squeeze-and-excitation."""


class Choice(NamedTuple):
    depth: int
    """How many blocks of a stage are kept."""
    expand: int
    """The factor by which its blocks expand their input's channels."""

    def __str__(self) -> str:
        return f"d{self.depth}w{self.expand}"


STEM, FINAL, MIX = 16, 960, 1280
DROPOUT = 0.1
STAGES = {
    "stage1": Stage(24, 3, 2, swish=False, squeeze=False),
    "stage2": Stage(40, 5, 2, swish=False, squeeze=True),
    "stage3": Stage(80, 3, 2, swish=True, squeeze=False),
    "stage4": Stage(112, 3, 1, swish=True, squeeze=True),
    "stage5": Stage(160, 5, 2, swish=True, squeeze=True),
}
CHOICES = {"small": Choice(2, 3), "medium": Choice(3, 4), "large": Choice(4, 6)}
LARGEST = CHOICES["large"]
TINY_IMAGE = 32
"""Pixels of the shorter side of an image up to which the stem has stride 1."""


def divisible(channels: float) -> int:
    """The multiple of 8 nearest to `channels`, at least 8 and at most 10 % less (OFA's `make_divisible`)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def squeezed(inner: int) -> int:
    """The channels between squeeze-and-excitation's two convolutions, for `inner` channels outside."""
    return divisible(inner // 4)


class Residual(nn.Sequential):
    """Adds the input to the output of its layers."""

    def forward(self, input: Tensor) -> Tensor:
        out = input
        for layer in self:
            out = layer(out)
        return input + out


class Scale(nn.Module):
    """(B, C, H, W) times (B, C, 1, 1)."""

    def forward(self, x_bchw: Tensor, by_bc11: Tensor) -> Tensor:
        return x_bchw * by_bc11

    def in_lanes(self) -> nn.Module:
        return _ScaleInLanes()


class _ScaleInLanes(nn.Module):
    def forward(self, x_bchw: Tensor, by_bc11: Tensor) -> Tensor:
        # The gradient of a broadcast is a sum over two axes, whose order depends on the lanes.
        return x_bchw * F.interpolate(by_bc11, x_bchw.shape[2:])


class SqueezeExcite(nn.Module):
    """(B, channels, H, W) -> the same shape: each channel times a factor of all channels' means."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, inside, 1)
        self.relu = nn.ReLU()
        self.excite = nn.Conv2d(inside, channels, 1)
        self.gate = nn.Hardsigmoid()
        self.scale = Scale()

    def forward(self, x_bchw: Tensor) -> Tensor:
        out: Tensor = self.scale(x_bchw, self.gate(self.excite(self.relu(self.squeeze(self.pool(x_bchw))))))
        return out


def _unit(
    c_in: int, c_out: int, kernel: int, norm: Norm, swish: bool, *, stride: int = 1, groups: int = 1
) -> nn.Module:
    unit = conv_bn(c_in, c_out, kernel, norm, stride=stride, groups=groups, bias=False)
    unit.add_module("act", nn.Hardswish() if swish else nn.ReLU())
    return unit


def _block_slots(name: str, inside: str, out: str, squeeze: bool, norm: Norm) -> dict[str, Slot]:
    inner = Axis(f"{name}.inner")
    slots = conv_bn_slots(f"{name}.expand", name, Axis(inside), inner, norm, bias=False)
    slots |= conv_bn_slots(f"{name}.depthwise", name, FREE, inner, norm, bias=False)
    if squeeze:
        mid = Axis(f"{name}.squeeze")
        slots |= conv_slots(f"{name}.se.squeeze", name, inner, mid)
        slots |= conv_slots(f"{name}.se.excite", name, mid, inner)
    return slots | conv_bn_slots(f"{name}.project", name, inner, Axis(out), norm, bias=False)


def _blocks() -> Iterator[tuple[str, str, str, bool]]:
    """(name, group of its input, stage, whether it has squeeze-and-excitation) of each block, in network order."""
    inside = "stem"
    for name, stage in STAGES.items():
        for b in range(LARGEST.depth):
            yield f"{name}.{b}", inside, name, stage.squeeze
            inside = name


@dataclass(frozen=True)
class MobileNetV3OFA(ImageNetwork):
    norm: Norm = "static"
    """batch: the statistics of the current batch; static: stored ones."""

    min_hw: ClassVar[int] = 17
    """In smaller images the last map is a single pixel, so the variance of one image is not defined."""

    def groups(self) -> dict[str, int]:
        """All are multiples of 8."""
        groups = {"stem": divisible(STEM * self.width)}
        for name, inside, stage, squeeze in _blocks():
            inner = divisible(groups[inside] * LARGEST.expand)
            groups[f"{name}.inner"] = inner
            if squeeze:
                groups[f"{name}.squeeze"] = squeezed(inner)
            groups.setdefault(stage, divisible(STAGES[stage].channels * self.width))
        return groups | {"final": divisible(FINAL * self.width), "mix": divisible(MIX * self.width)}

    def slots(self) -> dict[str, Slot]:
        slots = conv_bn_slots("stem", "stem", FREE, Axis("stem"), self.norm, bias=False)
        slots |= conv_bn_slots("first.depthwise", "first", FREE, Axis("stem"), self.norm, bias=False)
        slots |= conv_bn_slots("first.project", "first", Axis("stem"), Axis("stem"), self.norm, bias=False)
        for name, inside, stage, squeeze in _blocks():
            slots |= _block_slots(name, inside, stage, squeeze, self.norm)
        slots |= conv_bn_slots("final", "final", Axis(next(reversed(STAGES))), Axis("final"), self.norm, bias=False)
        slots |= conv_slots("mix.conv", "mix", Axis("final"), Axis("mix"), bias=False)
        return slots | linear_slots("classifier", "classifier", Axis("mix"), Axis(HEAD))

    def skippable(self) -> list[str]:
        return [f"{name}.{b}" for name in STAGES for b in range(1, LARGEST.depth)]

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        wide = {group: layout.width(spec, group) for group in layout.groups}
        stem, final, mix = wide["stem"], wide["final"], wide["mix"]
        stride = 1 if min(self.input_shape[1:]) <= TINY_IMAGE else 2
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = _unit(self.input_shape[0], stem, 3, self.norm, True, stride=stride)
        first: OrderedDict[str, nn.Module] = OrderedDict()
        first["depthwise"] = _unit(stem, stem, 3, self.norm, False, groups=stem)
        first["project"] = conv_bn(stem, stem, 1, self.norm, bias=False)
        layers["first"] = Residual(first)
        c_in = stem
        for name in STAGES:
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for b in range(LARGEST.depth):
                if b == 0 or layout.has_block(spec, f"{name}.{b}"):
                    blocks[str(b)] = self._block(name, b, c_in, wide)
                    c_in = wide[name]
            layers[name] = nn.Sequential(blocks)
        layers["final"] = _unit(c_in, final, 1, self.norm, True)
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["mix"] = nn.Sequential(OrderedDict(conv=nn.Conv2d(final, mix, 1, bias=False), act=nn.Hardswish()))
        layers["flatten"] = nn.Flatten()
        layers["dropout"] = nn.Dropout(DROPOUT)
        layers["classifier"] = nn.Linear(mix, wide[HEAD])
        return layers

    def nested(self) -> Mapping[str, SubmodelSpec]:
        """The 243 sub-networks by name, in ascending order of their parameters. A name has the depth and the expansion
        of each stage, such as d2w3-d2w3-d4w6-d3w4-d2w3. Those with one choice for all stages are `small`, `medium` and
        `large`."""
        return dict(_nested(self))

    def exit_points(self) -> tuple[str, ...]:
        return tuple(name for name, _, _, _ in _blocks())

    def prunable(self) -> tuple[Prunable, ...]:
        layers = {"stem": Prunable("stem", ("stem.", "first."), ("first.depthwise.act",))}
        for name, _, stage, squeeze in _blocks():
            units = (f"{name}.expand.", f"{name}.depthwise.")
            relus = () if STAGES[stage].swish else tuple(f"{unit}act" for unit in units)
            layers[f"{name}.inner"] = Prunable(f"{name}.inner", units, relus)
            if squeeze:
                layers[f"{name}.squeeze"] = Prunable(f"{name}.squeeze", (f"{name}.se.",), (f"{name}.se.relu",))
            projects = tuple(f"{stage}.{b}.project." for b in range(LARGEST.depth))
            layers.setdefault(stage, Prunable(stage, projects, ()))
        layers |= {"final": Prunable("final", ("final.",), ()), "mix": Prunable("mix", ("mix.",), ())}
        return tuple(layers.values())

    def _block(self, stage: str, b: int, c_in: int, wide: Mapping[str, int]) -> nn.Module:
        """Block b of a stage, for the channels that each group keeps."""
        name, (_, kernel, stride, swish, squeeze) = f"{stage}.{b}", STAGES[stage]
        inner, step = wide[f"{name}.inner"], stride if b == 0 else 1
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["expand"] = _unit(c_in, inner, 1, self.norm, swish)
        parts["depthwise"] = _unit(inner, inner, kernel, self.norm, swish, stride=step, groups=inner)
        if squeeze:
            parts["se"] = SqueezeExcite(inner, wide[f"{name}.squeeze"])
        parts["project"] = conv_bn(inner, wide[stage], 1, self.norm, bias=False)
        return nn.Sequential(parts) if b == 0 else Residual(parts)

    def _spec(self, choices: Mapping[str, Choice]) -> SubmodelSpec:
        """The sub-network with a choice for each stage. The blocks that it leaves out are as narrow as the others, so
        that it is a part of each sub-network whose stages are all at least as large."""
        layout, keep = self.layout(), {}
        dropped = [f"{name}.{b}" for name in STAGES for b in range(choices[name].depth, LARGEST.depth)]
        for name, inside, stage, squeeze in _blocks():
            inner = divisible(layout.groups[inside] * choices[stage].expand)
            keep[f"{name}.inner"] = inner
            if squeeze:
                keep[f"{name}.squeeze"] = squeezed(inner)
        narrower = {group: n for group, n in keep.items() if n < layout.groups[group]}
        return SubmodelSpec.of(narrower, [b for b in layout.blocks if b not in dropped] if dropped else None)


@lru_cache(maxsize=16)
def _nested(family: MobileNetV3OFA) -> tuple[tuple[str, SubmodelSpec], ...]:
    """Counting 243 networks takes half a second."""
    uniform = {(choice,) * len(STAGES): name for name, choice in CHOICES.items()}
    found = {
        uniform.get(choices, "-".join(map(str, choices))): family._spec(dict(zip(STAGES, choices, strict=True)))
        for choices in product(CHOICES.values(), repeat=len(STAGES))
    }
    return tuple(sorted(found.items(), key=lambda item: (count_params(family, item[1]), item[0])))
