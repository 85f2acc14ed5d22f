"""The ResNet18 of FedAIoT for Widar (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of
Things, Michigan State University 2023, section 2.3.3.3), after SenseFi (Yang et al., Patterns 4(3), 2023): it
recognises gestures from the body-coordinate velocity profiles of 22 moments.

Two transposed 7x7 convolutions, each with three output channels, bias and ReLU; then `maps_resnet18` with group norm,
the stride in the second 3x3 convolution of a block, and a bias in its 1x1 shortcuts. At 22x20x20 and 9 classes:
11,185,706 parameters.

Groups: up1, up2, those of `maps_resnet18`, classes. Blocks: up1, up2, those of `maps_resnet18`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.types import Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, scaled
from fl_engine.models.maps_resnet18 import Trunk
from fl_engine.models.network import ExitNetwork

UP = {"up1": 3, "up2": 3}
KERNEL = 7


@dataclass(frozen=True)
class WidarResNet18(ExitNetwork):
    input_shape: tuple[int, int, int]

    axes: ClassVar[tuple[str, ...]] = ("moments", "velocities", "velocities")
    published_input: ClassVar[tuple[int, ...]] = (22, 20, 20)
    published_outputs: ClassVar[int] = 9

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in UP.items()} | self._trunk().groups()

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        inside = FREE
        for name in UP:
            slots[f"{name}.conv.weight"] = Slot(name, (inside, Axis(name), FREE, FREE))
            slots[f"{name}.conv.bias"] = Slot(name, (Axis(name),))
            inside = Axis(name)
        return slots | self._trunk().slots(inside)

    def skippable(self) -> list[str]:
        return self._trunk().skippable()

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        c_in = self.input_shape[0]
        for name in UP:
            c_out = layout.width(spec, name)
            layers[name] = nn.Sequential(OrderedDict(conv=nn.ConvTranspose2d(c_in, c_out, KERNEL), relu=nn.ReLU()))
            c_in = c_out
        return layers | self._trunk().layers(layout, spec, c_in)

    def exit_points(self) -> tuple[str, ...]:
        return self._trunk().exit_points()

    def prunable(self) -> tuple[Prunable, ...]:
        up = [Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in UP]
        return (*up, *self._trunk().prunable())

    def _trunk(self) -> Trunk:
        return Trunk("group", self.width, late_stride=True, shortcut_bias=True)
