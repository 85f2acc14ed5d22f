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
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.exits import assemble, check_exits, slots_with_exits
from fl_engine.models.layers import FREE, check_sizes, check_spec, conv_slots, scaled
from fl_engine.models.maps_resnet18 import Trunk

DOWN = {"down1": 3, "down2": 3}
LEAST = (64, 28)
"""The fewest packets, and subcarriers of all antennas, for which the 10x11 convolution fits into its input map."""


class AsPackets(nn.Module):
    """Antennas, subcarriers and packets (B, A, S, P) -> maps (B, 1, P, A * S)."""

    def forward(self, x_basp: Tensor) -> Tensor:
        return x_basp.permute(0, 3, 1, 2).flatten(2).unsqueeze(1)


@dataclass(frozen=True)
class UTHARResNet18:
    input_shape: tuple[int, int, int]
    """(1, P, S): packets, and subcarriers of all antennas; or (A, S, P): antennas, subcarriers of each, packets."""
    outputs: int
    width: float = 1.0
    """Multiplies the channels of the first two convolutions, the stem and every stage."""
    exits: tuple[str, ...] = ()
    """Blocks behind which an early exit sits: some of `exit_points`, in that order."""

    published_input: ClassVar[tuple[int, ...]] = (1, 250, 90)
    published_outputs: ClassVar[int] = 7

    def __post_init__(self) -> None:
        check_sizes(self, "(1, P, S) or (A, S, P) of packets, subcarriers and antennas", 3, self.width)
        first, second, third = self.input_shape
        packets, carriers = (second, third) if first == 1 else (third, first * second)
        if packets < LEAST[0] or carriers < LEAST[1]:
            raise ModelError(
                f"UTHARResNet18 takes at least {LEAST[0]} packets of {LEAST[1]} subcarriers, got {packets} of "
                f"{carriers}: pad the samples, or choose another network"
            )
        check_exits("UTHARResNet18", self.exits, self.exit_points())

    def layout(self) -> ParamLayout:
        trunk = self._trunk()
        groups = {name: scaled(n, self.width) for name, n in DOWN.items()}
        slots: dict[str, Slot] = {}
        inside = FREE
        for name in DOWN:
            slots |= conv_slots(f"{name}.conv", name, inside, Axis(name))
            inside = Axis(name)
        slots = slots_with_exits(slots | trunk.slots(inside), self.exits)
        return ParamLayout(groups | trunk.groups() | {HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, *input_shape) -> logits (B, kept classes); with exits, a tuple of these, one per output kept."""
        layout, trunk = self.layout(), self._trunk()
        check_spec(layout, spec, skippable=trunk.skippable(), exits=self.exits)
        first, second = (layout.width(spec, name) for name in DOWN)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.input_shape[0] > 1:
            layers["packets"] = AsPackets()
        layers["down1"] = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, first, 7, (3, 1)), relu=nn.ReLU()))
        layers["down_pool"] = nn.MaxPool2d(2)
        layers["down2"] = nn.Sequential(OrderedDict(conv=nn.Conv2d(first, second, (10, 11)), relu=nn.ReLU()))
        return assemble(layers | trunk.layers(layout, spec, second), layout, spec, self.exits)

    def exit_points(self) -> tuple[str, ...]:
        """The blocks behind which an early exit may sit, in network order."""
        return self._trunk().exit_points()

    def prunable(self) -> tuple[Prunable, ...]:
        down = [Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in DOWN]
        return (*down, *self._trunk().prunable())

    def _trunk(self) -> Trunk:
        return Trunk("group", self.width, late_stride=True, shortcut_bias=True)
