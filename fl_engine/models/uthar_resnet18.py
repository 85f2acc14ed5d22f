"""The ResNet18 of FedAIoT for UT-HAR (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of
Things, Michigan State University 2023, section 2.3.3.2), after SenseFi (Yang et al., Patterns 4(3), 2023): it
recognises a person's activity from the amplitude of a Wi-Fi signal.

A 7x7 convolution of stride 3 along the packets, a 2x2 max pool and a 10x11 convolution; both convolutions have three
output channels, bias and ReLU, and no padding. Then follows `maps_resnet18` with group norm, the stride in the second
3x3 convolution of a block, and a bias in its 1x1 shortcuts. At 1x250x90 and 7 classes: 11,182,142 parameters.

Samples of several channels, 3x30x250 in the text, are antennas, subcarriers and packets. They are rearranged to the
1x250x90 of the authors' code, so the network is the same.

Departs from the authors' code, whose last version has batch norm; the text says group norm.

Groups: down1, down2, those of `maps_resnet18`, classes. Blocks: down1, down2, those of `maps_resnet18`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, conv_slots, scaled
from fl_engine.models.maps_resnet18 import Trunk
from fl_engine.models.network import ExitNetwork

DOWN = {"down1": 3, "down2": 3}
LEAST = (64, 28)
"""The fewest packets, and subcarriers of all antennas, for which the 10x11 convolution fits into its input map."""


class AsPackets(nn.Module):
    """Antennas, subcarriers and packets (B, A, S, P) -> maps (B, 1, P, A * S)."""

    def forward(self, x_basp: Tensor) -> Tensor:
        return x_basp.permute(0, 3, 1, 2).flatten(2).unsqueeze(1)


@dataclass(frozen=True)
class UTHARResNet18(ExitNetwork):
    input_shape: tuple[int, int, int]
    """(1, P, S): packets, and subcarriers of all antennas; or (A, S, P): antennas, subcarriers of each, packets."""

    axes: ClassVar[tuple[str, ...]] = ("antennas", "subcarriers", "packets")
    published_input: ClassVar[tuple[int, ...]] = (1, 250, 90)
    published_outputs: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second, third = self.input_shape
        packets, carriers = (second, third) if first == 1 else (third, first * second)
        if packets < LEAST[0] or carriers < LEAST[1]:
            raise ModelError(
                f"UTHARResNet18 takes at least {LEAST[0]} packets of {LEAST[1]} subcarriers, got {packets} of "
                f"{carriers}. Pad the samples, or choose another network"
            )

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in DOWN.items()} | self._trunk().groups()

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        inside = FREE
        for name in DOWN:
            slots |= conv_slots(f"{name}.conv", name, inside, Axis(name))
            inside = Axis(name)
        return slots | self._trunk().slots(inside)

    def skippable(self) -> list[str]:
        return self._trunk().skippable()

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        first, second = (layout.width(spec, name) for name in DOWN)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.input_shape[0] > 1:
            layers["packets"] = AsPackets()
        layers["down1"] = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, first, 7, (3, 1)), relu=nn.ReLU()))
        layers["down_pool"] = nn.MaxPool2d(2)
        layers["down2"] = nn.Sequential(OrderedDict(conv=nn.Conv2d(first, second, (10, 11)), relu=nn.ReLU()))
        return layers | self._trunk().layers(layout, spec, second)

    def exit_points(self) -> tuple[str, ...]:
        return self._trunk().exit_points()

    def prunable(self) -> tuple[Prunable, ...]:
        down = [Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in DOWN]
        return (*down, *self._trunk().prunable())

    def _trunk(self) -> Trunk:
        return Trunk("group", self.width, late_stride=True, shortcut_bias=True)
