"""A small convolutional network for images from 8x8 up, quick on one CPU core. It is not from a paper.

Three 3x3 convolutions with batch norm and ReLU (16, 32, 64 channels), a 2x2 max pool after the first two, one
hidden layer and the classifier. At 1x8x8 and ten classes: 40,618 parameters.

Groups: conv1, conv2, conv3, fc1, classes. Blocks: conv1, conv2, conv3, fc1, classifier. An early exit may sit
behind each block but the classifier.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, SubmodelSpec
from fl_engine.models.exits import Convs, assemble, check_exits, slots_with_exits
from fl_engine.models.layers import (
    FREE,
    Norm,
    check_options,
    check_spec,
    conv_bn,
    conv_bn_slots,
    linear_slots,
    scaled,
)

CHANNELS = {"conv1": 16, "conv2": 32, "conv3": 64, "fc1": 64}


@dataclass(frozen=True)
class SmallCNN:
    input_shape: tuple[int, int, int]
    outputs: int
    width: float = 1.0
    """Multiplies the channels of every convolution and the hidden units."""
    norm: Norm = "batch"
    """batch: the statistics of the current batch; static: stored ones."""
    exits: tuple[str, ...] = ()
    """Blocks behind which an early exit sits: some of `exit_points`, in that order."""
    exit_convs: Convs = ()
    """Pairs [block, n]: the head of the exit behind the block has n 3x3 convolutions; others have 0."""

    min_hw: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_options(self, self.width, self.norm)
        check_exits(type(self).__name__, self.exits, self.exit_points(), self.exit_convs)

    def layout(self) -> ParamLayout:
        groups = {name: scaled(n, self.width) for name, n in CHANNELS.items()}
        slots = conv_bn_slots("conv1", "conv1", FREE, Axis("conv1"), self.norm)
        slots |= conv_bn_slots("conv2", "conv2", Axis("conv1"), Axis("conv2"), self.norm)
        slots |= conv_bn_slots("conv3", "conv3", Axis("conv2"), Axis("conv3"), self.norm)
        slots |= linear_slots("fc1.linear", "fc1", Axis("conv3", self._last_map()), Axis("fc1"))
        slots |= linear_slots("classifier", "classifier", Axis("fc1"), Axis(HEAD))
        slots = slots_with_exits(slots, self.exits, self.exit_convs, self.norm)
        return ParamLayout(groups | {HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, C, H, W) -> logits (B, kept classes); with exits, a tuple of these, one per output kept."""
        layout = self.layout()
        check_spec(layout, spec, exits=self.exits)
        c1, c2, c3, hidden, classes = (layout.width(spec, group) for group in (*CHANNELS, HEAD))
        fc1 = OrderedDict(linear=nn.Linear(c3 * self._last_map(), hidden), relu=nn.ReLU())
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=conv_bn(self.input_shape[0], c1, 3, self.norm, relu=nn.ReLU()),
            pool1=nn.MaxPool2d(2),
            conv2=conv_bn(c1, c2, 3, self.norm, relu=nn.ReLU()),
            pool2=nn.MaxPool2d(2),
            conv3=conv_bn(c2, c3, 3, self.norm, relu=nn.ReLU()),
            flatten=nn.Flatten(),
            fc1=nn.Sequential(fc1),
            classifier=nn.Linear(hidden, classes),
        )
        return assemble(layers, layout, spec, self.exits)

    def exit_points(self) -> tuple[str, ...]:
        """The blocks behind which an early exit may sit, in network order."""
        return tuple(CHANNELS)

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in CHANNELS)

    def _last_map(self) -> int:
        """Pixels of the last map, which is flattened."""
        _, h, w = self.input_shape
        return (h // 4) * (w // 4)
