"""Common parts of the networks: convolution, batch norm and linear layers with their slots."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.types import Axis, Slot
from fl_engine.training import lanes

Norm = Literal["batch", "static"]
"""`batch`: the statistics of the current batch, in evaluation too (FlexFL, AdaptiveFL). `static`: stored ones."""

FREE = Axis(None)
"""An axis that is never sliced: kernel rows and columns, image channels."""


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with running statistics but without a batch counter, which can be neither sliced nor averaged.
    PyTorch's own tracking would add the counter, so the two buffers are registered here."""

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


def scaled(channels: int, width: float) -> int:
    """`int(channels * width)`, at least 1."""
    return max(1, int(channels * width))


def batch_norm(channels: int, norm: Norm) -> nn.BatchNorm2d:
    """(B, channels, H, W) -> the same shape."""
    return nn.BatchNorm2d(channels, track_running_stats=False) if norm == "batch" else StaticBatchNorm2d(channels)


def batch_norm_slots(name: str, block: str, channels: Axis, norm: Norm) -> dict[str, Slot]:
    """The slots of a `batch_norm` called `name`, in state order."""
    entries = ("weight", "bias") if norm == "batch" else ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{entry}": Slot(block, (channels,)) for entry in entries}


def conv_bn(
    c_in: int,
    c_out: int,
    kernel: int,
    norm: Norm,
    *,
    stride: int = 1,
    groups: int = 1,
    bias: bool = True,
    relu: nn.Module | None = None,
) -> nn.Sequential:
    """(B, c_in, H, W) -> (B, c_out, ceil(H / stride), ceil(W / stride)) for odd kernels."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=bias)
    unit = nn.Sequential(OrderedDict(conv=conv, bn=batch_norm(c_out, norm)))
    if relu is not None:
        unit.add_module("relu", relu)
    return unit


def conv_slots(name: str, block: str, inside: Axis, out: Axis, *, bias: bool = True) -> dict[str, Slot]:
    """The slots of an `nn.Conv2d` (weight (out, in, H, W), bias (out,)) called `name`, in state order. A depthwise
    convolution has `inside=FREE`."""
    slots = {f"{name}.weight": Slot(block, (out, inside, FREE, FREE))}
    return slots | ({f"{name}.bias": Slot(block, (out,))} if bias else {})


def conv_bn_slots(name: str, block: str, inside: Axis, out: Axis, norm: Norm, *, bias: bool = True) -> dict[str, Slot]:
    """The slots of `conv_bn` under `name`, in state order; `inside` as in `conv_slots`."""
    return conv_slots(f"{name}.conv", block, inside, out, bias=bias) | batch_norm_slots(f"{name}.bn", block, out, norm)


def linear_slots(name: str, block: str, inside: Axis, out: Axis) -> dict[str, Slot]:
    """The slots of an `nn.Linear` (weight (out, in), bias (out,)) called `name`, in state order."""
    return {f"{name}.weight": Slot(block, (out, inside)), f"{name}.bias": Slot(block, (out,))}
