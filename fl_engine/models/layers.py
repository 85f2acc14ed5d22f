"""Common parts of the networks: convolution, batch norm and linear layers with their slots, and checks of options."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.contracts import ModelFamily, TakesImages
from fl_engine.core.errors import ModelError
from fl_engine.core.types import Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.training import lanes

Norm = Literal["batch", "static"]
"""`batch`: the statistics of the current batch, in evaluation too (FlexFL, AdaptiveFL). `static`: stored ones."""

WIDEST, LARGEST = 1000, 2**16
"""Upper bounds of the width and of all sizes. A larger network fits neither into memory nor into torch's integers."""

FREE = Axis(None)
"""An axis that is never sliced: kernel rows and columns, image channels."""


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with running statistics but without a batch counter, which can be neither sliced nor averaged.

    PyTorch's own tracking would add the counter to every state, so the two buffers are registered here.
    """

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


class ImageFamily(ModelFamily, TakesImages, Protocol):
    """A network for images, which have to have a least side."""


def check_options(family: ImageFamily, width: float, norm: str) -> None:
    """Raises ModelError for options from which no network can be built."""
    name, chw, least = type(family).__name__, family.input_shape, family.min_hw
    if not are_sizes(chw, 3):
        raise ModelError(f"{name}: input_shape is a tuple of three positive integers (C, H, W), got {chw!r}")
    if min(chw[1:]) < least:
        raise ModelError(
            f"{name} takes images of at least {least}x{least} pixels, got {chw[1]}x{chw[2]}: enlarge or pad "
            "the images, or choose a network for smaller ones (small_cnn takes 8x8)"
        )
    _check_sizes(family, width, "pixels a side")
    check_norm(family, norm)


def check_norm(family: ModelFamily, norm: str) -> None:
    """Raises ModelError for a batch norm that there is not."""
    if norm not in get_args(Norm):
        raise ModelError(f"{type(family).__name__}: norm is one of {', '.join(get_args(Norm))}, got {norm!r}")


def check_sizes(family: ModelFamily, form: str, axes: int, width: float) -> None:
    """Raises ModelError for sizes from which no network for samples with `axes` axes can be built. `form` names the
    axes."""
    if not are_sizes(family.input_shape, axes):
        name, what = type(family).__name__, "one positive integer" if axes == 1 else f"{axes} positive integers"
        raise ModelError(f"{name}: input_shape is a tuple of {what}, {form}, got {family.input_shape!r}")
    _check_sizes(family, width, "numbers along an axis")


def _check_sizes(family: ModelFamily, width: float, side: str) -> None:
    name, shape = type(family).__name__, family.input_shape
    if not isinstance(family.outputs, int) or family.outputs < 1:
        raise ModelError(f"{name}: outputs is an integer of at least 1, got {family.outputs!r}")
    if not isinstance(width, int | float) or not 0 < width < math.inf:
        raise ModelError(f"{name}: width multiplies all channels and is a number above 0, got {width!r}")
    if width > WIDEST or max(*shape, family.outputs) > LARGEST:
        raise ModelError(
            f"{name}: at most {WIDEST} times as wide, {LARGEST} {side} and {LARGEST} outputs, "
            f"got width {width}, input_shape {shape} and {family.outputs} outputs"
        )


def are_sizes(value: object, count: int) -> bool:
    """Whether this is a tuple of `count` positive integers (a list would make the family unhashable)."""
    if not isinstance(value, tuple) or len(value) != count:
        return False
    return all(isinstance(n, int) and n > 0 for n in value)


def check_spec(
    layout: ParamLayout, spec: SubmodelSpec, skippable: Collection[str] = (), exits: Collection[str] = ()
) -> None:
    """Raises ModelError if `spec` names something that does not exist, or drops a block that the network needs.

    A block with an identity shortcut around it is skippable. With early exits, any output, also the classifier's, can
    be dropped as long as one stays, and all blocks behind the last output kept must be dropped.
    """
    layout.check(spec)
    blocks = layout.blocks
    heads = [exit_name(block) for block in exits]
    outputs = [*heads, blocks[-1]]
    kept = [block for block in outputs if layout.has_block(spec, block)]
    if heads and not kept:
        raise ModelError(f"the sub-model keeps none of the outputs {', '.join(outputs)}: keep at least one")
    last = kept[-1] if kept else blocks[-1]
    end = blocks.index(last)
    dropped = [b for b in blocks[: end + 1] if not layout.has_block(spec, b) and b not in skippable and b not in heads]
    if dropped:
        free = [*skippable, *heads]
        can = f"only {', '.join(free)} can" if free else "no block of this network can"
        shorter = any(blocks.index(head) < blocks.index(dropped[0]) for head in heads)
        hint = ", or end the sub-model at an exit before it" if shorter else ""
        raise ModelError(f"the sub-model lacks block {dropped[0]!r}, which cannot be dropped ({can}): keep it{hint}")
    idle = [block for block in blocks[end + 1 :] if layout.has_block(spec, block)]
    if idle:
        raise ModelError(
            f"the sub-model keeps block {idle[0]!r} behind its last output {last!r}: drop the block, or keep an output "
            "behind it"
        )
