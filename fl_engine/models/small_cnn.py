"""A small convolutional network for images from 8x8 up, quick on one CPU core. It is not from a paper.

Three 3x3 convolutions with batch norm and ReLU (16, 32, 64 channels), a 2x2 max pool after each of the first two, one
hidden layer and the classifier. At 1x8x8 and ten classes: 40,618 parameters.

Groups: conv1, conv2, conv3, fc1, classes. Blocks: conv1, conv2, conv3, fc1, classifier. An early exit may sit
behind each block except the classifier.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, conv_bn, conv_bn_slots, linear_slots, scaled
from fl_engine.models.network import ImageNetwork

CHANNELS = {"conv1": 16, "conv2": 32, "conv3": 64, "fc1": 64}


class SmallCNN(ImageNetwork):
    min_hw: ClassVar[int] = 8

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in CHANNELS.items()}

    def slots(self) -> dict[str, Slot]:
        slots = conv_bn_slots("conv1", "conv1", FREE, Axis("conv1"), self.norm)
        slots |= conv_bn_slots("conv2", "conv2", Axis("conv1"), Axis("conv2"), self.norm)
        slots |= conv_bn_slots("conv3", "conv3", Axis("conv2"), Axis("conv3"), self.norm)
        slots |= linear_slots("fc1.linear", "fc1", Axis("conv3", self._last_map()), Axis("fc1"))
        return slots | linear_slots("classifier", "classifier", Axis("fc1"), Axis(HEAD))

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        c1, c2, c3, hidden, classes = (layout.width(spec, group) for group in (*CHANNELS, HEAD))
        fc1 = OrderedDict(linear=nn.Linear(c3 * self._last_map(), hidden), relu=nn.ReLU())
        return OrderedDict(
            conv1=conv_bn(self.input_shape[0], c1, 3, self.norm, relu=nn.ReLU()),
            pool1=nn.MaxPool2d(2),
            conv2=conv_bn(c1, c2, 3, self.norm, relu=nn.ReLU()),
            pool2=nn.MaxPool2d(2),
            conv3=conv_bn(c2, c3, 3, self.norm, relu=nn.ReLU()),
            flatten=nn.Flatten(),
            fc1=nn.Sequential(fc1),
            classifier=nn.Linear(hidden, classes),
        )

    def exit_points(self) -> tuple[str, ...]:
        return tuple(CHANNELS)

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in CHANNELS)

    def _last_map(self) -> int:
        """Pixels of the last map, which is flattened."""
        _, h, w = self.input_shape
        return (h // 4) * (w // 4)
