"""Layers that record the axes of their weights. The layout of a network is derived from these axes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.types import Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.training import lanes

Norm = Literal["batch", "static"]
"""`batch`: use the current batch's statistics even in evaluation (FlexFL, AdaptiveFL); `static`: use stored
statistics."""

FREE = Axis(None)
"""Axis that is never sliced, such as kernel rows, kernel columns or image channels."""

Inside = Axis | int
"""Input axis of a layer: an `Axis`, or the length of an axis that is never sliced."""

Layer = TypeVar("Layer", bound=nn.Module)


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with running statistics but without PyTorch's batch counter. The counter can be neither sliced nor
    averaged. The statistics are created here, because PyTorch would create the counter together with the statistics."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)
        self.running_mean = torch.zeros(channels)
        self.running_var = torch.ones(channels)

    def forward(self, x_bchw: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x_bchw, mean, var, self.weight, self.bias, self.training, 0.1, self.eps)

    def in_lanes(self) -> nn.Module:
        return lanes.BatchNorm2d(self)


class Residual(nn.Sequential):
    """Sequence of layers with a shortcut that adds the input to the output."""

    def forward(self, input: Tensor) -> Tensor:
        out = input
        for layer in self:
            out = layer(out)
        return input + out


def scaled(channels: int, width: float) -> int:
    """Return `int(channels * width)`, but at least 1."""
    return max(1, int(channels * width))


def noted(layer: Layer, **axes: tuple[Axis, ...]) -> Layer:
    """Record the axes of a layer's parameters and statistics, and return the layer."""
    layer.axes = axes  # type: ignore[assignment]
    return layer


def noted_norm(layer: Layer, channels: Axis) -> Layer:
    """Record `channels` as the axis of all parameters and statistics of a norm layer, and return the layer."""
    return noted(layer, **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (channels,)))


def axes_of(module: nn.Module) -> dict[str, tuple[Axis, ...]]:
    """Return the recorded axes of all parameters and statistics, in the order of the state dict."""
    found = {}
    for name in module.state_dict():
        holder, _, leaf = name.rpartition(".")
        layer: Any = module.get_submodule(holder)
        found[name] = layer.axes[leaf]
    return found


def linear_slots(name: str, block: str, inside: Axis, out: Axis) -> dict[str, Slot]:
    """Return the slots of an `nn.Linear` called `name`: weight (out, in) and bias (out,)."""
    return {f"{name}.weight": Slot(block, (out, inside)), f"{name}.bias": Slot(block, (out,))}


@dataclass(frozen=True)
class LayerMaker:
    """Factory that creates the layers of a sub-model and records the axes of the weights."""

    layout: ParamLayout
    """Layout of the network. Only the channel groups of this layout are used, not the slots."""
    spec: SubmodelSpec

    def width(self, axis: Inside) -> int:
        """Return the length of an axis in the sub-model."""
        if isinstance(axis, int):
            return axis
        return axis.length(0, lambda group: self.layout.width(self.spec, group))

    def has_block(self, block: str) -> bool:
        return self.layout.has_block(self.spec, block)

    def linear(self, inside: Inside, out: Axis) -> nn.Linear:
        """Return a linear layer that maps (B, inside) to (B, out)."""
        return noted(nn.Linear(self.width(inside), self.width(out)), weight=(out, axis_of(inside)), bias=(out,))

    def dense(self, inside: Inside, out: Axis, dropout: float = 0.0) -> nn.Sequential:
        """Return a linear layer followed by ReLU and, optionally, dropout."""
        unit = nn.Sequential(OrderedDict(linear=self.linear(inside, out), relu=nn.ReLU()))
        if dropout:
            unit.add_module("dropout", nn.Dropout(dropout))
        return unit

    def conv(
        self,
        inside: Inside,
        out: Axis,
        kernel: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | None = None,
        *,
        bias: bool = True,
    ) -> nn.Conv2d:
        """Return a convolution. If `padding` is None and the kernel size is odd, the convolution maps (B, inside, H, W)
        to (B, out, ceil(H / stride), ceil(W / stride))."""
        if padding is None:
            padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        layer = nn.Conv2d(self.width(inside), self.width(out), kernel, stride, padding, bias=bias)
        return noted(layer, weight=(out, axis_of(inside), FREE, FREE), bias=(out,))

    def depthwise(self, channels: Axis, kernel: int, stride: int = 1, *, bias: bool = True) -> nn.Conv2d:
        """Return a depthwise convolution with output (B, channels, ceil(H / stride), ceil(W / stride))."""
        count = self.width(channels)
        layer = nn.Conv2d(count, count, kernel, stride, kernel // 2, groups=count, bias=bias)
        return noted(layer, weight=(channels, FREE, FREE, FREE), bias=(channels,))

    def batch_norm(self, channels: Axis, norm: Norm) -> nn.BatchNorm2d:
        """Return a batch norm for maps (B, channels, H, W)."""
        count = self.width(channels)
        layer = nn.BatchNorm2d(count, track_running_stats=False) if norm == "batch" else StaticBatchNorm2d(count)
        return noted_norm(layer, channels)

    def conv_bn(
        self,
        inside: Inside,
        out: Axis,
        kernel: int | tuple[int, int],
        norm: Norm,
        *,
        stride: int = 1,
        bias: bool = True,
        relu: nn.Module | None = None,
    ) -> nn.Sequential:
        """Return a new convolution followed by batch norm and, optionally, an activation."""
        return self.with_norm(self.conv(inside, out, kernel, stride, bias=bias), out, norm, relu)

    def with_norm(self, conv: nn.Module, out: Axis, norm: Norm, relu: nn.Module | None = None) -> nn.Sequential:
        """Return `conv` followed by batch norm and, optionally, an activation."""
        unit = nn.Sequential(OrderedDict(conv=conv, bn=self.batch_norm(out, norm)))
        if relu is not None:
            unit.add_module("relu", relu)
        return unit


def axis_of(inside: Inside) -> Axis:
    return FREE if isinstance(inside, int) else inside
